"""From stored pixels to the network's input, a batch at a time on the device; no value is read back to the host.

A crop that is resized and mirrored is separable: out = Y · image · Xᵀ, where the rows of Y and X are the weights with
which an antialiased bilinear resize reads the crop. So a batch is two batched matrix products, whatever the sizes of
its images. On a GPU they run in float16, which holds 0 … 255 exactly; the result is within half a grey level.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from nearkin.data.pixels import Pixels
from nearkin.errors import NearkinError
from nearkin.spec import check_options, look_up, parse

TRIES = 10  # draws of a random resized crop before the largest central one is taken

Augment = Callable[[Pixels, Generator], Tensor]


class Normalise(NamedTuple):
    """What a network expects: (x - mean) / std of RGB pixels in 0 … 1, and perhaps the channels in reverse."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


class Box(NamedTuple):
    """What each image of a batch is read from, along one axis: [B] float32 each."""

    start: Tensor  # first pixel of the crop
    extent: Tensor  # its length
    outputs: Tensor | int  # the length it is resized to
    skip: Tensor | int = 0  # how many of these come before the first that is wanted


def short_side(size: int) -> int:
    """The short side at which images are stored for crops of `size`: 256 for 224, and in proportion."""
    return round(size * 256 / 224)


def augment(text: str, *, size: int, short: int, normalise: Normalise) -> Augment:
    """The augmentation that a spec such as `resized_crop(scale=(0.16, 1))` describes, for images stored at `short`."""
    call = parse(text)
    kind = look_up(call.name, AUGMENTS, what="augmentation")
    if call.args:
        raise NearkinError(f"{call.name} takes options as key=value and nothing else: {text!r}.")
    options = check_options(call, kind, given=("size", "short", "normalise"))
    _check_size(size, short)
    made: Augment = kind(size=size, short=short, normalise=normalise, **options)
    return made


def centre(size: int, normalise: Normalise, *, short: int | None = None) -> Callable[[Pixels], Tensor]:
    """The test-time view: the central square of `size`. With `short`, the side images are stored at, it is checked."""
    if short is not None:
        _check_size(size, short)
    finish = _Finish(normalise)

    def view(pixels: Pixels) -> Tensor:
        return finish(central(pixels, size))

    return view


class ResizedCrop:
    """A random part of the area (`scale`) with a random width to height (`ratio`), resized to the square."""

    def __init__(
        self,
        *,
        size: int,
        short: int,  # noqa: ARG002 (every augmentation is made with the same arguments)
        normalise: Normalise,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
    ) -> None:
        self.size, self.finish, self.flip = size, _Finish(normalise), flip
        self.scale, self.ratio = _interval("scale", scale, most=1.0), _interval("ratio", ratio)

    def __call__(self, pixels: Pixels, rng: Generator) -> Tensor:
        draws = _draws(pixels, 2 * TRIES + 3, rng)
        y, x = resized_boxes(pixels.size, draws[:, :-1], scale=self.scale, ratio=self.ratio, size=self.size)
        return self.finish(crop(pixels.canvas, y, x, size=self.size, flip=self.flip & (draws[:, -1] < 0.5)))


class Crop:
    """The image squashed to a square of the stored side, and a random square of `size` out of it."""

    def __init__(self, *, size: int, short: int, normalise: Normalise, flip: bool = True) -> None:
        self.size, self.short, self.finish, self.flip = size, short, _Finish(normalise), flip

    def __call__(self, pixels: Pixels, rng: Generator) -> Tensor:
        draws = _draws(pixels, 3, rng)
        y, x = squashed_boxes(pixels.size, draws[:, :2], short=self.short, size=self.size)
        return self.finish(crop(pixels.canvas, y, x, size=self.size, flip=self.flip & (draws[:, 2] < 0.5)))


