"""Crops: draw a box in each image of a batch, cut it out and resize it, on the device.

A resized and mirrored crop is separable: out = Y · image · Xᵀ, where the rows of Y and X are the weights of an
antialiased bilinear resize of the crop. A batch is therefore two batched matrix products, whatever the sizes of its
images. On a GPU they run in float16, which holds 0 … 255 exactly; the result is within a third of a grey level.

Images that are stored at another scale than they are cut at are resized and cut in one step. On a CPU they are resized
one by one in 8 bits, which reads only the crop and takes a third of the time.
"""

import math
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin.data.pixels.kernel_check import kernels_run
from nearkin.data.pixels.tiles import Pixels, Sides
from nearkin.errors import NearkinError

with suppress(ImportError):
    from nearkin.data.pixels.resize_kernel import resize_weights

TRIES = 10  # draws of a random resized crop before falling back to the largest central one


class Boxes(NamedTuple):
    """The crop of each image of a batch, y and x: [B, 2] float each."""

    start: Tensor  # first pixel of the crop
    extent: Tensor  # its length
    outputs: Tensor | int  # the length it is resized to
    skip: Tensor | int = 0  # outputs before the first one that is wanted


def resized_boxes(
    sizes: Tensor, draws: Tensor, *, scale: tuple[float, float], ratio: tuple[float, float], size: int
) -> Boxes:
    """Draw random boxes in images of sizes [B, 2] from uniform draws [B, 2 · TRIES + 2].

    The area is uniform in `scale`, the logarithm of width over height uniform in that of `ratio`. The first try that
    fits is taken, else the largest central box of the nearest ratio.
    """
    whole = sizes.to(draws.dtype).unsqueeze(2)  # [B, 2, 1]
    height, width = whole.unbind(1)
    low, high = ratio
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])
    shape = (math.log(low) + (math.log(high) - math.log(low)) * draws[:, TRIES : 2 * TRIES]).exp()
    tries = torch.stack([area / shape, area * shape], 1).sqrt()  # [B, 2, TRIES]
    fallback = torch.minimum(whole, torch.stack([width / low, height * high], 1).round())  # always fits
    extent = torch.cat([tries.round(), fallback], 2)
    fits = ((extent >= 1) & (extent <= whole)).all(1, keepdim=True)
    number = torch.arange(TRIES + 1, device=sizes.device)
    first = torch.where(fits, number, TRIES).amin(2, keepdim=True)  # [B, 1, 1]
    extent = extent.gather(2, first.expand(-1, 2, 1)).squeeze(2)
    room = whole.squeeze(2) - extent
    start = torch.where(first.squeeze(2) < TRIES, _integers(draws[:, 2 * TRIES :], room), (room / 2).floor())
    return Boxes(start, extent, size)


def squashed_boxes(sizes: Tensor, draws: Tensor, *, short_side: int, size: int) -> Boxes:
    """Draw a random square of `size` in each image squashed to `short_side` squared, from uniform draws [B, 2]."""
    skip = _integers(draws, short_side - size)
    return Boxes(torch.zeros_like(draws), sizes.to(draws.dtype), short_side, skip)


def plain_boxes(sizes: Tensor, draws: Tensor, *, size: int, shown: Tensor | None = None) -> Boxes:
    """Draw a random square of `size` in each image [B, 2] resized to `shown` [B, 2] (None: as it is stored)."""
    shown = sizes if shown is None else shown
    corner = _integers(draws, shown - size)
    return Boxes(torch.zeros_like(corner), sizes.to(corner.dtype), shown.to(corner.dtype), corner)


def _integers(u: Tensor, most: Tensor | int) -> Tensor:
    """Uniform integers 0 … most from u in [0, 1)."""
    return (u * (most + 1)).floor()


def central(pixels: Pixels, size: int, short_side: int | None = None) -> Tensor:
    """Cut the central square of each image at `short_side` (None: as it is stored), [B, C, size, size] in 0 … 255.

    Odd margins are divided as by round(). Nothing is resized, and the pixels are uint8, if all are at that scale.
    """
    if short_side is not None and not _at_scale(pixels.sides, size, short_side):
        shown = shown_sizes(pixels, size, short_side)
        corner = ((shown - size) / 2).round()
        boxes = Boxes(torch.zeros_like(corner), pixels.size.to(corner.dtype), shown.to(corner.dtype), corner)
        unmirrored = torch.zeros(len(corner), dtype=torch.bool, device=corner.device)
        crop = crop_for(pixels, size, short_side)
        return crop(pixels.canvas, boxes, size=size, flip=unmirrored).round()  # to 8 bits, as image libraries do
    height, width = pixels.canvas.shape[2:]
    if min(height, width) < size:
        raise NearkinError(
            f"A crop of {size} pixels does not fit into images of {min(height, width)}: store them larger."
        )
    if height == width == size:
        return pixels.canvas
    corner = ((pixels.size - size) / 2).round().long().clamp_min(0)
    steps = torch.arange(size, device=pixels.canvas.device)
    y, x = corner[:, :1] + steps, corner[:, 1:] + steps
    rows = pixels.canvas.gather(2, y[:, None, :, None].expand(-1, pixels.canvas.shape[1], -1, width))
    return rows.gather(3, x[:, None, None, :].expand(-1, pixels.canvas.shape[1], size, -1))


