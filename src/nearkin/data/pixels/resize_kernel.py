"""A Triton kernel for the weights of a resize, which PyTorch computes in a dozen passes over them."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit(do_not_specialize=["size", "count", "length"])
def _resize_weights(
    start, extent, outputs, skip, flip, out, size, count, length, BO: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0)  # of an image and an axis
    output, pixel = tl.program_id(1) * BO + tl.arange(0, BO), tl.arange(0, BL)
    begin, span = tl.load(start + pair), tl.load(extent + pair)
    mirrored = (pair % 2 == 1) & (tl.load(flip + pair // 2) != 0)
    shown = tl.where(mirrored, size - 1 - output, output).to(tl.float32) + tl.load(skip + pair)
    scale = span / tl.load(outputs + pair)
    reach = tl.maximum(scale, 1.0)
    middle, place = (shown + 0.5) * scale / reach, pixel.to(tl.float32) - begin
    inside = (place >= 0) & (place < span)
    triangles = 1 - tl.abs(middle[:, None] - ((place + 0.5) / reach)[None, :])
    triangles = tl.where(inside[None, :] & (triangles > 0), triangles, 0.0)
    shares = triangles / tl.maximum(tl.sum(triangles, 1), 1e-6)[:, None]
    at = (pair.to(tl.int64) * count + output)[:, None] * length + pixel[None, :]
    tl.store(out + at, shares, mask=(output < count)[:, None] & (pixel < length)[None, :])


def resize_weights(
    boxes: Sequence[Tensor], flip: Tensor, *, length: int, size: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Return what `views.weights` does: [B, 2, count, length] for start, extent, outputs and skip [B, 2], flip [B]."""
    start = boxes[0]
    out = torch.empty(*start.shape, count, length, dtype=dtype, device=start.device)
    block = triton.next_power_of_2(length)
    rows = max(1, 4096 // block)
    _resize_weights[start.numel(), triton.cdiv(count, rows)](
        *(t.contiguous() for t in boxes), flip.to(torch.uint8), out, size, count, length, BO=rows, BL=block
    )
    return out
