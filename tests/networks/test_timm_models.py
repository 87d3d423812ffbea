"""Trunks from timm, and its import with a torchvision that does not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks.trunks import maps, noise, same
from safetensors.torch import save_file

from nearkin.data.pixels.views import Normalise
from nearkin.errors import NearkinError
from nearkin.networks import timm_models
from nearkin.networks.backbones import build_trunk
from nearkin.networks.embedder import POOLS, Embedder
from nearkin.networks.timm_models import import_timm
from nearkin.training.model import build_embedder
from nearkin.training.plan import make_plan


def test_resnet50_has_torchvisions_keys() -> None:
    import_timm()
    from torchvision.models import resnet50

    with torch.device("meta"):
        theirs = resnet50()
    shapes = {key: v.shape for key, v in theirs.state_dict().items() if not key.startswith("fc.")}
    ours = build_trunk("resnet50", weights="none", size=64)
    assert {key: v.shape for key, v in ours.net.state_dict().items()} == shapes


def test_a_timm_trunk_returns_its_feature_map() -> None:
    made = build_trunk("test_resnet", weights="none", size=64)
    theirs = import_timm().create_model("test_resnet")
    x = noise(2, 3, 64, 64)
    assert maps(made, x).shape == (2, theirs.num_features, 2, 2)
    with torch.no_grad():
        assert torch.equal(maps(made, x), made.net.forward_features(x))
    assert made.normalise == Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # as timm says of this model
    assert build_trunk("test_resnet.r160_in1k", weights="none").size == 160


def test_a_channels_last_map_is_permuted() -> None:
    made = build_trunk("test_mambaout", weights="none", size=64)
    x = noise(2, 3, 64, 64)
    assert maps(made, x).shape == (2, made.width, 2, 2)
    assert torch.equal(maps(made, x).permute(0, 2, 3, 1), maps(made.net, x))


@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_pooled_by_timm_and_not_again(pool: str) -> None:
    made = build_trunk("test_vit", weights="none")
    x = noise(2, 3, made.size, made.size)
    out = maps(made, x)
    assert made.pooled
    assert out.shape == (2, made.width, 1, 1)
    with torch.no_grad():
        expected = made.net.forward_head(made.net.forward_features(x))
    assert torch.equal(Embedder(made, dim=8, pool=pool).features(x).detach(), expected)
    assert (expected < 0).any()  # which gem would have clamped


def test_a_transformer_at_another_size_loads_its_weights(tmp_path: Path) -> None:
    native = import_timm().create_model("test_vit")
    save_file(native.state_dict(), tmp_path / "vit.safetensors")
    larger = build_trunk("test_vit", weights=tmp_path / "vit.safetensors", size=192)
    assert larger.size == 192
    assert maps(larger, noise(1, 3, 192, 192)).shape == (1, 64, 1, 1)
    same_size = build_trunk("test_vit", weights=tmp_path / "vit.safetensors")
    assert same(same_size.net, native.state_dict())
    unlike = [key for key, v in larger.net.state_dict().items() if not torch.equal(v, same_size.net.state_dict()[key])]
    assert unlike == ["pos_embed"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lite", r"no backbone 'lite'\. Did you mean 'lite[012]'\? There are: lite0, .*conv4, and timm's"),
        ("resnt50", r"Did you mean 'resnet50'\?"),
        ("convnext_tinny", r"Did you mean 'convnext_tiny'\?"),
        ("resnet50.tv_in1", r"timm's resnet50 has no pretrained weights 'tv_in1'\. Did you mean 'tv_in1k'\?"),
        ("hf-hub:someone/model", r"no backbone 'hf-hub:someone/model'"),
    ],
)
def test_unknown_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence):
        build_trunk(name, weights="none")


@pytest.mark.parametrize(("name", "size"), [("conv4", 8), ("lite0", 0), ("bn_inception", -1), ("test_vit", 7)])
def test_unsuitable_sizes_are_refused(name: str, size: int) -> None:
    with pytest.raises(NearkinError, match=rf"cannot (take|build).*{size}"):
        build_trunk(name, weights="none", size=size)


def test_pretrained_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import_timm()
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        NearkinError, match=r"weights of test_resnet cannot be fetched .*path of a weights file, or weights="
    ):
        build_trunk("test_resnet")


ISOLATED = """
import sys, torch
import nearkin.networks.backbones
assert not {"timm", "torchvision"} & set(sys.modules), "imported before a network of timm is built"
try:
    import torchvision
except RuntimeError:
    pass
assert not hasattr(torch.ops.torchvision, "nms")
from nearkin.networks import timm_models
assert timm_models.import_timm().__name__ == "timm"
import torchvision, torchvision.half
assert torchvision.half.whole and len(timm_models._DECLARED) == 1
assert torch.ops.torchvision.nms and torch.ops.torchvision.qnms
timm_models.import_timm()
assert len(timm_models._DECLARED) == 1
"""


def test_a_torchvision_that_does_not_fit_is_repaired(tmp_path: Path) -> None:
    """A stand-in that fails as the real one does: an operator is missing, half the package is left in sys.modules."""
    for package in ("torchvision", "timm"):
        (tmp_path / package).mkdir()
    (tmp_path / "torchvision/half.py").write_text("import torch\nwhole = hasattr(torch.ops.torchvision, 'nms')\n")
    fails = "raise RuntimeError('operator torchvision::nms does not exist')"
    text = f"from torchvision import half\nif not half.whole:\n    {fails}\n"
    (tmp_path / "torchvision/__init__.py").write_text(text)
    (tmp_path / "timm/__init__.py").write_text("import torchvision\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ISOLATED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_torchvision_that_works_or_is_missing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()
    before = list(timm_models._DECLARED)
    timm_models._repair_torchvision()
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    timm_models._repair_torchvision()
    assert before == timm_models._DECLARED
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NearkinError, match="pip install timm torchvision"):
        import_timm()


def test_stochastic_depth_skips_more_towards_the_end_and_only_in_training() -> None:
    settings = {"backbone": "lite0", "weights": "none", "size": 32, "device": "cpu", "dim": 8}
    torch.manual_seed(0)
    embedder = build_embedder(make_plan({**settings, "drop_path": 0.2}, {}), "cosine")
    rates = [m.drop_path.drop_prob for m in embedder.modules() if hasattr(m, "drop_path")]
    assert rates == pytest.approx([0.2 * i / 16 for i in range(16)])
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(embedder.eval()(x), embedder(x))
    for module in embedder.modules():
        module.training = hasattr(module, "drop_prob")
    assert not torch.equal(embedder(x), embedder(x))
    with pytest.raises(NearkinError, match="no residual blocks"):
        build_embedder(make_plan({"backbone": "conv4", "drop_path": 0.2}, {}), "cosine")