def shown_sizes(pixels: Pixels, size: int, short_side: int) -> Tensor:
    """Return the sizes [B, 2] of the images at the scale at which a square of `size` is cut from them."""
    if _at_scale(pixels.sides, size, short_side):
        return pixels.size
    assert pixels.sides is not None
    side = pixels.size.amin(1, keepdim=True)
    wanted = torch.full_like(side, short_side)
    if pixels.sides.near_enough:
        wanted = torch.where((side >= size) & (side <= short_side), side, wanted)
    return pixels.size * wanted // side


def _at_scale(sides: Sides | None, size: int, short_side: int) -> bool:
    """Whether all images are cut without being resized."""
    if sides is None or sides.least == sides.most == short_side:
        return True
    return sides.near_enough and size <= sides.least and sides.most <= short_side


class CropFunction(Protocol):
    """A function that resizes each image's box to size × size, mirrored where `flip` [B]: pixels [B, C, size, size]."""

    def __call__(self, canvas: Tensor, boxes: Boxes, *, size: int, flip: Tensor) -> Tensor:
        """Cut a batch."""


def crop_for(pixels: Pixels, size: int, short_side: int) -> CropFunction:
    """Return the function to cut a batch with; which one must not depend on the other images of the batch."""
    together = _at_scale(pixels.sides, size, short_side) or torch.compiler.is_compiling()
    return crop if together or pixels.canvas.device.type != "cpu" else crop_one_by_one


def crop(canvas: Tensor, boxes: Boxes, *, size: int, flip: Tensor) -> Tensor:
    """Cut all boxes by two matrix products."""
    half = canvas.device.type == "cuda"
    dtype = torch.float16 if half else torch.float32
    count = -(-size // 8) * 8 if half else size  # half precision is fast only if rows are aligned
    batch, channels, height, width = canvas.shape
    # Both axes at once, padded to the longer one, for half as many kernels.
    both = weights(boxes, max(height, width), size=size, count=count, flip=flip, dtype=dtype)
    down, along = both[:, 0, :, :height], both[:, 1, :, :width]
    with torch.autocast(canvas.device.type, enabled=False):
        narrow = torch.bmm(canvas.to(dtype).view(batch, channels * height, width), along.mT)
        planes = narrow.view(batch, channels, height, count).unbind(1)
        return torch.stack([torch.bmm(down, plane) for plane in planes], 1)[:, :, :size, :size]


def crop_one_by_one(canvas: Tensor, boxes: Boxes, *, size: int, flip: Tensor) -> Tensor:
    """Cut one box after the other in 8 bits, on a CPU."""
    done = []
    for row, mirrored in enumerate(flip.tolist()):
        (top, left), (height, width) = boxes.start[row].long().tolist(), boxes.extent[row].long().tolist()
        region = canvas[None, row, :, top : top + height, left : left + width]
        down, along = _of_image(boxes.outputs, row)
        resized = F.interpolate(region, size=(down, along), mode="bilinear", antialias=True)[0]
        y, x = _of_image(boxes.skip, row)
        square = resized[:, y : y + size, x : x + size]
        done.append(square.flip(2) if mirrored else square)
    return torch.stack(done).float()


def _of_image(values: Tensor | int, row: int) -> tuple[int, int]:
    """One image's pair of numbers, or the number that both axes of all images share."""
    if not isinstance(values, Tensor):
        return values, values
    y, x = values[row].long().tolist()
    return y, x


def weights(boxes: Boxes, length: int, *, size: int, count: int, flip: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each of `length` pixels in each output, per axis: [B, 2, count, length], rows sum to 1.

    `flip` concerns x only. Outputs from `size` on are padding for alignment.
    """
    if flip.is_cuda and not torch.compiler.is_compiling() and kernels_run(flip.device):
        pairs = [v if isinstance(v, Tensor) else torch.full_like(boxes.start, v) for v in boxes]
        return resize_weights(pairs, flip, length=length, size=size, count=count, dtype=dtype)
    start, extent = boxes.start.unsqueeze(2), boxes.extent.unsqueeze(2)  # [B, 2, 1]
    skip = boxes.skip.unsqueeze(2) if isinstance(boxes.skip, Tensor) else boxes.skip
    output = torch.arange(count, device=start.device, dtype=start.dtype)
    mirrored = torch.stack([torch.zeros_like(flip), flip], 1).unsqueeze(2)
    output = torch.where(mirrored, size - 1 - output, output) + skip
    outputs = boxes.outputs.unsqueeze(2) if isinstance(boxes.outputs, Tensor) else boxes.outputs
    scale = extent / outputs
    reach = scale.clamp_min(1)  # half width of the triangle: antialiasing when shrinking, plain bilinear when enlarging
    middle = (output + 0.5) * scale / reach  # [B, 2, count]
    pixel = torch.arange(length, device=start.device, dtype=start.dtype) - start
    # Pixels outside the box are infinitely far away, so the border of the crop cuts the triangles off.
    place = torch.where((pixel >= 0) & (pixel < extent), (pixel + 0.5) / reach, math.inf)  # [B, 2, length]
    triangles = (1 - (middle.unsqueeze(3) - place.unsqueeze(2)).abs_()).relu_()
    return (triangles / triangles.sum(3, keepdim=True).clamp_min(1e-6)).to(dtype)
