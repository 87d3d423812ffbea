"""Baselines without training: the untrained network, and the trunk's features without a head."""

import pytest
import torch

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.networks.backbones import build_trunk
from nearkin.networks.embedder import Embedder
from nearkin.space import Space
from nearkin.training.model import load_untrained
from nearkin.training.optimiser import lr_factor
from nearkin.training.plan import make_plan

SMALL = {"data": "glyphs(classes=8)", "backbone": "conv4", "batch": 20, "metrics": ("R@1",), "device": "cpu"}


@pytest.mark.parametrize("pool", ["avg", "avg+max"])
def test_without_a_head_the_embedding_is_the_pooled_features(pool):
    embedder = Embedder(build_trunk("conv4"), dim=0, pool=pool).eval()
    x = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert embedder.dim == 64
    assert torch.equal(embedder(x), Space.COSINE.project(embedder.features(x)))
    assert {id(p) for p in embedder.parameters()} == {id(p) for p in embedder.trunk.parameters()}


def test_zero_epochs_measure_the_untrained_network(tmp_path):
    run = nk.train(**SMALL, epochs=0, dim=0, out=tmp_path / "run")
    result = read_json(run.result)
    assert result["scores"] == result["before"]
    assert (result["steps"], result["kept_epoch"]) == (0, 0)
    model = nk.load(run.path, device="cpu")
    assert model.embedder.dim == 64
    assert model.embed(torch.zeros(2, 1, 40, 40, dtype=torch.uint8)).shape == (2, 64)


def test_a_network_without_a_head_can_be_trained(tmp_path):
    run = nk.train(**SMALL, epochs=1, dim=0, snapshots="1", method="vcpa", out=tmp_path / "run")
    result = read_json(run.result)
    assert result["scores"] != result["before"]


def test_a_schedule_of_no_epochs():
    for schedule in ("step", "cosine", "constant"):
        assert lr_factor(make_plan({"epochs": 0, "schedule": schedule}, {}), 0) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": -1}, "epochs must be at least 0, not -1"),
        ({"dim": -1}, "dim must be from 0 to 100000, not -1"),
        ({"dim": 0, "folds": 2}, "The models of folds need a head each"),
    ],
)
def test_impossible_settings_are_refused(settings, sentence):
    with pytest.raises(NearkinError, match=sentence):
        make_plan(settings, {})


@pytest.mark.parametrize("method", ["lifted", "proxy_anchor"])
def test_the_initial_network_of_a_run_is_rebuilt(tmp_path, method):
    run = nk.train(**{**SMALL, "batch": 16}, epochs=0, method=method, out=tmp_path / "run")
    again, kept = load_untrained(run.path, device="cpu"), nk.load(run.path, device="cpu")
    for name, tensor in kept.embedder.state_dict().items():
        torch.testing.assert_close(again.embedder.state_dict()[name], tensor)
