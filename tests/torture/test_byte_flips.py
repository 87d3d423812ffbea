"""A damaged file is refused in a sentence, or read as it was written; a damaged cache is rebuilt. Nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_helpers import save_picture
from made import make_run
from torture.campaign import Attack, damage

import nearkin as nk
from nearkin.benchmark.results import Queries, read_queries, read_results, write_queries
from nearkin.data.datasets import load_dataset
from nearkin.data.pixels.open import open_files
from nearkin.files import append_line, read_json, read_tensors, write_json
from nearkin.search.index import create_index, open_index
from nearkin.search.query import run_threshold
from nearkin.serve.map import Layout, cached_map
from nearkin.training.checkpoint import write_classes
from nearkin.training.run_folder import RunFolder


class Kind(NamedTuple):
    """A kind of file: one of it, and what is read from it."""

    file: Path
    read: Callable[[], Any]


def tensors(path: Path) -> Any:
    found, about = read_tensors(path)
    return {name: tensor.tolist() for name, tensor in found.items()}, about


def values(path: Path) -> Any:
    found = read_queries(path)
    return found.labels.tolist(), {name: value.tolist() for name, value in found.values.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder with a file of every kind, small."""
    run = RunFolder(make_run(tmp_path_factory.mktemp("flips") / "run", names=("x", "y")))
    write_classes(run.classes, nk.method("proxy_anchor", classes=2, dim=4), ["x", "y"])
    result = {"scores": {"R@1": 61.25}, "seed": 0, "steps": 8, "seconds": 1.5, "select": "last", "queries": 40}
    write_json(run.result, result)
    for step in range(8):
        run.append({"event": "epoch", "step": step, "loss": 1 / (step + 1)})
    write_json(run.path / "threshold.json", {"similarity": 0.75, "precision": 0.95, "on": "two classes"})
    for seed in range(4):
        append_line(run.path / "results.jsonl", {"id": f"run {seed}", **result, "seed": seed})
    write_queries(run.path / "queries.safetensors", Queries(torch.arange(9), {"R@1": torch.rand(9)}))
    return run


FILES: dict[str, Callable[[RunFolder], Kind]] = {
    "config.json": lambda run: Kind(run.config, lambda: read_json(run.config)),
    "result.json": lambda run: Kind(run.result, run.read_result),
    "threshold.json": lambda run: Kind(run.path / "threshold.json", lambda: run_threshold(run.path)),
    "model": lambda run: Kind(run.model, lambda: tensors(run.model)),
    "classes": lambda run: Kind(run.classes, lambda: tensors(run.classes)),
    "queries": lambda run: Kind(run.path / "queries.safetensors", lambda: values(run.path / "queries.safetensors")),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_of_a_run(run, attack: Attack, name):
    """Change bits, bytes or the length of a file of a run (settings, result, model, threshold, values per query)"""
    kind = FILES[name](run)
    whole, expected = kind.file.read_bytes(), kind.read()
    if isinstance(expected, dict):  # a damaged name may become an entry that nobody reads

        def read() -> Any:
            found = kind.read()
            return {key: found[key] for key in expected}
    else:
        read = kind.read
    try:
        for rng in attack.cases(12, 400):
            kind.file.write_bytes(damage(whole, rng))
            attack.compare(read, expected)
    finally:
        kind.file.write_bytes(whole)


def known_entries(found: list[Any], expected: list[Any]) -> bool:
    """Whether the first records are what was written; a damaged name may become an entry that nobody reads."""
    return all({k: one.get(k) for k in other} == other for one, other in zip(found, expected, strict=False))


@pytest.mark.parametrize("name", ["log.jsonl", "results.jsonl"])
def test_damaged_lines(run, attack: Attack, name):
    """Change a file of lines (log, results): lines at its end may be missing, as after a kill, and nothing else"""
    path = run.path / name

    def read() -> list[Any]:
        return run.events() if path == run.log else list(read_results(path).values())

    whole, expected = path.read_bytes(), read()
    try:
        for rng in attack.cases(12, 400):
            path.write_bytes(damage(whole, rng))
            attack.compare(lambda: known_entries(read(), expected), True)
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with segments, removed items and a graph."""
    folder = tmp_path_factory.mktemp("flips") / "index"
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearkin.search.index.folder.MIN_ITEMS", 1)
        with create_index(folder, dim=4, space="cosine", kind="hnsw") as made:
            for start in (0, 40, 60):
                names = [f"{number}.png" for number in range(start, start + 40)]
                made.add(rng.normal(size=(40, 4)), paths=names, labels=[name[0] for name in names])
            made.remove(["3.png", "70.png"])
            made.build()
    return folder


def searched(folder: Path) -> Any:
    with open_index(folder) as opened:
        queries = np.eye(4, dtype=np.float32)
        items = [list(column) for column in opened.items()]
        return items, opened.embeddings().tolist(), opened.search(queries, 5), opened.meta["recall"]


def test_damaged_index(index, attack: Attack, monkeypatch):
    """Change a file of an index (manifest, items, removed items, graph)"""
    pytest.importorskip("faiss")
    monkeypatch.setattr("nearkin.search.index.folder.MIN_ITEMS", 1)
    expected = searched(index)
    files = sorted(path for path in index.iterdir() if path.suffix)
    assert {path.name.split("-")[0] for path in files} == {"index.json", "items", "removed", "graph"}
    for rng in attack.cases(16, 600):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(damage(whole, rng))
        try:
            attack.compare(lambda: searched(index), expected)
        finally:
            path.write_bytes(whole)


def test_damaged_caches(tmp_path, attack: Attack, monkeypatch):
    """Change a file of a cache (letters, decoded pixels, maps): it is rebuilt with the same content"""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    photos = [tmp_path / f"{number}.png" for number in range(3)]
    for path in photos:
        save_picture(path)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)

    def letters() -> Any:
        return load_dataset("glyphs(classes=4, samples=1)").train.sources.tolist()

    def pixels() -> Any:
        where = {"device": torch.device("cpu"), "cache": tmp_path / "cache"}
        store, _ = open_files(photos, short_side=8, location="device", **where)
        assert store is not None
        return store.packed.tiles.tolist()

    def positions() -> Any:
        return cached_map(x, lambda: Layout(x[:, :2], "test"), folder=tmp_path / "cache").positions.tolist()

    expected = [letters(), pixels(), positions()]
    shutil.copytree(tmp_path / "cache", tmp_path / "whole")
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.*") if path.is_file())
    assert {path.suffix for path in files} == {".safetensors", ".npz", ".bin"}
    for rng in attack.cases(8, 120):
        path = rng.choice(files)
        shutil.rmtree(tmp_path / "cache")
        shutil.copytree(tmp_path / "whole", tmp_path / "cache")
        (tmp_path / "cache" / path).write_bytes(damage((tmp_path / "whole" / path).read_bytes(), rng))
        read = letters if path.name.startswith("glyphs") else positions if "maps" in path.parts else pixels
        assert read() == expected[[letters, pixels, positions].index(read)]
        attack.saw("same result")
