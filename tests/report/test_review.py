"""`nearkin review` on letters with planted errors: 5 % wrong labels, 2 % changed copies, one class under two names."""

import csv

import pytest
import torch
from PIL import Image
from review_planted import letters, measure, plant

import nearkin as nk
from nearkin.report.review import KINDS, review

CLASSES, EACH = 30, 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on other letters than those reviewed."""
    plan = {"epochs": 12, "batch": 40, "dim": 64, "lr": 2e-3, "warmup": 0, "schedule": "cosine", "device": "cpu"}
    out = tmp_path_factory.mktemp("reviewer") / "run"
    return nk.train(data="glyphs(classes=120, samples=12)", method="norm_softmax", out=out, **plan)


@pytest.fixture(scope="module")
def planted(run, tmp_path_factory):
    """A folder with errors, what they are, and its review."""
    out = tmp_path_factory.mktemp("review")
    found = plant(out / "images", letters(classes=CLASSES, each=EACH), seed=1, wrong=0.05, copies=0.04)
    done = review(run.path, data=f"folder:{out / 'images'}", out=out / "review", device="cpu")
    return done, found, measure(done, found, out / "images")


def test_planted_copies_are_found(planted):
    _, _, figures = planted
    assert figures["copies"]["recall"] >= 0.85
    assert figures["copies"]["precision"] >= 0.85


def test_wrong_labels_are_found_far_more_often_than_by_chance(planted):
    done, found, figures = planted
    share = len(found.wrong) / len(done.collection.images)
    assert figures["wrong labels"]["precision"] >= 4 * share
    assert figures["wrong labels"]["recall"] >= 0.25


def test_every_finding_names_its_files(planted):
    done, _, _ = planted
    page = done.page.read_text()
    with done.table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(done.findings) > 0
    order = [list(KINDS).index(row["kind"]) for row in rows]
    assert order == sorted(order)
    for kind in KINDS:
        scores = [float(row["score"]) for row in rows if row["kind"] == kind]
        assert scores == sorted(scores, reverse=True)
    for row in rows:
        assert row["image"].replace("/", "/<wbr>") in page


def test_a_file_under_two_names_and_a_copied_class(run, tmp_path):
    images = letters(classes=8, each=6)
    where = {name: tmp_path / ("train" if number < 4 else "test") / name for number, name in enumerate(images)}
    for name, pictures in images.items():
        where[name].mkdir(parents=True)
        for number, pixels in enumerate(pictures):
            Image.fromarray(pixels[0].numpy()).save(where[name] / f"{number}.png")
    first, *_, last = sorted(images)
    (where[last] / "again.png").write_bytes((where[first] / "0.png").read_bytes())
    other = tmp_path / "train" / "letter 003 too"
    other.mkdir()
    for path in sorted(where["letter 003"].iterdir())[::2]:
        path.rename(other / path.name)
    done = review(run.path, data=f"folder:{tmp_path}", out=tmp_path / "review", device="cpu")
    (leak,) = [f for f in done.findings if f.kind == "leak" and "same file content" in f.words]
    names = [done.collection.images.sources[row].name for row in leak.rows]
    assert names == ["0.png", "again.png"]
    assert f"labelled {first} and {last}" in leak.words
    assert any("letter 003 too" in f.words for f in done.findings if f.kind == "classes")


def test_a_folder_without_a_test_part_is_reviewed_as_a_whole(run, tmp_path):
    plant(tmp_path / "train", letters(classes=2, each=4), seed=0, wrong=0, copies=0)
    done = review(run.path, data=f"folder:{tmp_path}", out=tmp_path / "review", device="cpu")
    assert len(done.collection.images) == 8
    assert done.collection.train.all()


def test_values_stored_per_image_are_shown(tmp_path):
    plant(tmp_path / "images", letters(classes=6, each=5), seed=0, wrong=0.1, copies=0.05)
    spec = "proxy_isa(hardness=1, sensitivity=0, margin=0, queue_from=1, filter_from=1)"
    plan = {"data": f"folder:{tmp_path / 'images'}", "backbone": "conv4", "device": "cpu", "batch": 6, "dim": 8}
    run = nk.train(**plan, method=spec, epochs=3, out=tmp_path / "run")
    column = review(run.path, device="cpu").collection.columns["times filtered"]
    assert column.nansum() > 0
    assert torch.equal(column.isnan(), ~review(run.path, device="cpu").collection.train)
