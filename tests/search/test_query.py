"""What a search finds, and how the command prints it."""

import csv
import io
import json
import os
import re
from pathlib import Path

import numpy as np
from made import make_ensemble
from PIL import Image
from starlette.testclient import TestClient

import nearkin as nk
from nearkin.data.image_files import list_images
from nearkin.files import read_json
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.search.query import printed, search_images, threshold_of
from nearkin.serve import make_app


def test_nearest_items_are_of_the_same_class_without_the_query(collection):
    index = open_index(collection / "index")
    model = nk.load(collection / "run")
    images = list_images([collection / "pictures"])
    answers, bad = search_images(index, model, images, k=3)
    assert not bad
    threshold = threshold_of(index)
    assert threshold is not None
    for image, answer in zip(images, answers, strict=True):
        assert answer.query == image.path
        assert image.path not in [hit.id for hit in answer.hits]
        assert [hit.label for hit in answer.hits] == [image.label] * 3  # noise around one picture per class
        assert answer.same_class == [hit.similarity >= threshold["similarity"] for hit in answer.hits]
    assert any(same for answer in answers for same in answer.same_class)
    answers, _ = search_images(index, model, images[:1], k=20, labels=["class 2"])
    assert [hit.label for hit in answers[0].hits] == ["class 2"] * 4


def test_threshold_of_the_run_comes_before_that_of_the_index(collection):
    index = open_index(collection / "index")
    assert index.meta["threshold"] == threshold_of(index) == read_json(collection / "run" / "threshold.json")
    index.meta["run"] = None
    assert threshold_of(index) == index.meta["threshold"]
    index.meta["threshold"] = None
    assert threshold_of(index) is None
    assert threshold_of(index, collection / "run") == read_json(collection / "run" / "threshold.json")
    images, model = list_images([collection / "pictures"]), nk.load(collection / "run")
    with TestClient(make_app(index, None, run=collection / "run")) as page:
        assert (
            page.get("/api/about").json()["threshold"]["similarity"]
            == threshold_of(index, collection / "run")["similarity"]
        )
    without, moved = (search_images(index, model, images, run=run)[0] for run in (None, collection / "run"))
    assert {same for answer in without for same in answer.same_class} == {None}
    assert {same for answer in moved for same in answer.same_class} == {True, False}


def test_cross_validation_folder_can_be_embedded_indexed_and_searched(collection, command, tmp_path):
    run = make_ensemble(tmp_path / "cv", names=("x",))
    pictures, query = collection / "pictures", collection / "pictures" / "class 1" / "2.png"
    assert command("calibrate", run, "--data", f"folder:{collection / 'others'}")[0] == 0
    assert command("embed", run, pictures, "-o", tmp_path / "out.npz")[0] == 0
    assert command("index", run, pictures, "-o", tmp_path / "index")[0] == 0
    code, out, _ = command("search", tmp_path / "index", query, "-k", 3, "--json")
    found = json.loads(out)
    assert [hit["label"] for hit in found["queries"][0]["hits"]] == ["class 1"] * 3
    assert found["threshold"] == read_json(run / "threshold.json")
    index = open_index(tmp_path / "index")
    paths = [image.path for image in list_images([pictures])]
    parts = [nk.load(run / name).embed(paths).numpy() for name in ("fold-1", "fold-2")]
    np.testing.assert_allclose(index.embeddings(paths), np.hstack(parts) / 2**0.5, atol=1e-6)
    with np.load(tmp_path / "out.npz") as held:
        np.testing.assert_allclose(held["embeddings"], index.embeddings(held["paths"].tolist()), atol=1e-6)
    code, _, err = command("search", tmp_path / "index", query, "--run", run / "fold-1")
    assert code == 2
    assert "another model" in err


