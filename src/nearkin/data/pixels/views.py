"""Views: turn a batch of stored pixels into the network's input, on the device, without synchronising with the host.

The central square and those that Crop and Affine cut are cut from the image at a short side of `short_side`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from nearkin import ranks
from nearkin.data.pixels.colour_and_erase import Augmentation, Erase, Jitter
from nearkin.data.pixels.crops import (
    TRIES,
    central,
    crop_for,
    plain_boxes,
    resized_boxes,
    shown_sizes,
    squashed_boxes,
)
from nearkin.data.pixels.tiles import Pixels
from nearkin.errors import NearkinError
from nearkin.spec import Call, check_options, look_up, parse


class Augment(Protocol):
    """A function that shows a random view of each image; `count`: of a batch of which these are this rank's rows."""

    def __call__(self, pixels: Pixels, rng: Generator, count: int | None = None) -> Tensor:
        """Show a batch."""


class Normalise(NamedTuple):
    """The input a network expects: (x - mean) / std of RGB pixels in 0 … 1, in BGR order if `bgr`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


def short_side_for(size: int, *, share: float = 0.0) -> int:
    """Return the short side of an image of which a square of `size` shows this share (0: 224/256)."""
    return round(size / share) if share else round(size * 256 / 224)


def round_side(size: int, factor: float) -> int:
    """Return a multiple of a size, rounded to a multiple of a power of two like the strides of networks."""
    step = math.gcd(size, 32)
    while step > max(size // 7, 1):
        step //= 2
    return round(size * factor / step) * step


def augment(text: str, *, size: int, short_side: int, normalise: Normalise, compiled: bool = False) -> "RandomView":
    """Build the augmentation of a spec such as `resized_crop(scale=(0.16, 1))`, for images seen at `short_side`.

    One that changes what another shows has that one inside: `erase(jitter(resized_crop))`; `jitter` alone changes
    `resized_crop`. `compiled` fuses it with torch.compile: fewer, larger kernels on a GPU after some seconds of
    compilation.
    """
    _check_size(size, short_side)
    kind = _build(parse(text), size, short_side)
    finish = _Finish(normalise)

    def apply(pixels: Pixels, draws: Tensor, scaling: tuple[Tensor, Tensor]) -> Tensor:
        return finish(kind.apply(pixels, draws), scaling)

    return RandomView(kind.draws, torch.compile(apply) if compiled else apply, finish)


class RandomView:
    """An augmentation: `view(pixels, rng)`, or `view.at(pixels, draws)` with uniform draws [B, view.draws]."""

    def __init__(
        self, draws: int, apply: Callable[[Pixels, Tensor, tuple[Tensor, Tensor]], Tensor], finish: "_Finish"
    ) -> None:
        self.draws, self.apply, self.finish = draws, apply, finish

    def __call__(self, pixels: Pixels, rng: Generator, count: int | None = None) -> Tensor:
        """Show each image in a random way; `count`: of a batch of which these are this rank's rows."""
        draws = torch.rand(count or len(pixels.size), self.draws, generator=rng, device=rng.device)
        return self.at(pixels, draws if count is None else draws[ranks.share(count)])

    @torch.no_grad()
    def at(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Show each image in the way that its draws say."""
        device = pixels.canvas.device
        return self.apply(pixels, draws.to(device, non_blocking=True), self.finish.scaling(device))


def centre(size: int, normalise: Normalise, *, short_side: int | None = None) -> Callable[[Pixels], Tensor]:
    """Build the test-time view, the central square of `size` of the image at `short_side` (None: as it is stored)."""
    if short_side is not None:
        _check_size(size, short_side)
    finish = _Finish(normalise)

    @torch.no_grad()
    def view(pixels: Pixels) -> Tensor:
        return finish(central(pixels, size, short_side), finish.scaling(pixels.canvas.device))

    return view


class ResizedCrop:
    """A random box of random area (`scale`) and width to height (`ratio`), resized to the square."""

    draws = 2 * TRIES + 3

    def __init__(
        self,
        *,
        size: int,
        short_side: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
    ) -> None:
        self.size, self.short_side, self.flip = size, short_side, flip
        self.scale, self.ratio = _interval("scale", scale, most=1.0), _interval("ratio", ratio)

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Draw a box for each image and read it."""
        boxes = resized_boxes(pixels.size, draws[:, :-1], scale=self.scale, ratio=self.ratio, size=self.size)
        crop = crop_for(pixels, self.size, self.short_side)
        return crop(pixels.canvas, boxes, size=self.size, flip=self.flip & (draws[:, -1] < 0.5))


class Crop:
    """A random square of `size`, from the image squashed to a square of the stored side (`squash`) or unchanged."""

    draws = 3

    def __init__(self, *, size: int, short_side: int, flip: bool = True, squash: bool = True) -> None:
        self.size, self.short_side, self.flip, self.squash = size, short_side, flip, squash

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Draw the corner of each square and read it."""
        if self.squash:
            boxes = squashed_boxes(pixels.size, draws[:, :2], short_side=self.short_side, size=self.size)
        else:
            shown = shown_sizes(pixels, self.size, self.short_side)
            boxes = plain_boxes(pixels.size, draws[:, :2], size=self.size, shown=shown)
        crop = crop_for(pixels, self.size, self.short_side)
        return crop(pixels.canvas, boxes, size=self.size, flip=self.flip & (draws[:, 2] < 0.5))


class Affine:
    """The central square rotated (± `rotate` radians), scaled (± `scale`) and shifted (± `shift` of half its width).

    Pixels from outside the square are its mirror image, so that the background continues.
    """

    draws = 5

    def __init__(
        self,
        *,
        size: int,
        short_side: int,
        rotate: float = 0.25,
        scale: float = 0.15,
        shift: float = 0.15,
        flip: bool = False,
    ) -> None:
        self.size, self.short_side, self.flip = size, short_side, flip
        self.rotate, self.scale, self.shift = rotate, scale, shift
        if min(rotate, scale, shift) < 0 or scale >= 1:
            raise NearkinError(f"affine needs rotate ≥ 0, 0 ≤ scale < 1 and shift ≥ 0, not {rotate}, {scale}, {shift}.")

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Compute where each output pixel is read from, and read it."""
        square = central(pixels, self.size, self.short_side)
        angle, zoom, dx, dy = (2 * draws[:, :4, None, None] - 1).unbind(1)  # [B, 1, 1] each, -1 … 1
        angle, zoom = self.rotate * angle, 1 + self.scale * zoom
        mirror = torch.where(self.flip & (draws[:, 4, None, None] < 0.5), -1, 1)
        cos, sin = zoom * angle.cos(), zoom * angle.sin()
        x = (2 * torch.arange(self.size, device=square.device) + 1) / self.size - 1  # pixel centres in -1 … 1
        y, x = x[:, None], mirror * x
        # affine_grid, or x and y next to each other in memory, would take longer than all the rest on a CPU.
        grid = torch.stack([cos * x - sin * y + self.shift * dx, sin * x + cos * y + self.shift * dy], 1)
        grid = grid.permute(0, 2, 3, 1)
        with torch.autocast(square.device.type, enabled=False):
            return F.grid_sample(square.float(), grid, padding_mode="reflection", align_corners=False)


class CentralSquare:
    """The central square, as at test time."""

    draws = 0

    def __init__(self, *, size: int, short_side: int) -> None:
        self.size, self.short_side = size, short_side

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:  # noqa: ARG002
        """Cut the central square."""
        return central(pixels, self.size, self.short_side)


CHANGES: dict[str, type] = {"jitter": Jitter, "erase": Erase}
"""Augmentations that change what another one shows."""

AUGMENTS: dict[str, type] = {
    "resized_crop": ResizedCrop,
    "crop": Crop,
    "affine": Affine,
    "none": CentralSquare,
    **CHANGES,
}


def _build(call: Call, size: int, short_side: int) -> Augmentation:
    entry = look_up(call.name, AUGMENTS, what="augmentation")
    options = check_options(call, entry, reserved=("size", "short_side"))
    changes = call.name in CHANGES
    if len(call.args) > changes:
        inside = "one augmentation and" if changes else "only"
        raise NearkinError(f"{call.name} takes {inside} options such as key=value: {call}.")
    if not changes:
        return cast("Augmentation", entry(size=size, short_side=short_side, **options))
    inner = _build(call.args[0] if call.args else Call("resized_crop"), size, short_side)
    return cast("Augmentation", entry(inner, **options))


class _Finish:
    """Normalise pixels 0 … 255 to contiguous float32 by one multiply and one add."""

    def __init__(self, normalise: Normalise) -> None:
        mean, std, self.bgr = normalise
        if len(mean) != len(std) or min(std, default=0.0) <= 0:
            raise NearkinError(f"Mean {mean} and std {std} need one number per channel each, and std above zero.")
        factor, offset = [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
        self.scale = torch.tensor([factor, offset]).view(2, -1, 1, 1)
        self.on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}  # copied once, not every step

    def scaling(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return factor and offset [C, 1, 1] on a device."""
        if device not in self.on_device:
            factor, offset = self.scale.to(device, non_blocking=True)
            self.on_device[device] = factor, offset
        return self.on_device[device]

    def __call__(self, x: Tensor, scaling: tuple[Tensor, Tensor]) -> Tensor:
        factor, offset = scaling
        if x.shape[1] != len(factor):
            raise NearkinError(f"Images of {x.shape[1]} channels do not fit a network that expects {len(factor)}.")
        done = (x * factor).add_(offset)
        return (done.flip(1) if self.bgr else done).contiguous()


def _check_size(size: int, short_side: int) -> None:
    if size < 1 or short_side < size:
        raise NearkinError(f"Crops of {size} pixels do not fit into images stored at {short_side}: store them larger.")


def _interval(name: str, pair: tuple[float, float], *, most: float = math.inf) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1] <= most:
        limit = "" if most == math.inf else f" ≤ {most:g}"
        raise NearkinError(f"{name} is a pair (low, high) with 0 < low ≤ high{limit}, not {pair}.")
    return pair