class Affine:
    """The central square turned (± `rotate` radians), scaled (± `scale`) and shifted (± `shift` of half its width).

    What comes in from outside the square is its mirror image, so that a background goes on as it is.
    """

    def __init__(
        self,
        *,
        size: int,
        short: int,  # noqa: ARG002
        normalise: Normalise,
        rotate: float = 0.25,
        scale: float = 0.15,
        shift: float = 0.15,
        flip: bool = False,
    ) -> None:
        self.size, self.finish, self.flip = size, _Finish(normalise), flip
        self.rotate, self.scale, self.shift = rotate, scale, shift
        if min(rotate, scale, shift) < 0 or scale >= 1:
            raise NearkinError(f"affine moves by rotate ≥ 0, 0 ≤ scale < 1, shift ≥ 0, not {rotate}, {scale}, {shift}.")

    def __call__(self, pixels: Pixels, rng: Generator) -> Tensor:
        square = central(pixels, self.size)
        draws = _draws(pixels, 5, rng)
        angle, zoom, dx, dy = (2 * draws[:, :4, None, None] - 1).unbind(1)  # [B, 1, 1] each, -1 … 1
        angle, zoom = self.rotate * angle, 1 + self.scale * zoom
        mirror = torch.where(self.flip & (draws[:, 4, None, None] < 0.5), -1, 1)
        cos, sin = zoom * angle.cos(), zoom * angle.sin()
        x = (2 * torch.arange(self.size, device=square.device) + 1) / self.size - 1  # middles of pixels in -1 … 1
        y, x = x[:, None], mirror * x
        # Where each output is read from; written out, since affine_grid takes three times as long as all the rest.
        grid = torch.stack([cos * x - sin * y + self.shift * dx, sin * x + cos * y + self.shift * dy], 3)
        with torch.autocast(square.device.type, enabled=False):
            warped = F.grid_sample(square.float(), grid, padding_mode="reflection", align_corners=False)
        return self.finish(warped)


class Nothing:
    """The central square, as at test time."""

    def __init__(self, *, size: int, short: int, normalise: Normalise) -> None:
        self.view = centre(size, normalise, short=short)

    def __call__(self, pixels: Pixels, rng: Generator) -> Tensor:  # noqa: ARG002
        return self.view(pixels)


AUGMENTS: dict[str, type] = {"resized_crop": ResizedCrop, "crop": Crop, "affine": Affine, "none": Nothing}


def central(pixels: Pixels, size: int) -> Tensor:
    """The central square of each image, uint8 [B, C, size, size]; odd margins as Python's round() divides them."""
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


def resized_boxes(
    sizes: Tensor, draws: Tensor, *, scale: tuple[float, float], ratio: tuple[float, float], size: int
) -> tuple[Box, Box]:
    """Random parts of images [B, 2] from uniform draws [B, 2 · TRIES + 2]: the first try that fits, else a central box.

    The area is uniform in `scale`, the logarithm of width over height uniform in that of `ratio`. The last resort is
    the largest central box of the nearest ratio.
    """
    height, width = sizes.to(draws.dtype).T.unsqueeze(2)  # [B, 1] each
    low, high = ratio
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])
    shape = (math.log(low) + (math.log(high) - math.log(low)) * draws[:, TRIES : 2 * TRIES]).exp()
    h, w = (area / shape).sqrt().round(), (area * shape).sqrt().round()
    h = torch.cat([h, torch.minimum(height, (width / low).round())], 1)  # the last resort always fits
    w = torch.cat([w, torch.minimum(width, (height * high).round())], 1)
    tries = torch.arange(TRIES + 1, device=sizes.device)
    fits = (h >= 1) & (w >= 1) & (h <= height) & (w <= width)
    first = torch.where(fits, tries, TRIES).amin(1, keepdim=True)
    h, w = h.gather(1, first), w.gather(1, first)
    room = torch.cat([height - h, width - w], 1)
    corner = torch.where(first < TRIES, _integers(draws[:, 2 * TRIES :], room), (room / 2).floor())
    return Box(corner[:, 0], h[:, 0], size), Box(corner[:, 1], w[:, 0], size)


def squashed_boxes(sizes: Tensor, draws: Tensor, *, short: int, size: int) -> tuple[Box, Box]:
    """A random square of `size` out of each image [B, 2] squashed to `short` × `short`, from uniform draws [B, 2]."""
    skip = _integers(draws, torch.full_like(draws, short - size))
    extent = sizes.to(draws.dtype)
    start = torch.zeros_like(extent)
    return Box(start[:, 0], extent[:, 0], short, skip[:, 0]), Box(start[:, 1], extent[:, 1], short, skip[:, 1])


