"""Runs that train on all classes of their data, which leaves none to measure them on."""

import io
import json
import sys

import pytest
from made import make_images
from rich.console import Console

import nearkin as nk
from nearkin.cli import main
from nearkin.console import Reporter
from nearkin.data.datasets import describe
from nearkin.files import read_json
from nearkin.search.calibrate import calibrate
from nearkin.training.measure_run import measure_run

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all") / "photos"
    make_images(folder, classes=4, each=4)
    return folder


@pytest.fixture(scope="module")
def shipped(photos, tmp_path_factory):
    """A run on all classes, and what it said."""
    said = io.StringIO()
    reporter = Reporter(Console(file=said, width=300))
    out = tmp_path_factory.mktemp("all") / "run"
    run = nk.train(data=f"folder:{photos}", test="none", out=out, reporter=reporter, after_test=pytest.fail, **TINY)
    return run, said.getvalue()


def folders(tmp_path, *, test: bool = False):
    make_images(tmp_path / "photos" / "train", classes=3, each=2)
    if test:
        make_images(tmp_path / "photos" / "test", classes=4, each=2)
    return f"folder:{tmp_path / 'photos'}"


def table(tmp_path, *splits):
    rows = [f"{path},{path.parent.name}" for path in make_images(tmp_path / "photos", classes=4, each=2)]
    rows = [f"{row},{splits[number // 2 % len(splits)]}" if splits else row for number, row in enumerate(rows)]
    header = "path,label,split" if splits else "path,label"
    (tmp_path / "table.csv").write_text("\n".join([header, *rows]))
    return f"csv:{tmp_path / 'table.csv'}"


@pytest.mark.parametrize(
    ("make", "classes", "images"),
    [
        (lambda path: folders(path), 3, 6),  # only train/
        (lambda path: folders(path, test=True), 4, 14),  # classes of one name are one class
        (lambda path: table(path, "train"), 4, 8),
        (lambda path: table(path, "train", "test"), 4, 8),
        (lambda path: table(path), 4, 8),
        (lambda _: "glyphs(classes=8, samples=2)", 8, 16),
    ],
)
def test_all_classes_of_every_layout_train(tmp_path, make, classes, images):
    data = nk.load_dataset(make(tmp_path), test="none")
    assert (data.train.classes, len(data.train), len(data.test)) == (classes, images, 0)
    assert [part.part for part in describe(data)] == ["train"]
    assert f"All {classes} classes train, so nothing can be measured" in " ".join(data.notes)
    assert "the other" not in " ".join(data.notes)


@pytest.mark.parametrize("make", [folders, lambda path: table(path, "train")])
def test_data_without_test_images_name_the_flag(tmp_path, make):
    with pytest.raises(nk.NearkinError, match=r"has no test images: .* --test none"):
        nk.load_dataset(make(tmp_path))


def test_a_run_on_all_classes_says_what_it_could_not_measure(shipped):
    run, said = shipped
    assert "All 4 classes train, so nothing can be measured on this data set" in said
    result, config = read_json(run.result), read_json(run.config)
    assert (result["scores"], result["before"], result["queries"]) == ({}, {}, 0)
    assert config["resolved"]["training_classes"] == 4
    assert [event["event"] for event in run.events()] == ["epoch"]
    assert len(nk.load(run.path).names) == 4


def test_it_is_measured_only_on_other_data(shipped, tmp_path):
    run, _ = shipped
    with pytest.raises(nk.NearkinError, match="nothing to measure it on: name other images with --data"):
        measure_run(run.path)
    make_images(tmp_path / "others", classes=4, each=2, seed=5)
    scores = measure_run(run.path, data=f"folder:{tmp_path / 'others'}", device="cpu")
    assert set(scores) == set(read_json(run.config)["plan"]["metrics"])


def test_a_threshold_may_be_chosen_on_data_without_a_split(shipped, tmp_path):
    run, _ = shipped
    for path in make_images(tmp_path / "others" / "train", classes=5, each=6, seed=5):
        path.parent.with_name(f"new {path.parent.name}").mkdir(exist_ok=True)
        path.rename(path.parent.with_name(f"new {path.parent.name}") / path.name)
    found = calibrate(run.path, data=f"folder:{tmp_path / 'others'}", precision=0.1, device="cpu")
    assert found["classes"] == 5


@pytest.mark.parametrize("other", [{"select": "test"}, {"folds": 2}])
def test_settings_that_need_test_images_are_refused(other):
    with pytest.raises(nk.NearkinError, match="test=none leaves no test images"):
        nk.train(**TINY, test="none", **other)


def test_the_command_line_prints_no_score(photos, tmp_path, monkeypatch, capsys):
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    arguments = ["train", "--data", f"folder:{photos}", "--test", "none", "--out", str(tmp_path / "run"), *flags]
    monkeypatch.setattr(sys, "argv", ["nearkin", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "All classes trained, so no score could be measured." in printed
    assert "R@1" not in printed
    assert not (tmp_path / "run" / "neighbours.png").exists()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["scores"] == {}
