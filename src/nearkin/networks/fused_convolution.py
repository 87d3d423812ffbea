"""Convolution, bias and activation in as few passes over the feature map as a GPU's kernels or oneDNN allow."""

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.data.pixels.kernel_check import kernels_run

with suppress(ImportError):  # no Triton: then `kernels_run` says so
    from nearkin.networks.gpu_kernels import WIDEST, bias_activation, block_of, depthwise, fold

CLAMPS = {nn.Identity: (-math.inf, math.inf), nn.ReLU: (0.0, math.inf), nn.ReLU6: (0.0, 6.0)}
"""Activations that are a clamp."""


def fits_kernels(conv: nn.Conv2d, x: Tensor, acts: Sequence[nn.Module]) -> bool:
    """Whether `convolve` computes this convolution; a compiled network has kernels of its own."""
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and all(type(act) in CLAMPS for act in acts)
        and conv.bias is None
        and conv.weight.dtype == torch.float32
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride[0] == conv.stride[1]
        and kernels_run(x.device)
    )


def _bounds(acts: Sequence[nn.Module]) -> tuple[float, float]:
    low = max((CLAMPS[type(act)][0] for act in acts), default=-math.inf)
    return low, min((CLAMPS[type(act)][1] for act in acts), default=math.inf)


def convolve(conv: nn.Conv2d, norm: Any, x: Tensor, acts: Sequence[nn.Module]) -> Tensor:
    """Return the activation of a convolution with the frozen batch norm after it."""
    low, high = _bounds(acts)
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    with torch.autocast("cuda", enabled=False):
        weight, bias = fold(
            conv.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps, dtype=x.dtype
        )
        left, right, top, bottom = padding = _padding(conv, x)
        if _own_depthwise(conv):
            return depthwise(x, weight, bias, stride=conv.stride[0], padding=padding, low=low, high=high)
        if (left, top) != (right, bottom):
            x, left, top = F.pad(x, padding), 0, 0
        out = F.conv2d(x, weight, None, conv.stride, (top, left), 1, conv.groups)
        return bias_activation(out.contiguous(memory_format=torch.channels_last), bias, low, high)


def fits_one_dnn(conv: nn.Conv2d, x: Tensor, acts: Sequence[nn.Module]) -> bool:
    """Whether `convolve_by_one_dnn` computes this convolution: on a CPU, where no gradient is wanted."""
    return (
        x.device.type == "cpu"
        and x.dtype == conv.weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and all(type(act) in CLAMPS for act in acts)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def convolve_by_one_dnn(conv: nn.Conv2d, weight: Tensor, bias: Tensor, x: Tensor, acts: Sequence[nn.Module]) -> Tensor:
    """Return the activation of a convolution with this weight and bias."""
    low, high = _bounds(acts)
    left, right, top, bottom = padding = _padding(conv, x)
    if (left, top) != (right, bottom):
        x, left, top = F.pad(x, padding), 0, 0
    clamps = math.isfinite(low) or math.isfinite(high)
    how = ("hardtanh", [low, high], "") if clamps else ("none", [], "")
    place = (top, left), conv.stride, conv.dilation, conv.groups
    out: Tensor = torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *place, *how)
    return out


def _own_depthwise(conv: nn.Conv2d) -> bool:
    """Whether a convolution is depthwise and strided: there cuDNN is slow, but not at stride 1."""
    single = conv.groups == conv.in_channels == conv.out_channels
    return single and conv.stride[0] > 1 and conv.kernel_size[0] <= WIDEST


def kernel_kind(conv: nn.Conv2d, acts: Sequence[nn.Module]) -> Hashable:
    """Return what decides which kernels `convolve` compiles for a convolution: Triton sees multiples of 16."""
    channels = conv.out_channels
    own = (conv.kernel_size, conv.stride) if _own_depthwise(conv) else None
    return own, block_of(channels), channels % 16 == 0, tuple(type(act) for act in acts)


def _padding(conv: Any, x: Tensor) -> tuple[int, int, int, int]:
    """Padding on the left, right, top and bottom."""
    if type(conv).__name__.removeprefix("Folded") != "Conv2dSame":  # timm's, padded as TensorFlow does
        return conv.padding[1], conv.padding[1], conv.padding[0], conv.padding[0]
    down, along = (
        max((-(-side // step) - 1) * step + kernel - side, 0)
        for side, step, kernel in zip(x.shape[2:], conv.stride, conv.kernel_size, strict=True)
    )
    return along // 2, along - along // 2, down // 2, down - down // 2
