"""On a full disk every writer fails in a sentence, what was there stays, and the next attempt works."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_helpers import save_picture
from made import make_images, make_run
from torture.campaign import FULL, Attack, check_sentence, full_disk

import nearkin as nk
from nearkin.benchmark.results import Queries, read_queries, read_results, write_queries
from nearkin.data.datasets import load_dataset
from nearkin.data.image_files import list_images
from nearkin.data.pixels.open import open_files
from nearkin.errors import NearkinError
from nearkin.files import append_line, read_json, read_tensors, write_json, write_tensors
from nearkin.search.embed import embed_to_file
from nearkin.search.index import create_index, open_index
from nearkin.training import loop
from nearkin.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows cannot limit the size of files.")

ROOMS = (0, 1, 40, 400, 4000)


class Writer:
    """Something that writes state `n` into a folder, and reads which state is there."""

    def __init__(self, write: Callable[[Path, int], Any], read: Callable[[Path], Any], *, commits: int = 1) -> None:
        self.write, self.read, self.commits = write, read, commits


def text(number: int) -> list[str]:
    return [f"{number} {n}" for n in range(200)]


def add(folder: Path, number: int) -> None:
    if not (folder / "index").exists():
        create_index(folder / "index", dim=4, space="inner", kind="hnsw")
    with open_index(folder / "index") as index:
        index.remember(threshold={"similarity": 1.0})
        x = np.full((60, 4), number, np.float32)
        index.add(x, paths=[f"{n}.png" for n in range(60)], labels=[str(number)] * 60)
        index.build()


def added(folder: Path) -> Any:
    with open_index(folder / "index") as index:
        assert len(index) == 60
        (label,) = index.label_names()
        assert (index.embeddings() == int(label)).all()
        assert len(index.search(np.ones(4), 60)[0]) == 60
        return int(label)


def embed(folder: Path, number: int, name: str) -> None:
    run = folder.parent / "model"
    embed_to_file(run, nk.load(run), list_images([folder.parent / f"images {number % 2}"]), folder / name)


def embedded(folder: Path, name: str) -> Any:
    if name.endswith("npz"):
        with np.load(folder / name) as known:
            paths = known["paths"].tolist()
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        paths = parquet.read_table(folder / name)["path"].to_pylist()
    assert len(paths) == 4
    return int(Path(paths[0]).parents[1].name.split()[1])


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two folders of images, and room for the folders of writers."""
    top = tmp_path_factory.mktemp("full")
    make_run(top / "model")
    for number in range(2):
        make_images(top / f"images {number}", classes=2, each=2)
    return top


WRITERS = {
    "json": Writer(
        lambda folder, n: write_json(folder / "x.json", {"n": n, "text": text(n)}),
        lambda folder: read_json(folder / "x.json")["n"],
    ),
    "tensors": Writer(
        lambda folder, n: write_tensors(folder / "x", {"a": torch.full((900,), n)}, {"n": n}),
        lambda folder: read_tensors(folder / "x")[1]["n"],
    ),
    "log": Writer(
        lambda folder, n: RunFolder(folder).append({"event": "test", "step": n, "text": text(n)}),
        lambda folder: RunFolder(folder).events()[-1]["step"],
    ),
    "results": Writer(
        lambda folder, n: append_line(folder / "r", {"id": "a", "seed": n, "scores": {}, "text": text(n)}),
        lambda folder: read_results(folder / "r")["a"]["seed"],
    ),
    "queries": Writer(
        lambda folder, n: write_queries(folder / "q", Queries(torch.full((900,), n), {})),
        lambda folder: int(read_queries(folder / "q").labels[0]),
    ),
    "index": Writer(add, added, commits=2),  # the items, then their graph
    "npz": Writer(lambda folder, n: embed(folder, n, "x.npz"), lambda folder: embedded(folder, "x.npz")),
    "parquet": Writer(lambda folder, n: embed(folder, n, "x.parquet"), lambda folder: embedded(folder, "x.parquet")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_keeps_what_was_written(top, attack: Attack, monkeypatch, name):
    """Let the disk be full after 0 to some thousand bytes of a file (JSON, tensors, lines, index, embeddings)"""
    monkeypatch.setattr("nearkin.search.index.folder.MIN_ITEMS", 1)
    writer, folder = WRITERS[name], top / name
    folder.mkdir()
    writer.write(folder, 0)
    number = 0
    for rng in attack.cases(3, 60):
        room = rng.choice(ROOMS) if FULL else ROOMS[attack.case]
        try:
            with full_disk(room):
                writer.write(folder, number + 1)
        except NearkinError as error:
            check_sentence(str(error))
            attack.saw("refused in a sentence, state kept" if "make room" in str(error) else f"another error: {error}")
            if writer.commits > 1 and writer.read(folder) == number + 1:
                number += 1
            assert writer.read(folder) % 2 == number % 2
        else:
            attack.saw("fitted")
            number += 1
            assert writer.read(folder) % 2 == number % 2
        assert not list(folder.rglob(f"*.{os.getpid()}")), "a temporary file was left"
    assert not [outcome for outcome in attack.outcomes if outcome.startswith("another")]
    writer.write(folder, number + 1)
    assert writer.read(folder) % 2 == (number + 1) % 2


def test_full_disk_for_caches(tmp_path, attack: Attack, monkeypatch):
    """Let the disk be full while letters or decoded pictures are cached"""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    photos = [tmp_path / f"{number}.png" for number in range(3)]
    for path in photos:
        save_picture(path)
    for rng in attack.cases(2, 20):
        with full_disk(rng.choice(ROOMS[:4])):
            data = load_dataset("glyphs(classes=4, samples=1)")
            assert any("make room" in note for note in data.notes)
            with pytest.raises(NearkinError, match="Make room") as said:
                open_files(photos, short_side=8, device=torch.device("cpu"), cache=tmp_path / "cache")
        check_sentence(str(said.value))
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
        attack.saw("refused or noted in a sentence, nothing left")


@pytest.mark.skipif(not FULL, reason="This trains; it is a part of make torture.")
def test_full_disk_while_training(tmp_path, attack: Attack, monkeypatch):
    """Let the disk be full while a model trains; resume it, and compare it with an undisturbed run"""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    settings = {"data": "glyphs(classes=16, samples=4)", "epochs": 2, "batch": 16, "dim": 8, "device": "cpu"}
    whole = nk.train(**settings, out=tmp_path / "whole")
    for rng in attack.cases(0, 6):
        out = tmp_path / f"cut {attack.case}"
        with pytest.raises(NearkinError, match="make room"), full_disk(rng.choice([0, 300, 2000, 20_000])):
            nk.train(**settings, out=out)
        known = RunFolder(out).config.exists()
        cut = nk.train(out=out, resume=True) if known else nk.train(**settings, out=out)
        assert cut.read_result()["scores"] == whole.read_result()["scores"]
        assert cut.model.read_bytes() == whole.model.read_bytes()
        attack.saw("refused in a sentence, resumed identical")
