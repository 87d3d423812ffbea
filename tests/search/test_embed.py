"""Embed images into files and indexes, with unreadable ones among them, and after a kill."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made import make_images, make_run
from PIL import Image

import nearkin as nk
from nearkin.data.image_files import list_images
from nearkin.data.pixels.image_bytes import read_bytes
from nearkin.errors import NearkinError
from nearkin.search import embed as embedding
from nearkin.search import stamps
from nearkin.search.embed import embed_to_file, fill
from nearkin.search.index import create_index, open_index
from nearkin.search.names import unescape_name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("embed") / "run")


@pytest.fixture
def pictures(tmp_path):
    """One folder per class, 12 images."""
    make_images(tmp_path / "pictures")
    return tmp_path / "pictures"


# Embedding into an index.


def test_only_new_and_changed_images_are_embedded(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 5)
    model = nk.load(run)
    index = create_index(tmp_path / "i", dim=8, space="cosine", run=run)
    assert fill(index, model, list_images([pictures]))[:2] == (12, 0)
    assert fill(index, model, list_images([pictures]))[:2] == (0, 12)
    paths = [image.path for image in list_images([pictures])]
    known = model.embed(paths)
    assert torch.allclose(torch.from_numpy(index.embeddings(paths)), known, atol=1e-6)
    make_images(pictures, classes=1, each=1, seed=5)  # another picture with the same name
    os.utime(pictures / "class 0" / "0.png", (1, 1))
    make_images(pictures, classes=4, each=5, seed=6)  # some of them new
    table = tmp_path / "list.csv"
    table.write_text("path,label\n" + f"{pictures / 'class 1' / '3.png'},another\n")
    filled = fill(index, model, list_images([pictures]))
    assert filled.kept + filled.added == len(index) == 20
    assert filled.added >= 8
    assert torch.allclose(torch.from_numpy(index.embeddings(paths)), model.embed(paths), atol=1e-6)
    assert fill(index, model, list_images([table]))[:2] == (1, 0)
    assert index.item(str(pictures / "class 1" / "3.png")).label == "another"


def test_unreadable_images_are_listed_and_the_others_embedded(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 3)
    for name in ("0", "1", "2"):
        (pictures / "class 0" / f"{name}.png").write_bytes(b"" if name == "0" else b"not an image")  # a whole chunk
    half = (pictures / "class 1" / "0.png").read_bytes()
    (pictures / "class 1" / "0.png").write_bytes(half[: len(half) // 2])
    index = create_index(tmp_path / "i", dim=8, space="cosine", run=run)
    filled = fill(index, nk.load(run), list_images([pictures]))
    assert filled.added == len(index) == 8
    assert [image.path.name for image in filled.bad] == ["0.png", "1.png", "2.png", "0.png"]
    assert "it is empty" in str(filled.bad[0])


# Embedding into a file.


def read(path: Path) -> tuple[list[str], list[str | None], np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as held:
            return held["paths"].tolist(), [x or None for x in held["labels"].tolist()], held["embeddings"]
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    assert table.schema.metadata[b"space"] == b"cosine"
    vectors = np.array(table["embedding"].to_pylist(), np.float32)
    return table["path"].to_pylist(), table["label"].to_pylist(), vectors


@pytest.mark.parametrize("name", ["out.npz", "out.parquet"])
def test_file_holds_names_that_are_not_utf8(run, pictures, tmp_path, name):
    pytest.importorskip("pyarrow")
    odd = (pictures / "class 0").rename(pictures / os.fsdecode(b"caf\xe9"))
    images = list_images([odd.parent])
    embed_to_file(run, nk.load(run), images, tmp_path / name)
    paths, labels, _ = read(tmp_path / name)
    if name == "out.parquet":
        assert any(path.endswith("caf\\xe9/0.png") for path in paths)
        paths, labels = ([unescape_name(text) for text in column] for column in (paths, labels))
    assert paths == [image.path for image in images]
    assert labels == [image.label for image in images]


@pytest.mark.parametrize("name", ["out.npz", "out.parquet"])
def test_file_holds_paths_labels_and_embeddings_in_order(run, pictures, tmp_path, name):
    pytest.importorskip("pyarrow")
    (pictures / "class 1" / "1.png").write_bytes(b"nothing")
    (pictures / "loose.png").write_bytes((pictures / "class 2" / "1.png").read_bytes())
    images = list_images([pictures])
    model = nk.load(run)
    filled = embed_to_file(run, model, images, tmp_path / name)
    paths, labels, vectors = read(tmp_path / name)
    good = [image for image in images if image.path != str(pictures / "class 1" / "1.png")]
    assert paths == [image.path for image in good]
    assert labels == [image.label for image in good]
    assert np.allclose(vectors, model.embed(paths).numpy(), atol=1e-6)
    assert len(filled.bad) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "pictures"]


def test_wrong_output_is_refused_before_the_work(run, pictures, tmp_path, monkeypatch):
    model, images = nk.load(run), list_images([pictures])
    with pytest.raises(NearkinError, match=r"\.parquet or \.npz"):
        embed_to_file(run, model, images, tmp_path / "out.txt")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NearkinError, match=r"nearkin\[search\]"):
        embed_to_file(run, model, images, tmp_path / "out.parquet")
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"?")
    with pytest.raises(NearkinError, match="None of the 12 images"):
        embed_to_file(run, model, images, tmp_path / "out.npz")


def test_unfinished_work_of_another_model_is_discarded(run, pictures, tmp_path):
    model, images = nk.load(run), list_images([pictures])
    other = make_run(tmp_path / "other", seed=3)
    with create_index(tmp_path / "out.npz.part", dim=8, space="cosine", run=other) as part:
        fill(part, nk.load(other), images)
    assert embed_to_file(run, model, images, tmp_path / "out.npz").added == 12


KILLED = """
import sys
from pathlib import Path
from nearkin import load
from nearkin.data.image_files import list_images
from nearkin.search import embed

