"""Index images with the command, and its errors."""

import os
import re
import sys
import tarfile
from pathlib import Path

import pytest
from made import make_images, make_run
from PIL import Image

from nearkin.files import read_json
from nearkin.search.index import create_index, open_index


def test_index_adds_changes_and_prunes(collection, command, tmp_path):
    pictures = tmp_path / "pictures"
    make_images(pictures)
    where = tmp_path / "index"
    code, out, _ = command("index", collection / "run", pictures, "-o", where)
    assert code == 0
    assert "12 images in" in out
    assert "12 new or changed, 0 unchanged" in out
    assert "Searches are exact." in out
    (pictures / "class 0" / "3.png").unlink()
    (pictures / "class 0" / "0.png").write_bytes(b"nothing")
    make_images(pictures, classes=4, each=1, seed=9)
    code, out, _ = command("index", collection / "run", pictures, "-o", where, "--prune")
    assert "12 images in" in out
    assert "4 new or changed, 8 unchanged, 1 removed" in out
    assert len(open_index(where)) == 12


def test_pruning_keeps_images_that_are_still_in_their_tar_file(collection, command, tmp_path):
    shards = tmp_path / "shards.tar"
    pictures = sorted((collection / "pictures").rglob("*.png"))
    for count, said in ((4, "4 new or changed, 0 unchanged)"), (3, "3 new or changed, 0 unchanged, 1 removed)")):
        with tarfile.open(shards, "w") as tar:
            for number, picture in enumerate(pictures[:count]):
                tar.add(picture, f"{number}.png")
        code, out, err = command("index", collection / "run", shards, "-o", tmp_path / "index", "--prune")
        assert code == 0, err
        assert said in out
    code, out, _ = command("index", collection / "run", shards, "-o", tmp_path / "index", "--prune")
    assert "0 new or changed, 3 unchanged)" in out


def test_index_says_which_names_mislead(collection, command, tmp_path):
    picture = Image.new("RGB", (24, 24), "red")
    picture.save(tmp_path / "photo.png", "EPS")
    picture.save(tmp_path / "other.png", "JPEG")
    code, out, err = command("index", collection / "run", *tmp_path.glob("*.png"), "-o", tmp_path / "index")
    assert code == 0
    assert re.search(r"1 because its content is EPS; .*: \S*photo\.png\n", err)
    assert "1 image is read by content" in err
    assert "other.png (JPEG)" in err
    query = (tmp_path / "other.png").rename(tmp_path / os.fsdecode(b"\xe9.png"))
    code, out, _ = command("search", tmp_path / "index", query)
    assert code == 0
    assert "1 image is read by content" in out
    assert r"\xe9.png (JPEG)" in out


def test_index_prints_recall_of_approximate_index(collection, command, monkeypatch, tmp_path):
    pytest.importorskip("faiss")
    monkeypatch.setattr("nearkin.search.index.folder.MIN_ITEMS", 10)
    where = tmp_path / "index"
    given = [collection / "run", collection / "pictures", "-o", where, "--kind", "hnsw"]
    code, out, err = command("index", *given)
    assert code == 0, err
    assert "Recall@10 of the hnsw index against an exact search: 1.000 (12 of its own images as queries)." in out
    assert open_index(where).meta["recall"] == {"value": 1.0, "k": 10, "queries": 12}


def test_missing_faiss_is_named_before_images_are_embedded(collection, command, monkeypatch, tmp_path):
    pytest.importorskip("faiss")
    create_index(tmp_path / "old", dim=8, space="cosine", kind="hnsw", run=collection / "run")
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr("nearkin.search.build.fill", lambda *_, **__: pytest.fail("images were embedded"))
    for where in ("old", "new"):
        code, _, err = command(
            "index", collection / "run", collection / "pictures", "-o", tmp_path / where, "--kind", "hnsw"
        )
        assert code == 2
        assert "needs faiss: pip install 'nearkin[search]'" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("index", "{run}", "{pictures}"), "--out FOLDER or --store URL"),
        (("index", "{run}", "nowhere", "-o", "{new}"), "no file or folder nowhere"),
        (("index", "{pictures}", "{pictures}", "-o", "{new}"), "run folder"),
        (("index", "{run}", "{pictures}", "-o", "{index}", "--kind", "hnsw"), "is exact, not hnsw"),
        (("index", "{other}", "{pictures}", "-o", "{index}"), "another model"),
        (("index", "{run}", "{pictures}", "-o", "{pictures}"), "choose a new folder"),
        (("index", "{run}", "{pictures}", "--store", "mysql://x/y"), "no store mysql"),
        (("search", "nowhere", "{pictures}"), "There is no index in nowhere"),
        (("search", "{index}", "{pictures}", "--run", "{other}"), "another model"),
        (("search", "{index}", "{pictures}", "-k", "0"), "-k"),
        (("search", "{index}", "{pictures}", "--label", "clas 1"), "Did you mean 'class 1'?"),
        (("search", "{index}", "{index}/index.json"), "not an image of a known format"),
        (("index", "{run}", "{pictures}", "--store", "folder"), "A store is named as postgresql://"),
        (("embed", "{run}", "{pictures}", "-o", "{new}"), ".parquet or .npz"),
        (("calibrate", "{run}"), "--data folder:PATH"),
        (("calibrate", "{run}", "--data", "folder:nowhere"), "nowhere"),
    ],
)
def test_wrong_input_prints_one_sentence_and_exits_with_2(collection, command, monkeypatch, tmp_path, arguments, words):
    other = make_run(tmp_path / "other", seed=1)
    places = {
        "run": collection / "run",
        "pictures": collection / "pictures",
        "index": collection / "index",
        "new": tmp_path / "new",
    }
    given = [argument.format(**places, other=other) for argument in arguments]
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*given)
    assert code == 2, err
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not Path(tmp_path / "new").exists()


def test_embed_and_calibrate_print_their_results(collection, command, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    given = [collection / "run", collection / "pictures", tmp_path / "bad.png", "-o", tmp_path / "out.npz"]
    code, out, err = command("embed", *given)
    assert code == 0
    assert "12 images embedded" in out
    reason = "it is not an image of a known format"
    assert err.endswith(f"1 image left out:\n  1 because {reason}: {tmp_path / 'bad.png'}\n")
    code, out, err = command("embed", *given[:-1], tmp_path / "strict.npz", "--strict")
    assert (code, out) == (2, "")
    assert f"strict forbids, the first: {tmp_path / 'bad.png'} ({reason})" in err
    assert not (tmp_path / "strict.npz").exists()
    run = make_run(tmp_path / "run")
    code, out, _ = command("calibrate", run, "--data", f"folder:{collection / 'others'}")
    assert code == 0
    assert "Same class above a similarity of" in out
    assert "6 classes, 30 images" in out
    assert read_json(run / "threshold.json")["precision"] == 0.95
