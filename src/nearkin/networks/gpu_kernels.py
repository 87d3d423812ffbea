"""Triton kernels for feature maps in the channels-last layout, which PyTorch has no fast ones for.

`fold` gives a convolution the frozen batch norm after it. `bias_activation` adds a bias per channel and clamps in one
pass over the map, and its gradient is one more. `depthwise` is a convolution of each channel by itself, with bias and
clamp. Sums over positions are taken in parts of fixed order, so that the same input has the same gradient, bit for bit.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

PARTS = 528
"""About how many parts a sum over all positions is taken in: 4 for each multiprocessor of a large GPU."""

WIDEST = 5
"""The widest kernel of `depthwise`."""

TILE = {"BW": 16, "BC": 32, "num_warps": 1}
"""Columns and channels of a map that one program of `depthwise` computes. One tile for all maps is compiled once."""

BLOCK = 256
"""Weights that one program of `fold` scales at once."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit(do_not_specialize=["rows"])
def _add_and_clamp(x, bias, out, rows, channels, low, high, BR: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row, known = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), c < channels
    at, inside = row[:, None] * channels + c[None, :], (row < rows)[:, None] & known[None, :]
    value = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(bias + c, mask=known)[None, :]
    tl.store(out + at, tl.minimum(tl.maximum(value, low), high), mask=inside)


@triton.jit(do_not_specialize=["rows", "part"])
def _clamp_gradient(
    gradient,
    out,
    masked,
    sums,
    rows,
    channels,
    part,
    low,
    high,
    CLAMP: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0).to(tl.int64) * part
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, part, BR):
        row = first + start + tl.arange(0, BR)
        inside = (row < tl.minimum(first + part, rows))[:, None] & (c < channels)[None, :]
        at = row[:, None] * channels + c[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0)
        if CLAMP:
            y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.where((y > low) & (y < high), g, 0.0).to(g.dtype)
            tl.store(masked + at, g, mask=inside)
        total += g.to(tl.float32)
    tl.store(sums + tl.program_id(0) * channels + c, tl.sum(total, 0), mask=c < channels)


