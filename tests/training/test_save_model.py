"""`Model.save`: a run folder from a model that was changed by hand."""

import pytest
import torch
from made import make_images
from torch import nn

import nearkin as nk
from nearkin.data.image_files import list_images
from nearkin.files import read_json
from nearkin.report.measured_runs import open_runs
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.training.cross_validation import cross_validate
from nearkin.training.export import export
from nearkin.training.measure_run import measure_run
from nearkin.training.run_folder import RunFolder

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "epochs": 0, "device": "cpu", "metrics": ("R@1", "MAP@R")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_images(folder / "photos", classes=8, each=2)
    return folder


@pytest.fixture(scope="module")
def model(place):
    """A model whose head was replaced by a smaller one."""
    run = nk.train(data=f"folder:{place / 'photos'}", out=place / "run", **TINY)
    model = nk.load(run.path, device="cpu")
    model.embedder.head.linear = nn.Linear(64, 3, bias=False)
    model.embedder.dim = 3
    model.save(place / "saved")
    return model


def test_a_saved_model_is_a_run(place, model):
    path, files = place / "saved", sorted((place / "photos").rglob("*.png"))
    assert torch.equal(nk.load(path, device="cpu").embed(files), model.embed(files))
    assert set(measure_run(path, device="cpu")) == {"R@1", "MAP@R"}
    index_images(path, list_images([place / "photos"]), place / "index", device="cpu")
    assert open_index(place / "index").search(model.embed(files[:1]).numpy(), k=1)[0][0].similarity > 0.999
    assert export(path, place / "model.pt2", images=files[:2]).difference < 1e-4
    text = (path / "README.md").read_text()
    assert "perhaps changed by hand since" in text
    assert "This model was not measured." in text


def test_a_run_may_start_from_a_saved_model(place, model):
    run = nk.train(start=place / "saved", out=place / "tuned", epochs=0, device="cpu")
    assert torch.equal(nk.load(run.path).embedder.head.linear.weight, model.embedder.head.linear.weight)


def test_what_needs_a_training_says_so(place, model):
    with pytest.raises(nk.NearkinError, match=r"written by Model\.save: there is no training to resume"):
        nk.train(out=place / "saved", resume=True)
    with pytest.raises(nk.NearkinError, match=r"written by Model\.save, which measures nothing"):
        open_runs([place / "saved"])
    with pytest.raises(nk.NearkinError, match="holds a run already"):
        model.save(place / "saved")


def test_another_network_is_refused(place, model, tmp_path):
    changed = nk.load(place / "saved", device="cpu")
    changed.embedder.trunk.net.add_module("more", nn.Conv2d(64, 64, 1))
    with pytest.raises(nk.NearkinError, match="changed network does not fit"):
        changed.save(tmp_path / "new")
    assert not RunFolder(tmp_path / "new").config.exists()


def test_joined_models_are_saved_as_one(place, tmp_path):
    runs = cross_validate(data=f"folder:{place / 'photos'}", out=place / "cv", folds=2, **TINY).runs
    joined = nk.load(runs[0].path, device="cpu")
    path = joined.save(tmp_path / "both")
    files = sorted((place / "photos").rglob("*.png"))
    assert torch.equal(nk.load(path, device="cpu").embed(files), joined.embed(files))
    assert read_json(RunFolder(path).config)["parts"] == ["fold-1", "fold-2"]
