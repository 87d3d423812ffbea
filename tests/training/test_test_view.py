"""The settings test_size and test_crop: how test images are shown, kept in the model and followed everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made import make_images
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.data.image_files import list_images
from nearkin.files import read_json, write_json
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.training.export import describe, network_inputs
from nearkin.training.measure_run import measure_run

TINY = {"backbone": "conv4", "batch": 8, "dim": 8, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures, a run tested as it was trained, and one tested at a larger size."""
    top = tmp_path_factory.mktemp("views")
    paths = make_images(top / "images", classes=4, each=5)
    data = f"folder:{top / 'images'}"
    plain = nk.train(**TINY, data=data, out=top / "plain")
    larger = nk.train(**TINY, data=data, test_size=48, test_crop=0.9, out=top / "larger")
    return paths, plain, larger


def test_training_is_the_same_and_test_images_are_shown_larger(place):
    paths, plain, larger = place
    a, b = nk.load(plain.path), nk.load(larger.path)
    states = a.embedder.state_dict(), b.embedder.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert (a.test_size, a.short_side, a.size) == (32, 37, 32)
    assert (b.test_size, b.short_side, b.size) == (48, 53, 32)
    assert network_inputs(b, paths[:2]).shape == (2, 1, 48, 48)
    assert not torch.allclose(a.embed(paths), b.embed(paths), atol=1e-3)


def test_the_model_and_not_the_settings_beside_it_decide(place):
    paths, _, larger = place
    known, config = nk.load(larger.path).embed(paths), read_json(larger.config)
    write_json(larger.config, config | {"plan": config["plan"] | {"test_size": 0, "test_crop": 0.0}})
    again = nk.load(larger.path).embed(paths)
    write_json(larger.config, config)
    assert torch.equal(again, known)


def test_eval_index_and_export_follow_the_model(place, tmp_path):
    paths, _, larger = place
    assert measure_run(larger.path, device="cpu") == pytest.approx(read_json(larger.result)["scores"])
    index_images(larger.path, list_images([Path(paths[0]).parent]), tmp_path / "index")
    with open_index(tmp_path / "index") as index:
        ids = list(index.items().ids)
        np.testing.assert_allclose(index.embeddings(ids), nk.load(larger.path).embed(ids).numpy(), atol=1e-6)
    about = describe(nk.load(larger.path))
    assert about["input"]["shape"] == ["batch", 1, 48, 48]
    assert (about["size"], about["short_side"], about["stored_side"]) == (48, 53, 64)
    json.dumps(about)


def test_the_result_says_it(place):
    _, plain, larger = place
    said = {}
    for run in (plain, larger):
        said[run] = CliRunner().invoke(app, ["train", "--resume", "--out", str(run.path)]).output
    assert "trained at 32 px, tested at 48 px" in " ".join(said[larger].split())
    assert "tested at" not in said[plain]


def test_a_size_that_the_network_cannot_take_is_refused(place, tmp_path):
    paths, _, _ = place
    data = f"folder:{Path(paths[0]).parent.parent}"
    with pytest.raises(nk.NearkinError, match="cannot take test images of 8 × 8 pixels"):
        nk.train(**TINY, data=data, test_size=8, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
