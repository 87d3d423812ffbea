"""BN-Inception and GoogLeNet against the public networks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from networks.trunks import maps, noise, same, unfolded
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.networks.backbones import BACKBONES, build_trunk
from nearkin.networks.inception import BNInception, GoogLeNet
from nearkin.networks.timm_models import import_timm


def test_bn_inception_has_the_keys_and_shapes_of_the_public_file() -> None:
    net = BNInception()
    shapes = {key: tuple(v.shape) for key, v in net.state_dict().items() if "num_batches" not in key}
    assert len(shapes) == 69 * 6 == 416 - 2  # 69 convolutions with batch norm; last_linear's two tensors have no place
    assert sum(p.numel() for p in net.parameters()) == 11_295_240 - 1000 * 1025
    assert shapes["conv1_7x7_s2.weight"] == (64, 3, 7, 7)
    assert shapes["conv1_7x7_s2.bias"] == shapes["conv1_7x7_s2_bn.running_var"] == (64,)
    assert shapes["conv2_3x3_reduce.weight"] == (64, 64, 1, 1)
    assert shapes["inception_3a_1x1.weight"] == (64, 192, 1, 1)
    assert shapes["inception_3c_double_3x3_2.weight"] == (96, 96, 3, 3)
    assert shapes["inception_4a_pool_proj.weight"] == (128, 576, 1, 1)
    assert shapes["inception_4e_double_3x3_reduce.weight"] == (192, 608, 1, 1)
    assert shapes["inception_5a_3x3_reduce.weight"] == (192, 1056, 1, 1)
    assert shapes["inception_5b_pool_proj_bn.weight"] == (128,)
    assert not {"inception_3c_1x1.weight", "inception_3c_pool_proj.weight", "inception_4e_1x1.weight"} & set(shapes)


def test_bn_inception_equals_the_public_network() -> None:
    """Values of the public implementation (pretrainedmodels 0.7.4), in float64, with the same made-up weights."""
    rng, net = np.random.default_rng(0), BNInception().double()
    state = net.state_dict()
    for key in sorted(key for key in state if "num_batches" not in key):
        w = torch.from_numpy(rng.standard_normal(tuple(state[key].shape)))
        if key.endswith("running_var"):
            w = w.square() + 0.5
        elif "_bn.weight" in key:
            w = 1 + w / 10
        elif w.ndim == 4:
            w = w * (2 / w[0].numel()) ** 0.5
        state[key] = w
    net.load_state_dict(state)
    y = maps(net, torch.from_numpy(rng.standard_normal((1, 3, 64, 64))))
    assert (y.mean().item(), y.std().item()) == pytest.approx((2.6824138206776187, 4.335435266000438), rel=1e-9)
    expected = [16.7103945077, 2.4823754851, 2.3942377594, 0.0, 7.2551489562, 0.0]
    assert y[0, ::200, 0, 1].tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("size", "side"), [(224, 7), (227, 7), (240, 8)])
def test_inception_maps_at_other_sizes(size: int, side: int) -> None:
    for net in (BNInception(), GoogLeNet()):
        assert maps(net, torch.zeros(1, 3, size, size)).shape == (1, 1024, side, side)


def test_bn_inception_loads_a_file_laid_out_as_the_public_one(bn_file: Path) -> None:
    made = build_trunk("bn_inception", weights=bn_file, size=64)
    state = torch.load(bn_file, weights_only=True)
    assert same(made.net, {key: v.squeeze(0) for key, v in state.items()})
    assert not any("last_linear" in key for key in made.state_dict())


@pytest.mark.parametrize("name", ["bn_inception", "googlenet"])
def test_weights_that_no_package_holds(name: str) -> None:
    with pytest.raises(NearkinError, match=r"path of the public file \w+-\w+\.pth, or weights='none'"):
        build_trunk(name)


def test_googlenet_equals_torchvision_bit_for_bit(tmp_path: Path) -> None:
    import_timm()  # torchvision may need a repair first
    from torchvision.models import GoogLeNet as Theirs

    torch.manual_seed(0)
    theirs = Theirs(aux_logits=True, init_weights=False, transform_input=True).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = 0.1 * torch.randn_like(module.running_mean)
            module.running_var = 0.5 + torch.rand_like(module.running_var)
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    ours = build_trunk("googlenet", weights=tmp_path / "checkpoint.pth", size=64)
    seen: list[Tensor] = []
    theirs.inception5b.register_forward_hook(lambda _module, _given, out: seen.append(out))
    theirs.transform_input = False
    x = noise(2, 3, 64, 64)
    maps(theirs, x)
    assert torch.equal(maps(unfolded(ours), x), seen[0])

    theirs.transform_input = True  # with ImageNet's mean and std before it: our 0.5
    pixels, imagenet = torch.rand(1, 3, 64, 64), BACKBONES["resnet50"].normalise
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in imagenet[:2])
    maps(theirs, (pixels - mean) / std)
    assert torch.allclose(maps(ours, (pixels - 0.5) / 0.5), seen[1], atol=1e-5)