@torch.no_grad()
def crop(canvas: Tensor, y: Box, x: Box, *, size: int, flip: Tensor) -> Tensor:
    """Each image's box resized to size × size and mirrored where `flip` [B] says so: pixels [B, C, size, size]."""
    half = canvas.device.type == "cuda"
    dtype = torch.float16 if half else torch.float32
    count = -(-size // 8) * 8 if half else size  # half precision is fast only where rows are aligned
    batch, channels, height, width = canvas.shape
    down = weights(y, height, size=size, count=count).to(dtype)
    along = weights(x, width, size=size, count=count, flip=flip).to(dtype)
    with torch.autocast(canvas.device.type, enabled=False):
        narrow = torch.bmm(canvas.to(dtype).view(batch, channels * height, width), along.mT)
        planes = narrow.view(batch, channels, height, count).unbind(1)
        return torch.stack([torch.bmm(down, plane) for plane in planes], 1)[:, :, :size, :size]


def weights(box: Box, length: int, *, size: int, count: int, flip: Tensor | None = None) -> Tensor:
    """With which weight each of `length` pixels of an axis enters each output: [B, count, length], rows sum to 1.

    Outputs from `size` on are there for alignment and mean nothing.
    """
    output = torch.arange(count, device=box.extent.device, dtype=box.extent.dtype)
    if flip is not None:
        output = torch.where(flip[:, None], size - 1 - output, output)
    scale = (box.extent / box.outputs)[:, None]
    reach = scale.clamp_min(1)  # how far a triangle reaches: antialiasing when shrinking, plain bilinear when growing
    skip = box.skip[:, None] if isinstance(box.skip, Tensor) else box.skip
    middle = (output + skip + 0.5) * scale / reach
    pixel = torch.arange(length, device=box.extent.device, dtype=box.extent.dtype) - box.start[:, None]
    # What lies outside the box is infinitely far away, so that the border of the crop cuts the triangles off.
    place = torch.where((pixel >= 0) & (pixel < box.extent[:, None]), (pixel + 0.5) / reach, math.inf)
    w = (middle[:, :, None] - place[:, None, :]).abs_().neg_().add_(1).clamp_min_(0)
    return w.div_(w.sum(2, keepdim=True).clamp_min_(1e-6))


class _Finish:
    """Pixels 0 … 255 to the network's input: one multiply and one add, contiguous float32."""

    def __init__(self, normalise: Normalise) -> None:
        mean, std, self.bgr = normalise
        if len(mean) != len(std) or min(std, default=0.0) <= 0:
            raise NearkinError(f"Mean {mean} and std {std} need one number a channel each, and no std of zero.")
        self.factor = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
        self.offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(-1, 1, 1)
        self.there: dict[torch.device, tuple[Tensor, Tensor]] = {}  # copied to a device once, not every step

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] != len(self.factor):
            raise NearkinError(f"Images of {x.shape[1]} channels do not fit a network that expects {len(self.factor)}.")
        if x.device not in self.there:
            self.there[x.device] = (
                self.factor.to(x.device, non_blocking=True),
                self.offset.to(x.device, non_blocking=True),
            )
        factor, offset = self.there[x.device]
        done = (x * factor).add_(offset)
        return (done.flip(1) if self.bgr else done).contiguous()


def _draws(pixels: Pixels, count: int, rng: Generator) -> Tensor:
    """Uniform numbers, a row an image: what happens to an image depends on its row alone."""
    draws = torch.rand(len(pixels.size), count, generator=rng, device=rng.device)
    return draws.to(pixels.canvas.device, non_blocking=True)


def _integers(u: Tensor, most: Tensor) -> Tensor:
    """Whole numbers 0 … most, equally likely, from u in [0, 1)."""
    return (u * (most + 1)).floor()


def _check_size(size: int, short: int) -> None:
    if size < 1 or short < size:
        raise NearkinError(f"Crops of {size} pixels cannot be cut from images stored at {short}: store them larger.")


def _interval(name: str, pair: tuple[float, float], *, most: float = math.inf) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1] <= most:
        limit = "" if most == math.inf else f" ≤ {most:g}"
        raise NearkinError(f"{name} is a pair (low, high) with 0 < low ≤ high{limit}, not {pair}.")
    return pair