embed.CHUNK = 2
embed.embed_to_file(Path(sys.argv[1]), load(sys.argv[1], device="cpu"), list_images([sys.argv[2]]), Path(sys.argv[3]))
"""


def test_killed_call_continues_when_repeated(run, tmp_path):
    make_images(tmp_path / "pictures", classes=6, each=10)
    arguments = [str(run), str(tmp_path / "pictures"), str(tmp_path / "out.npz")]
    part = tmp_path / "out.npz.part"
    child = subprocess.Popen([sys.executable, "-c", KILLED, *arguments])
    while child.poll() is None and not (part.exists() and len(list(part.glob("items-*"))) > 1):
        time.sleep(0.005)
    child.kill()
    child.wait()
    held = len(open_index(part))
    assert 0 < held < 60
    assert not (tmp_path / "out.npz").exists()
    images = list_images([tmp_path / "pictures"])
    filled = embed_to_file(run, nk.load(run), images, tmp_path / "out.npz")
    assert (filled.kept, filled.added) == (held, 60 - held)
    embed_to_file(run, nk.load(run), images, tmp_path / "whole.npz")
    stopped, whole = read(tmp_path / "out.npz"), read(tmp_path / "whole.npz")
    assert stopped[:2] == whole[:2]
    assert np.allclose(stopped[2], whole[2], atol=1e-6)
    assert not part.exists()


def replace(path: Path, data: bytes) -> None:
    """Replace a file by another of the same size, with the same time of change."""
    known = path.stat()
    assert len(data) == known.st_size
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))


def test_a_file_replaced_with_the_same_size_and_time_is_embedded_again(run, tmp_path, monkeypatch):
    model, folder = nk.load(run), tmp_path / "pictures"
    folder.mkdir()
    for name, colour in (("a.bmp", 10), ("b.bmp", 200), ("c.bmp", 90)):
        Image.new("RGB", (60, 60), (colour, 40, 255 - colour)).save(folder / name)
    index = create_index(tmp_path / "i", dim=8, space="cosine", run=run)
    images = list_images([folder])
    assert fill(index, model, images)[:2] == (3, 0)
    replace(folder / "a.bmp", (folder / "b.bmp").read_bytes())
    (folder / "c.bmp").chmod(0o600)  # changes the entry, not the content
    read: list[Path] = []
    monkeypatch.setattr(stamps, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    assert fill(index, model, images)[:2] == (1, 2)
    assert {path.name for path in read} == {"a.bmp", "c.bmp"}  # b is not in doubt
    expected = model.embed([image.path for image in images])
    assert torch.allclose(torch.from_numpy(index.embeddings([image.path for image in images])), expected, atol=1e-6)
    read.clear()
    assert fill(index, model, images)[:2] == (0, 3)
    assert not read  # all stamps are up to date


def test_stamps_of_the_first_version_are_size_and_time(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    known = (tmp_path / "a").stat()
    path = str(tmp_path / "a")
    assert stamps.is_unchanged(f"3-{known.st_mtime_ns}", path)
    assert not stamps.is_unchanged(f"4-{known.st_mtime_ns}", path)
    assert not stamps.needs_renewal(f"3-{known.st_mtime_ns}", path)
    assert not stamps.is_unchanged(None, path)
    assert stamps.is_unchanged(None, str(tmp_path / "gone"))
