"""Thresholds against naive loops, and the commands from a folder of images to what a search finds."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made import make_ensemble, make_images, make_run
from PIL import Image
from starlette.testclient import TestClient

import nearkin as nk
from nearkin import cli
from nearkin.data.image_files import list_images
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.search import calibrate as calibrating
from nearkin.search.build import index_images
from nearkin.search.calibrate import apply, calibrate, choose, pairs
from nearkin.search.index import open_index
from nearkin.search.query import search_images, threshold_of
from nearkin.serve import make_app
from nearkin.space import Space

GLYPHS = "glyphs(classes=48, samples=6)"


# Thresholds.


def naive_choice(s, positive, precision, least):
    """The lowest similarity at which the precision holds, by looking at every pair for every candidate."""
    best = None
    for t in sorted(set(s), reverse=True):
        above = [k for value, k in zip(s, positive, strict=True) if value >= t]
        if len(above) >= least and sum(above) / len(above) >= precision:
            best = (t, sum(above) / len(above), sum(above) / sum(positive))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("precision", [0.3, 0.6, 0.9])
def test_the_threshold_is_the_lowest_that_is_precise_enough(seed, precision):
    rng = np.random.default_rng(seed)
    positive = rng.random(300) < 0.3
    s = (rng.normal(size=300) + 1.5 * positive).astype(np.float32)
    if seed % 2:
        s = s.round(1)  # many pairs are equally similar: they count together
    expected = naive_choice(s.tolist(), positive.tolist(), precision, calibrating.MIN_PAIRS)
    found = choose(s, positive, precision)
    assert (found is None) == (expected is None)
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(apply(s, positive, found.similarity), expected, rtol=1e-6)


def test_a_handful_of_pairs_is_no_evidence():
    s = np.linspace(1, 0, 100, dtype=np.float32)
    assert choose(s, np.arange(100) < 19, 0.97) is None
    found = choose(s, np.arange(100) < 20, 0.97)
    assert found is not None
    assert found.similarity == s[19]


@pytest.mark.parametrize("space", Space)
def test_pairs_are_all_pairs_once(space):
    x, labels = torch.randn(7, 3), torch.tensor([0, 1, 0, 2, 1, 0, 2])
    s, positive = pairs(x, labels, space)
    assert len(s) == 21
    assert positive.sum() == 3 + 1 + 1
    assert (s[:6] <= 1 + 1e-6).all() or space == "inner"


def test_calibration_is_on_classes_that_were_not_trained_on(tmp_path):
    data = nk.load_dataset(GLYPHS)
    trained = data.train.names[:18]  # the last quarter is held out
    run = make_run(tmp_path / "run", names=trained, data=GLYPHS, select="validation")
    found = calibrate(run, precision=0.2)
    assert found["classes"] == 6
    assert found["images"] == 36
    assert found["pairs"] == 36 * 35 // 2
    assert found["positive_pairs"] == 6 * 15
    assert found["reached"] >= 0.2
    assert "held-out training classes" in found["on"]
    assert "chose the epoch" in found["on"]
    assert read_json(run / "threshold.json") == found
    other = calibrate(run, precision=0.05, data=GLYPHS)  # all classes but the 18
    assert other["classes"] == 30
    assert "not trained on" in other["on"]
    with pytest.raises(NearkinError, match="choose a lower --precision"):
        calibrate(run, precision=0.999)
    with pytest.raises(NearkinError, match="between 0 and 1"):
        calibrate(run, precision=95)


def test_a_run_that_held_nothing_out_asks_for_other_images(tmp_path):
    names = nk.load_dataset(GLYPHS).train.names
    run = make_run(tmp_path / "run", names=names, data=GLYPHS)
    with pytest.raises(NearkinError, match="--data folder:PATH"):
        calibrate(run)
    make_images(tmp_path / "pictures", classes=6, each=5)
    found = calibrate(run, data=f"folder:{tmp_path / 'pictures'}", precision=0.9)
    assert found["classes"] == 6
    assert found["checked"] is not None
    everything = tuple(f"class {c}" for c in range(6))
    with pytest.raises(NearkinError, match="has none"):
        calibrate(make_run(tmp_path / "all", names=everything), data=f"folder:{tmp_path / 'pictures'}")


def test_too_many_images_are_sampled_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "MAX_IMAGES", 20)
    run = make_run(tmp_path / "run")
    make_images(tmp_path / "pictures", classes=4, each=10)
    found = calibrate(run, data=f"folder:{tmp_path / 'pictures'}", precision=0.5)
    assert (found["classes"], found["images"]) == (4, 20)


# Searching.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, 12 pictures of 3 classes, and their index, with a threshold."""
    top = tmp_path_factory.mktemp("search")
    run = make_run(top / "run", names=("x", "y"))
    make_images(top / "pictures")
    make_images(top / "others", classes=6, each=5, seed=3)
    calibrate(run, data=f"folder:{top / 'others'}", precision=0.9)
    index_images(run, list_images([top / "pictures"]), top / "index")
    return top


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """The command line in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["nearkin", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_nearest_of_an_image_are_its_kin_and_never_itself(made):
    index = open_index(made / "index")
    model = nk.load(made / "run")
    images = list_images([made / "pictures"])
    answers, bad = search_images(index, model, images, k=3)
    assert not bad
    threshold = threshold_of(index)
    assert threshold is not None
    for image, answer in zip(images, answers, strict=True):
        assert answer.query == image.path
        assert image.path not in [hit.id for hit in answer.hits]
        assert [hit.label for hit in answer.hits] == [image.label] * 3  # noise around one picture a class
        assert answer.same_class == [hit.similarity >= threshold["similarity"] for hit in answer.hits]
    assert any(same for answer in answers for same in answer.same_class)
    answers, _ = search_images(index, model, images[:1], k=20, labels=["class 2"])
    assert [hit.label for hit in answers[0].hits] == ["class 2"] * 4


def test_the_threshold_of_the_run_comes_before_the_one_of_the_index(made):
    index = open_index(made / "index")
    assert index.meta["threshold"] == threshold_of(index) == read_json(made / "run" / "threshold.json")
    index.meta["run"] = None
    assert threshold_of(index) == index.meta["threshold"]
    index.meta["threshold"] = None
    assert threshold_of(index) is None
    assert threshold_of(index, made / "run") == read_json(made / "run" / "threshold.json")
    images, model = list_images([made / "pictures"]), nk.load(made / "run")
    with TestClient(make_app(index, None, run=made / "run")) as page:
        assert (
            page.get("/api/about").json()["threshold"]["similarity"] == threshold_of(index, made / "run")["similarity"]
        )
    without, moved = (search_images(index, model, images, run=run)[0] for run in (None, made / "run"))
    assert {same for answer in without for same in answer.same_class} == {None}
    assert {same for answer in moved for same in answer.same_class} == {True, False}


def test_a_cross_validation_s_folder_embeds_indexes_calibrates_and_searches(made, monkeypatch, capsys, tmp_path):
    run = make_ensemble(tmp_path / "cv", names=("x",))
    pictures, query = made / "pictures", made / "pictures" / "class 1" / "2.png"
    assert command(monkeypatch, capsys, "calibrate", run, "--data", f"folder:{made / 'others'}")[0] == 0
    assert command(monkeypatch, capsys, "embed", run, pictures, "-o", tmp_path / "out.npz")[0] == 0
    assert command(monkeypatch, capsys, "index", run, pictures, "-o", tmp_path / "index")[0] == 0
    code, out, _ = command(monkeypatch, capsys, "search", tmp_path / "index", query, "-k", 3, "--json")
    found = json.loads(out)
    assert [hit["label"] for hit in found["queries"][0]["hits"]] == ["class 1"] * 3
    assert found["threshold"] == read_json(run / "threshold.json")
    index = open_index(tmp_path / "index")
    paths = [image.path for image in list_images([pictures])]
    parts = [nk.load(run / name).embed(paths).numpy() for name in ("fold-1", "fold-2")]
    np.testing.assert_allclose(index.embeddings(paths), np.hstack(parts) / 2**0.5, atol=1e-6)
    with np.load(tmp_path / "out.npz") as held:
        np.testing.assert_allclose(held["embeddings"], index.embeddings(held["paths"].tolist()), atol=1e-6)
    code, _, err = command(monkeypatch, capsys, "search", tmp_path / "index", query, "--run", run / "fold-1")
    assert code == 2
    assert "another model" in err


def test_search_prints_a_table_json_and_a_page(made, monkeypatch, capsys, tmp_path):
    query = made / "pictures" / "class 1" / "2.png"
    code, out, err = command(monkeypatch, capsys, "search", made / "index", query, "-k", 3)
    assert (code, err) == (0, "")
    assert len(re.findall(r"class 1/\d.png +class 1 +[01]\.\d{4}", out)) == 3, out
    assert "Same class: a similarity of" in out
    code, out, _ = command(monkeypatch, capsys, "search", made / "index", query, "--label", "class 0", "--json")
    answer = json.loads(out)["queries"][0]
    assert answer["path"] == str(query)
    assert [hit["label"] for hit in answer["hits"]] == ["class 0"] * 4
    assert set(answer["hits"][0]) == {"id", "path", "label", "similarity", "kin"}
    page = tmp_path / "page.html"
    code, out, _ = command(monkeypatch, capsys, "search", made / "index", query, "-k", 5, "--html", page)
    assert str(page) in out
    text = page.read_text()
    assert text.count("data:image/") == 6
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "<script" not in text


def test_a_page_shows_names_as_text(made, monkeypatch, capsys, tmp_path):
    odd = tmp_path / "<b>&'\"odd" / "<i>.png"
    odd.parent.mkdir()
    (tmp_path / "plain").mkdir()
    Image.new("RGB", (40, 40)).save(odd)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "plain" / "1.png")
    index_images(made / "run", list_images([tmp_path]), tmp_path / "index")
    page = tmp_path / "page.html"
    assert command(monkeypatch, capsys, "search", tmp_path / "index", tmp_path / "plain", "--html", page)[0] == 0
    text = page.read_text()
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;b&gt;" in text


def test_bad_queries_are_listed_and_only_bad_ones_are_an_error(made, monkeypatch, capsys, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    query = made / "pictures" / "class 1" / "2.png"
    code, out, _ = command(monkeypatch, capsys, "search", made / "index", query, tmp_path / "bad.png")
    assert code == 0
    assert "1 image of 2 left out" in out
    code, _, err = command(monkeypatch, capsys, "search", made / "index", tmp_path / "bad.png")
    assert code == 2
    assert len(err.splitlines()) == 1


# Indexing.


def test_index_adds_changes_and_prunes(made, monkeypatch, capsys, tmp_path):
    pictures = tmp_path / "pictures"
    make_images(pictures)
    where = tmp_path / "index"
    code, out, _ = command(monkeypatch, capsys, "index", made / "run", pictures, "-o", where)
    assert code == 0
    assert "12 images in" in out
    assert "12 new or changed, 0 unchanged" in out
    assert "Searches are exact." in out
    (pictures / "class 0" / "3.png").unlink()
    (pictures / "class 0" / "0.png").write_bytes(b"nothing")
    make_images(pictures, classes=4, each=1, seed=9)
    code, out, _ = command(monkeypatch, capsys, "index", made / "run", pictures, "-o", where, "--prune")
    assert "12 images in" in out
    assert "4 new or changed, 8 unchanged, 1 removed" in out
    assert len(open_index(where)) == 12


def test_index_says_the_recall_of_an_approximate_one(made, monkeypatch, capsys, tmp_path):
    pytest.importorskip("faiss")
    monkeypatch.setattr("nearkin.search.index.folder.MIN_ITEMS", 10)
    where = tmp_path / "index"
    given = [made / "run", made / "pictures", "-o", where, "--kind", "hnsw"]
    code, out, err = command(monkeypatch, capsys, "index", *given)
    assert code == 0, err
    assert "Recall@10 of the hnsw index against an exact search: 1.000 (12 of its own images as queries)." in out
    assert open_index(where).meta["recall"] == {"value": 1.0, "k": 10, "queries": 12}


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
def test_a_wrong_input_is_one_sentence_and_exit_code_2(made, monkeypatch, capsys, tmp_path, arguments, words):
    other = make_run(tmp_path / "other", seed=1)
    places = {"run": made / "run", "pictures": made / "pictures", "index": made / "index", "new": tmp_path / "new"}
    given = [argument.format(**places, other=other) for argument in arguments]
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, *given)
    assert code == 2, err
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not Path(tmp_path / "new").exists()


def test_embed_and_calibrate_print_what_they_did(made, monkeypatch, capsys, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    given = [made / "run", made / "pictures", tmp_path / "bad.png", "-o", tmp_path / "out.npz"]
    code, out, _ = command(monkeypatch, capsys, "embed", *given)
    assert code == 0
    assert "12 images embedded" in out
    assert "1 image of 13 left out:\n  Cannot use the image" in out
    run = make_run(tmp_path / "run")
    code, out, _ = command(monkeypatch, capsys, "calibrate", run, "--data", f"folder:{made / 'others'}")
    assert code == 0
    assert "Same class above a similarity of" in out
    assert "6 classes, 30 images" in out
    assert read_json(run / "threshold.json")["precision"] == 0.95