@triton.jit(do_not_specialize=["H", "W", "HO", "WO", "TOP", "LEFT"])
def _depthwise_forward(
    x, weight, bias, out, H, W, HO, WO, C, TOP, LEFT, low, high,
    S: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, to = tl.program_id(0), tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    n, top, known = row // HO, row % HO * S - TOP, c < C
    total = tl.zeros([BW, BC], tl.float32) + tl.load(bias + c, mask=known, other=0.0)[None, :]
    for i in tl.static_range(K):
        h = top + i
        if (h >= 0) & (h < H):
            line = x + (n * H + h).to(tl.int64) * W * C
            for j in tl.static_range(K):
                w = to * S - LEFT + j
                there = (w >= 0) & (w < W)
                value = tl.load(line + w[:, None] * C + c[None, :], mask=there[:, None] & known[None, :], other=0.0)
                factor = tl.load(weight + (i * K + j) * C + c, mask=known, other=0.0)
                total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    total = tl.minimum(tl.maximum(total, low), high)
    line = out + row.to(tl.int64) * WO * C
    tl.store(line + to[:, None] * C + c[None, :], total, mask=(to < WO)[:, None] & known[None, :])


@triton.jit(do_not_specialize=["H", "W", "HO", "WO", "TOP", "LEFT"])
def _depthwise_input_gradient(
    gradient, weight, out, H, W, HO, WO, C, TOP, LEFT,
    S: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # A program has the columns of one remainder by the stride: which outputs they are part of is then the same for all.
    row, rest, number = tl.program_id(0), tl.program_id(1) % S, tl.program_id(1) // S * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    n, bottom, right, known = row // H, row % H + TOP, rest + LEFT, c < C
    total = tl.zeros([BW, BC], tl.float32)
    for i in tl.static_range(K):
        h = bottom - i
        if (h >= 0) & (h % S == 0) & (h // S < HO):
            line = gradient + (n * HO + h // S).to(tl.int64) * WO * C
            for j in tl.static_range(K):
                if (right + K * S - j) % S == 0:
                    w = number + (right + K * S - j) // S - K
                    there = (w >= 0) & (w < WO)
                    value = tl.load(line + w[:, None] * C + c[None, :], mask=there[:, None] & known[None, :], other=0.0)
                    factor = tl.load(weight + (i * K + j) * C + c, mask=known, other=0.0)
                    total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    w = number * S + rest
    line = out + row.to(tl.int64) * W * C
    tl.store(line + w[:, None] * C + c[None, :], total, mask=(w < W)[:, None] & known[None, :])


@triton.jit
def _shifted(line, w, W, C, c, known):
    there = (w >= 0) & (w < W)
    return tl.load(line + w[:, None] * C + c[None, :], mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "part", "H", "W", "HO", "WO", "TOP", "LEFT"])
def _depthwise_weight_gradient(
    x, gradient, sums, rows, part, H, W, HO, WO, C, TOP, LEFT,
    S: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # A program has one row of the kernel, of at most 5 columns, whose sums it keeps in registers.
    first, i = tl.program_id(0) * part, tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    known = c < C
    sum0 = tl.zeros([BW, BC], tl.float32)
    sum1, sum2, sum3, sum4 = sum0, sum0, sum0, sum0
    for number in range(part):
        row = first + number
        n, h = row // HO, row % HO * S - TOP + i
        if (h >= 0) & (h < H) & (row < rows):
            line, to_line = x + (n * H + h).to(tl.int64) * W * C, gradient + row.to(tl.int64) * WO * C
            for start in range(0, WO, BW):
                to = start + tl.arange(0, BW)
                g = tl.load(to_line + to[:, None] * C + c[None, :], mask=(to < WO)[:, None] & known[None, :], other=0.0)
                g, w = g.to(tl.float32), to * S - LEFT
                sum0 += g * _shifted(line, w, W, C, c, known)
                if K > 1:
                    sum1 += g * _shifted(line, w + 1, W, C, c, known)
                if K > 2:
                    sum2 += g * _shifted(line, w + 2, W, C, c, known)
                if K > 3:
                    sum3 += g * _shifted(line, w + 3, W, C, c, known)
                if K > 4:
                    sum4 += g * _shifted(line, w + 4, W, C, c, known)
    at = sums + (tl.program_id(0) * K + i) * K * C + c
    tl.store(at, tl.sum(sum0, 0), mask=known)
    if K > 1:
        tl.store(at + C, tl.sum(sum1, 0), mask=known)
    if K > 2:
        tl.store(at + 2 * C, tl.sum(sum2, 0), mask=known)
    if K > 3:
        tl.store(at + 3 * C, tl.sum(sum3, 0), mask=known)
    if K > 4:
        tl.store(at + 4 * C, tl.sum(sum4, 0), mask=known)


@triton.jit(do_not_specialize=["size"])
def _fold_forward(
    weight, mean, variance, gamma, beta, out, bias, size, eps, GAMMA: tl.constexpr, BETA: tl.constexpr, B: tl.constexpr
):
    channel, at = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    a = tl.rsqrt(tl.load(variance + channel) + eps)
    if GAMMA:
        a *= tl.load(gamma + channel)
    place, inside = channel * size + at, at < size
    tl.store(out + place, tl.load(weight + place, mask=inside) * a, mask=inside)
    if tl.program_id(1) == 0:
        b = -tl.load(mean + channel) * a
        if BETA:
            b += tl.load(beta + channel)
        tl.store(bias + channel, b)


@triton.jit(do_not_specialize=["size"])
def _fold_backward(
    by_out, by_bias, weight, mean, variance, gamma, by_weight, by_gamma, size, eps, GAMMA: tl.constexpr, B: tl.constexpr
):
    channel = tl.program_id(0)
    r = tl.rsqrt(tl.load(variance + channel) + eps)
    a = r
    if GAMMA:
        a = r * tl.load(gamma + channel)
    total = tl.zeros([B], tl.float32)
    for start in range(0, size, B):
        at = start + tl.arange(0, B)
        place, inside = channel * size + at, at < size
        g = tl.load(by_out + place, mask=inside, other=0.0).to(tl.float32)
        total += g * tl.load(weight + place, mask=inside, other=0.0)
        tl.store(by_weight + place, g * a, mask=inside)
    if GAMMA:
        tl.store(by_gamma + channel, r * (tl.sum(total, 0) - tl.load(by_bias + channel) * tl.load(mean + channel)))


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def block_of(channels: int) -> tuple[int, int]:
    """How many rows and channels of a map one program has: two sizes, so that few kernels are compiled."""
    block = 32 if channels <= 32 else 128
    return 4096 // block, block


def _clamped(gradient: Tensor, out: Tensor | None, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the gradient where the output [B, C, H, W] is between low and high (None: everywhere), and its sum [C]."""
    rows, channels = _rows(gradient), gradient.shape[1]
    lines, block = block_of(channels)
    part = _ceil(_ceil(rows, max(1, PARTS // _ceil(channels, block))), lines) * lines
    count = _ceil(rows, part)
    masked = gradient if out is None else torch.empty_like(gradient)
    sums = torch.empty(count, channels, device=gradient.device)
    _clamp_gradient[(count, _ceil(channels, block))](
        gradient, out, masked, sums, rows, channels, part, low, high, CLAMP=out is not None, BR=lines, BC=block
    )
    return masked, sums.sum(0)


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        """Overwrites x."""
        rows, channels = _rows(x), x.shape[1]
        lines, block = block_of(channels)
        grid = _ceil(rows, lines), _ceil(channels, block)
        _add_and_clamp[grid](x, bias, x, rows, channels, low, high, BR=lines, BC=block)
        ctx.mark_dirty(x)
        ctx.bounds = low, high
        ctx.save_for_backward(x if math.isfinite(low) or math.isfinite(high) else None)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        return *_clamped(gradient, out, *ctx.bounds), None, None


def bias_activation(x: Tensor, bias: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Return clamp(x + bias, low, high) for a channels-last map [B, C, H, W], which is overwritten, and bias [C]."""
    out: Tensor = _BiasActivation.apply(x, bias, low, high)
    return out


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, low: float, high: float, stride: int, top: int, left: int,
        height: int, width: int,
    ) -> Tensor:  # fmt: skip
        kernel, (count, channels) = weight.shape[-1], x.shape[:2]
        taps = weight.flatten(1).mT.contiguous()  # [K·K, C]
        shape = (*x.shape[2:], height, width, channels, top, left)
        out = torch.empty(
            (count, channels, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        grid = count * height, _ceil(width, TILE["BW"]), _ceil(channels, TILE["BC"])
        _depthwise_forward[grid](x, taps, bias, out, *shape, low, high, S=stride, K=kernel, **TILE)
        ctx.save_for_backward(x, taps, out)
        ctx.about = shape, stride, kernel, (low, high)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, out = ctx.saved_tensors
        shape, stride, kernel, bounds = ctx.about
        (count, channels), (high, across, height) = x.shape[:2], shape[:3]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        gradient, by_bias = _clamped(gradient, out if any(map(math.isfinite, bounds)) else None, *bounds)
        dx = torch.empty_like(x)
        blocks, rows = _ceil(channels, TILE["BC"]), count * height
        grid = count * high, stride * _ceil(_ceil(across, stride), TILE["BW"]), blocks
        _depthwise_input_gradient[grid](gradient, taps, dx, *shape, S=stride, K=kernel, **TILE)
        part = _ceil(rows, max(1, 16 * PARTS // (blocks * kernel)))
        grid = _ceil(rows, part), blocks, kernel
        sums = torch.empty(grid[0], kernel * kernel, channels, device=x.device)
        _depthwise_weight_gradient[grid](x, gradient, sums, rows, part, *shape, S=stride, K=kernel, **TILE)
        dw = sums.sum(0).mT.reshape(channels, 1, kernel, kernel).to(taps.dtype)
        return dx, dw, by_bias, *[None] * 7


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    stride: int = 1,
    padding: tuple[int, int, int, int],
    low: float = -math.inf,
    high: float = math.inf,
) -> Tensor:
    """Return clamp(weight ∗ x + bias, low, high) of a channels-last map [B, C, H, W], weight [C, 1, K, K] and bias [C].

    `padding` is left, right, top, bottom, as of `F.pad`.
    """
    left, right, top, bottom = padding
    kernel = weight.shape[-1]
    height = (x.shape[2] + top + bottom - kernel) // stride + 1
    width = (x.shape[3] + left + right - kernel) // stride + 1
    out: Tensor = _Depthwise.apply(x, weight, bias, low, high, stride, top, left, height, width)
    return out


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, mean: Tensor, variance: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        size = weight[0].numel()
        out, bias = torch.empty_like(weight, dtype=dtype), torch.empty_like(mean)
        _fold_forward[len(weight), _ceil(size, BLOCK)](
            weight, mean, variance, gamma, beta, out, bias, size, eps,
            GAMMA=gamma is not None, BETA=beta is not None, B=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(weight, mean, variance, gamma)
        ctx.eps, ctx.has_beta = eps, beta is not None
        return out, bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor, by_bias: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, variance, gamma = ctx.saved_tensors
        size = weight[0].numel()
        if by_out.stride() != weight.stride():
            by_out = torch.empty_like(weight, dtype=by_out.dtype).copy_(by_out)
        by_weight, by_gamma = torch.empty_like(weight), None if gamma is None else torch.empty_like(gamma)
        _fold_backward[(len(weight),)](
            by_out, by_bias, weight, mean, variance, gamma, by_weight, by_gamma, size, ctx.eps,
            GAMMA=gamma is not None, B=BLOCK,
        )  # fmt: skip
        return by_weight, None, None, by_gamma, by_bias if ctx.has_beta else None, None, None


def fold(
    weight: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution [O, I, K, K] with the batch norm after it, in one pass."""
    out: tuple[Tensor, Tensor] = _Fold.apply(weight, mean, variance, gamma, beta, eps, dtype)
    return out
