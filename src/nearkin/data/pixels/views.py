"""Views: turn a batch of stored pixels into the network's input, on the device, without synchronising with the host.

A resized and mirrored crop is separable: out = Y · image · Xᵀ, where the rows of Y and X are the weights of an
antialiased bilinear resize of the crop. A batch is therefore two batched matrix products, whatever the sizes of its
images. On a GPU they run in float16, which holds 0 … 255 exactly; the result is within a third of a grey level.

The central square and those that Crop and Affine cut are cut from the image at a short side of `short_side`. Images
that are stored at other sizes are resized and cut in one step. On a CPU they are resized one by one in 8 bits, which
reads only the crop and takes a third of the time.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from nearkin import ranks
from nearkin.data.pixels.colour_and_erase import Augmentation, Erase, Jitter
from nearkin.data.pixels.kernel_check import kernels_run
from nearkin.data.pixels.tiles import Pixels, Sides
from nearkin.errors import NearkinError
from nearkin.spec import Call, check_options, look_up, parse

with suppress(ImportError):
    from nearkin.data.pixels.resize_kernel import resize_weights

TRIES = 10  # draws of a random resized crop before falling back to the largest central one


class Augment(Protocol):
    """A function that shows a random view of each image; `count`: of a batch of which these are this rank's rows."""

    def __call__(self, pixels: Pixels, rng: Generator, count: int | None = None) -> Tensor:
        """Show a batch."""


class Normalise(NamedTuple):
    """The input a network expects: (x - mean) / std of RGB pixels in 0 … 1, in BGR order if `bgr`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


class Boxes(NamedTuple):
    """The crop of each image of a batch, y and x: [B, 2] float each."""

    start: Tensor  # first pixel of the crop
    extent: Tensor  # its length
    outputs: Tensor | int  # the length it is resized to
    skip: Tensor | int = 0  # outputs before the first one that is wanted


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


def _integers(u: Tensor, most: Tensor | int) -> Tensor:
    """Uniform integers 0 … most from u in [0, 1)."""
    return (u * (most + 1)).floor()


def _check_size(size: int, short_side: int) -> None:
    if size < 1 or short_side < size:
        raise NearkinError(f"Crops of {size} pixels do not fit into images stored at {short_side}: store them larger.")


def _interval(name: str, pair: tuple[float, float], *, most: float = math.inf) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1] <= most:
        limit = "" if most == math.inf else f" ≤ {most:g}"
        raise NearkinError(f"{name} is a pair (low, high) with 0 < low ≤ high{limit}, not {pair}.")
    return pair
