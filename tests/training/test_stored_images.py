"""The setting `stored`: how large a run keeps its images, written into the run and its model."""

import dataclasses
import io

import pytest
import torch
from made import make_images
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.data.pixels.decode import Storage
from nearkin.files import read_json, read_tensors, write_json
from nearkin.training import images
from nearkin.training.plan import make_plan

TINY = {"backbone": "conv4", "batch": 8, "dim": 4, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures of 60 × 80, and a run that was trained on them."""
    top = tmp_path_factory.mktemp("stored")
    make_images(top / "images", classes=4, each=5)
    run = nk.train(**TINY, data=f"folder:{top / 'images'}", out=top / "run")
    return top, run


def test_a_run_and_its_model_say_how_images_are_kept(place):
    _, run = place
    assert read_json(run.config)["plan"]["stored"] == 2.0
    assert read_tensors(run.model)[1]["preprocessing"]["stored"] == 64
    assert nk.load(run.path).storage == Storage(64, enlarge=False)


def test_the_model_decides_and_not_the_settings_beside_it(place, tmp_path):
    top, run = place
    paths = sorted((top / "images").rglob("*.png"))
    known, config = nk.load(run.path).embed(paths), read_json(run.config)
    write_json(run.config, config | {"plan": config["plan"] | {"stored": 1.2}})
    again = nk.load(run.path).embed(paths)
    write_json(run.config, config)
    assert torch.equal(again, known)


def test_other_pixels_make_another_model(place, tmp_path):
    top, _ = place
    other = nk.train(**TINY, data=f"folder:{top / 'images'}", augment="resized_crop", stored=1.2, out=tmp_path / "low")
    same = nk.train(**TINY, data=f"folder:{top / 'images'}", augment="resized_crop", out=tmp_path / "high")
    a, b = (nk.load(each.path).embedder.state_dict() for each in (other, same))
    assert read_json(other.config)["plan"]["stored"] == 1.2
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_if_memory_is_short_images_are_kept_smaller_and_the_user_is_told(place, monkeypatch):
    top, _ = place
    monkeypatch.setattr(images, "free_memory", lambda _device: 1000)
    said, data = io.StringIO(), nk.load_dataset(f"folder:{top / 'images'}")
    plan = make_plan({**TINY, "data": f"folder:{top / 'images'}"}, {})
    settled = images.with_storage(plan, data, reporter=Reporter(Console(file=said, width=300)))
    assert round(settled.stored * 32) == 37
    assert "they are kept at 37 (--stored 2 reads larger ones from their files every time)" in said.getvalue()
    asked = make_plan({**TINY, "stored": 3.0, "data": f"folder:{top / 'images'}"}, {})
    assert images.with_storage(asked, data, reporter=Reporter()) is asked


def test_held_out_images_are_reduced_as_the_usual_test_images_are(place):
    top, run = place
    plan = make_plan({**TINY, "select": "validation", "stored": 2.0, "data": f"folder:{top / 'images'}"}, {})
    data = dataclasses.replace(nk.load_dataset(f"folder:{top / 'images'}", test="none"), test_short_side=40)
    model = nk.load(run.path, device="cpu")
    parts = images.training_images(plan, data)
    opened = [images.open_images(model, part, "any", reporter=Reporter()) for part in parts]
    assert [each.store.packed.size.amin(1).unique().tolist() for each in opened] == [[60], [40]]
    assert parts[1].take([0]).at_most == 40
