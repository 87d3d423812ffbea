"""The kernels for a GPU compute what PyTorch computes in float64, gradients included."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from nearkin.data.pixels import crops
from nearkin.networks import fold_batch_norm
from nearkin.networks.backbones import build_trunk

kernels = pytest.importorskip("nearkin.networks.gpu_kernels", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def image(*shape):
    return torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last)


def check(function, reference, inputs, rtol=1e-5):
    """Compare values and gradients of two functions, the second in float64, for one random gradient."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    precise = [t.detach().double().requires_grad_() for t in inputs]
    got, want = function(*inputs), reference(*precise)
    gradient = torch.randn_like(got)
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, inputs, gradient), torch.autograd.grad(want, precise, gradient.double()), strict=True
    )
    for ours, exact in pairs:
        assert float((ours.double() - exact).norm()) <= rtol * float(exact.norm())


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, math.inf), (-math.inf, math.inf)])
def test_bias_and_activation(bounds):
    inputs = image(3, 40, 5, 6), torch.randn(40, device="cuda")
    check(
        lambda x, b: kernels.bias_activation(x * 1, b, *bounds),
        lambda x, b: (x + b[:, None, None]).clamp(*bounds),
        inputs,
    )


@pytest.mark.parametrize(
    ("channels", "side", "kernel", "stride", "padding"),
    [
        (24, (7, 9), 3, 1, (1, 1, 1, 1)),
        (40, (8, 8), 3, 2, (0, 1, 0, 1)),
        (72, (14, 14), 5, 2, (1, 2, 1, 2)),
        (16, (9, 40), 5, 1, (2, 2, 2, 2)),
    ],
)
def test_depthwise_convolution(channels, side, kernel, stride, padding):
    weight = torch.randn(channels, 1, kernel, kernel, device="cuda")
    inputs = image(2, channels, *side), weight, torch.randn(channels, device="cuda")

    def reference(x, w, b):
        return F.conv2d(F.pad(x, padding), w, b, stride=stride, groups=channels).clamp(0, 2)

    check(
        lambda x, w, b: kernels.depthwise(x, w, b, stride=stride, padding=padding, low=0.0, high=2.0), reference, inputs
    )


@pytest.mark.parametrize("shape", [(24, 1, 5, 5), (24, 300, 1, 1), (8, 3, 3, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_a_convolution(shape, affine):
    mean, variance = torch.randn(shape[0], device="cuda"), torch.rand(shape[0], device="cuda") + 0.1
    given = [image(*shape)] + [torch.randn(shape[0], device="cuda") for _ in range(2 * affine)]

    def both(weight, bias):
        return torch.cat([weight.flatten(), bias])

    def ours(w, gamma=None, beta=None):
        return both(*kernels.fold(w, mean, variance, gamma, beta, eps=1e-3, dtype=torch.float32))

    def reference(w, gamma=1.0, beta=0.0):
        a = (variance.double() + 1e-3).rsqrt() * gamma
        return both(w * a[:, None, None, None], beta - mean.double() * a)

    check(ours, reference, given)


def test_a_whole_network(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    trunk = build_trunk("lite0", weights="none").to("cuda", memory_format=torch.channels_last).eval()
    x, results, used = image(4, 3, 96, 96), [], []

    def convolve(*arguments):
        used.append(arguments)
        return real(*arguments)

    real = fold_batch_norm.convolve
    monkeypatch.setattr(fold_batch_norm, "convolve", convolve)
    for fits in (fold_batch_norm.fits_kernels, lambda *_: False):
        monkeypatch.setattr(fold_batch_norm, "fits_kernels", fits)
        y = trunk(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(trunk.parameters()), allow_unused=True)])
    assert len(used) == 49
    for ours, plain in zip(*results, strict=True):
        assert (ours is None) == (plain is None)
        if ours is not None:
            assert float((ours - plain).norm()) <= 1e-2 * float(plain.norm())  # float32, through 49 layers


def compiled():
    every = [k for k in vars(kernels).values() if hasattr(k, "device_caches")]
    return sum(len(cache[0]) for kernel in every for cache in kernel.device_caches.values())


def test_a_step_compiles_nothing_after_compile_kernels():
    trunk = build_trunk("lite0", weights="none").to("cuda", memory_format=torch.channels_last).eval()
    context = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
    fold_batch_norm.compile_kernels(trunk, torch.device("cuda"), context)
    before = compiled()
    for size in (96, 64):  # which compile nothing either
        with context():
            y = trunk(image(4, 3, size, size))
        torch.autograd.grad(y.float().square().sum(), list(trunk.parameters()), allow_unused=True)
    assert compiled() == before > 0


def test_resize_weights(monkeypatch):
    torch.manual_seed(0)
    draws, size = torch.rand(6, 2 * crops.TRIES + 3, device="cuda"), torch.randint(30, 50, (6, 2), device="cuda")
    flip = draws[:, -1] < 0.5
    for boxes in (
        crops.resized_boxes(size, draws[:, :-1], scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), size=24),
        crops.squashed_boxes(size, draws[:, :2], short_side=28, size=24),
        crops.plain_boxes(size, draws[:, :2], size=24),
    ):
        both = []
        for have in (True, False):
            monkeypatch.setattr(crops, "kernels_run", lambda _, have=have: have)
            both.append(crops.weights(boxes, 50, size=21, count=24, flip=flip, dtype=torch.float32))
        torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)