def test_search_prints_tables_csv_and_json(collection, command, monkeypatch, tmp_path):
    query = collection / "pictures" / "class 1" / "2.png"
    code, out, err = command("search", collection / "index", query, "-k", 3)
    assert (code, err) == (0, "")
    assert len(re.findall(r"[01]\.\d{4} +class 1 .*class 1/\d.png\n", out)) == 3, out
    assert "other label" not in out
    assert "Same class: a similarity of" in out
    code, out, _ = command("search", collection / "index", query, "--label", "class 0", "--json")
    answer = json.loads(out)["queries"][0]
    assert (answer["path"], answer["label"]) == (str(query), "class 1")
    assert [hit["label"] for hit in answer["hits"]] == ["class 0"] * 4
    assert set(answer["hits"][0]) == {"id", "path", "label", "similarity", "kin"}
    assert command("search", collection / "index", query, "--label", "class 0", "--format", "json")[1] == out
    code, out, err = command("search", collection / "index", query, "-k", 5, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["rank"] for row in rows] == list("12345")
    assert {(row["query"], row["query_label"]) for row in rows} == {(str(query), "class 1")}
    assert all(Path(row["path"]).parent.name == row["label"] for row in rows)
    assert {row["same_class"] for row in rows} <= {"yes", "no"}
    assert "Same class: a similarity of" in err
    assert command("search", collection / "index", query, "--format", "csv", "--json")[0] == 2


def test_tables_of_a_narrow_terminal_do_not_break_paths(collection, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    pictures = [collection / "pictures" / "class 1" / f"{n}.png" for n in range(3)]
    found, _ = search_images(open_index(collection / "index"), nk.load(collection / "run"), list_images(pictures), k=9)
    for answer in found:
        header, *rows = printed(answer).splitlines()[1:]
        assert [row.endswith(hit.path) for row, hit in zip(rows, answer.hits, strict=True)] == [True] * 9
        assert ["other label" in row for row in rows] == [hit.label != "class 1" for hit in answer.hits]
        assert {row.index(hit.path) for row, hit in zip(rows, answer.hits, strict=True)} == {header.index("path")}


def test_label_of_a_query_comes_from_the_index_or_from_its_folder(collection, tmp_path):
    index, model = open_index(collection / "index"), nk.load(collection / "run")
    for folder in ("class 2", "monday"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (40, 40)).save(tmp_path / folder / "new.png")
    known = collection / "pictures" / "class 1" / "2.png"
    found, _ = search_images(index, model, list_images([known, tmp_path]), k=2)
    assert [answer.label for answer in found] == ["class 1", "class 2", None]
    assert found[2].same_label == [None, None]


def test_page_of_results_marks_labels_and_needs_no_other_file(collection, command, tmp_path):
    query, page = collection / "pictures" / "class 1" / "2.png", tmp_path / "page.html"
    assert str(page) in command("search", collection / "index", query, "-k", 5, "--html", page)[1]
    text = page.read_text()
    assert text.count("data:image/") == 6
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<script" not in text
    assert text.count('<li class="right"') == 3
    assert text.count('<li class="wrong"') == 2


def test_page_escapes_names(collection, command, tmp_path):
    odd = tmp_path / "<b>&'\"odd" / "<i>.png"
    odd.parent.mkdir()
    (tmp_path / "plain").mkdir()
    Image.new("RGB", (40, 40)).save(odd)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "plain" / "1.png")
    index_images(collection / "run", list_images([tmp_path]), tmp_path / "index")
    page = tmp_path / "page.html"
    assert command("search", tmp_path / "index", tmp_path / "plain", "--html", page)[0] == 0
    text = page.read_text()
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;b&gt;" in text


def test_names_that_are_not_utf8_are_printed_escaped(collection, command, tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9") / os.fsdecode(b"\xff.png")
    odd.parent.mkdir()
    Image.new("RGB", (40, 40)).save(odd)
    index_images(collection / "run", list_images([tmp_path]), tmp_path / "index")
    page = tmp_path / "page.html"
    code, out, err = command("search", tmp_path / "index", collection / "pictures" / "class 1", "--html", page)
    assert (code, err) == (0, "")
    assert re.search(r" caf\\xe9 .*caf\\xe9/\\xff\.png\n", out)
    assert "caf\\xe9/\\xff.png" in page.read_text()
    code, out, _ = command("search", tmp_path / "index", collection / "pictures" / "class 1", "--json")
    assert json.loads(out)["queries"][0]["hits"][0]["path"] == str(odd)  # exact


def test_unreadable_queries_are_listed_and_alone_an_error(collection, command, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    query = collection / "pictures" / "class 1" / "2.png"
    code, _, err = command("search", collection / "index", query, tmp_path / "bad.png")
    assert code == 0
    assert "1 image left out:" in err
    code, _, err = command("search", collection / "index", tmp_path / "bad.png")
    assert code == 2
    assert len(err.splitlines()) == 1
