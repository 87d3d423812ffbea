"""Crops compared with cutting and resizing by torch, and random boxes with their definition."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import (
    AUGMENTS,
    TRIES,
    Boxes,
    Normalise,
    augment,
    central,
    centre,
    crop,
    plain_boxes,
    resized_boxes,
    short_side_for,
    squashed_boxes,
)
from nearkin.errors import NearkinError

RAW = Normalise((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))  # leaves pixels 0 … 255
GREY = Normalise((0.5,), (0.5,))


def photos(
    sizes: list[tuple[int, int]], *, channels: int = 3, canvas: tuple[int, int] = (64, 64), seed: int = 0
) -> Pixels:
    """Random pixels of several sizes, each in the corner of its canvas."""
    rng = Generator().manual_seed(seed)
    pixels = torch.zeros(len(sizes), channels, *canvas, dtype=torch.uint8)
    for image, (h, w) in zip(pixels, sizes, strict=True):
        image[:, :h, :w] = torch.randint(0, 256, (channels, h, w), generator=rng, dtype=torch.uint8)
    return Pixels(pixels, torch.tensor(sizes))


def cut(image: Tensor, box: tuple[int, int, int, int], size: tuple[int, int]) -> Tensor:
    """The oracle: cut the box (y, x, h, w) out, then resize it with antialiasing, in float64."""
    y, x, h, w = box
    part = image[None, :, y : y + h, x : x + w].double()
    return F.interpolate(part, size=size, mode="bilinear", antialias=True)[0]


def boxes_of(boxes: list[tuple[int, int, int, int]], outputs: int) -> Boxes:
    y, x, h, w = torch.tensor(boxes).float().unbind(1)
    return Boxes(torch.stack([y, x], 1), torch.stack([h, w], 1), outputs)


@pytest.mark.parametrize("size", [8, 16, 31, 50])
def test_crop_equals_cutting_then_resizing(size: int) -> None:
    boxes = [(0, 0, 40, 64), (3, 5, 9, 20), (10, 0, 30, 1), (0, 23, 1, 41), (39, 63, 1, 1), (7, 11, 16, 16)]
    pixels = photos([(40, 64)] * len(boxes))
    flip = torch.tensor([False, True, False, True, False, True])
    got = crop(pixels.canvas, boxes_of(boxes, size), size=size, flip=flip)
    for image, box, mirrored, one in zip(pixels.canvas, boxes, flip, got, strict=True):
        want = cut(image, box, (size, size))
        torch.testing.assert_close(one.double(), want.flip(2) if mirrored else want, atol=2e-3, rtol=0)


def test_crop_reads_nothing_outside_the_box() -> None:
    pixels = photos([(40, 64)])
    boxes = boxes_of([(8, 8, 16, 16)], 12)
    before = crop(pixels.canvas, boxes, size=12, flip=torch.tensor([False]))
    inside = pixels.canvas[:, :, 8:24, 8:24].clone()
    pixels.canvas.fill_(255)
    pixels.canvas[:, :, 8:24, 8:24] = inside
    assert torch.equal(before, crop(pixels.canvas, boxes, size=12, flip=torch.tensor([False])))


def test_squashed_crop_equals_squashing_then_cutting() -> None:
    pixels = photos([(32, 64), (50, 32), (32, 32)])
    draws = torch.tensor([[0.0, 0.99999], [0.5, 0.3], [0.7, 0.0]])
    boxes = squashed_boxes(pixels.size, draws, short_side=32, size=28)
    got = crop(pixels.canvas, boxes, size=28, flip=torch.tensor([False, False, True]))
    corners = [(0, 4), (2, 1), (3, 0)]  # floor(u · 5)
    for b, (top, left) in enumerate(corners):
        h, w = pixels.size[b].tolist()
        want = cut(pixels.canvas[b], (0, 0, h, w), (32, 32))[:, top : top + 28, left : left + 28]
        torch.testing.assert_close(got[b].double(), want.flip(2) if b == 2 else want, atol=2e-3, rtol=0)


def test_plain_crop_does_not_resize() -> None:
    pixels = photos([(32, 64), (50, 32), (32, 32)])
    draws = torch.tensor([[0.0, 0.99999], [0.5, 0.3], [0.7, 0.0]])
    boxes = plain_boxes(pixels.size, draws, size=28)
    got = crop(pixels.canvas, boxes, size=28, flip=torch.tensor([False, False, True]))
    corners = [(0, 36), (11, 1), (3, 0)]  # floor(u · (side − 27))
    for b, (top, left) in enumerate(corners):
        want = pixels.canvas[b, :, top : top + 28, left : left + 28]
        torch.testing.assert_close(got[b], (want.flip(2) if b == 2 else want).float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("squash", [True, False])
def test_the_squash_option_of_crop(squash: bool) -> None:
    pixels = photos([(32, 64)] * 4)
    pixels.canvas[:] = torch.arange(64, dtype=torch.uint8)  # brightness is the x coordinate
    view = augment(f"crop(squash={squash}, flip=False)", size=28, short_side=32, normalise=RAW)
    steps = view(pixels, Generator().manual_seed(0)).diff(dim=3)[..., 2:-2].mean()
    assert steps.item() == pytest.approx(2 if squash else 1, abs=0.01)


def naive_box(h: int, w: int, u: list[float], scale: tuple[float, float], ratio: tuple[float, float]) -> list[int]:
    """Random resized crop by its definition, one try after the other."""
    for n in range(TRIES):
        area = h * w * (scale[0] + (scale[1] - scale[0]) * u[n])
        shape = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u[TRIES + n])
        width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < width <= w and 0 < height <= h:
            return [int(u[-2] * (h - height + 1)), int(u[-1] * (w - width + 1)), height, width]
    if w / h < ratio[0]:
        width, height = w, round(w / ratio[0])
    elif w / h > ratio[1]:
        width, height = round(h * ratio[1]), h
    else:
        width, height = w, h
    return [(h - height) // 2, (w - width) // 2, height, width]


@pytest.mark.parametrize(
    ("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (0.5, 0.6)), ((1.0, 1.0), (1.0, 1.0))]
)
def test_resized_boxes_follow_the_definition(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    rng = Generator().manual_seed(1)
    sizes = torch.randint(20, 60, (400, 2), generator=rng)
    draws = torch.rand(400, 2 * TRIES + 2, generator=rng, dtype=torch.float64)
    boxes = resized_boxes(sizes, draws, scale=scale, ratio=ratio, size=16)
    got = torch.cat([boxes.start, boxes.extent], 1).long().tolist()
    for (h, w), u, box in zip(sizes.tolist(), draws.tolist(), got, strict=True):
        assert box == naive_box(h, w, u, scale, ratio)


def test_resized_boxes_have_the_right_distribution() -> None:
    count = 40_000
    rng = Generator().manual_seed(2)
    draws = torch.rand(count, 2 * TRIES + 2, generator=rng)
    sizes = torch.full((count, 2), 1000)
    boxes = resized_boxes(sizes, draws, scale=(0.1, 0.5), ratio=(0.5, 2.0), size=16)
    area = boxes.extent.prod(1) / 1e6
    shape = (boxes.extent[:, 1] / boxes.extent[:, 0]).log2()  # all tries fit: uniform in -1 … 1
    for values, low, high in ((area, 0.1, 0.5), (shape, -1.0, 1.0)):
        ranks = (values.sort().values - low) / (high - low)
        assert (ranks - torch.linspace(0, 1, count)).abs().max() < 1.63 / math.sqrt(count) + 2e-3  # Kolmogorov, 1 %
    room = 1000 - boxes.extent
    assert ((boxes.start / room).mean(0) - 0.5).abs().max() < 0.01
    assert (boxes.start <= room).all()


def test_draws_close_to_one_stay_inside() -> None:
    draws = torch.full((1, 2 * TRIES + 2), 1 - 2**-24)
    for side in (513, 1000, 1025):
        boxes = resized_boxes(torch.tensor([[side, side]]), draws, scale=(0.2, 0.3), ratio=(1.0, 1.0), size=16)
        assert (boxes.start + boxes.extent == side).all()


def test_central_square_follows_rounding() -> None:
    pixels = photos([(32, 33), (35, 32), (41, 64), (32, 32), (64, 37)])
    got = central(pixels, 32)
    for image, (h, w), one in zip(pixels.canvas, pixels.size.tolist(), got, strict=True):
        top, left = round((h - 32) / 2), round((w - 32) / 2)
        assert torch.equal(one, image[:, top : top + 32, left : left + 32])


def test_centre_of_an_image_of_that_size_is_the_image() -> None:
    pixels = photos([(32, 32)] * 3, canvas=(32, 32))
    assert central(pixels, 32) is pixels.canvas


def test_normalise_and_bgr() -> None:
    pixels = photos([(16, 16)] * 2, canvas=(16, 32))
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    want = (pixels.canvas[:, :, :, :16].double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(
        std
    ).double().view(3, 1, 1)
    got = centre(16, Normalise(mean, std))(pixels)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    swapped = centre(16, Normalise(mean, std, bgr=True))(pixels)
    assert swapped.is_contiguous()
    assert torch.equal(swapped, got[:, [2, 1, 0]])


SPECS = ["resized_crop", "resized_crop(scale=(0.5, 1.0), flip=False)", "crop", "affine", "affine(flip=True)", "none"]


@pytest.mark.parametrize("spec", SPECS)
def test_augment_is_reproducible_and_well_formed(spec: str) -> None:
    pixels = photos([(32, 60), (40, 32), (32, 32)])
    view = augment(spec, size=28, short_side=32, normalise=RAW)
    one = view(pixels, Generator().manual_seed(3))
    assert one.shape == (3, 3, 28, 28)
    assert one.dtype == torch.float32
    assert one.is_contiguous()
    assert one.min() > -1e-3
    assert one.max() < 255.001
    assert torch.equal(one, view(pixels, Generator().manual_seed(3)))
    same = torch.equal(one, view(pixels, Generator().manual_seed(4)))
    assert same == (spec == "none")


@pytest.mark.parametrize("spec", SPECS)
def test_an_image_does_not_depend_on_its_batch(spec: str) -> None:
    view = augment(spec, size=28, short_side=32, normalise=RAW)
    sizes = [(32, 60), (40, 32), (32, 32)]
    pixels = photos(sizes)
    others = photos([(64, 32), (40, 32), (33, 50)], seed=9)
    others.canvas[1] = pixels.canvas[1]
    one = view(pixels, Generator().manual_seed(3))[1]
    two = view(others, Generator().manual_seed(3))[1]
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_affine_without_movement_is_the_centre() -> None:
    pixels = photos([(32, 40), (32, 32)])
    still = augment("affine(rotate=0, scale=0, shift=0)", size=28, short_side=32, normalise=RAW)
    torch.testing.assert_close(still(pixels, Generator()), centre(28, RAW)(pixels), atol=1e-2, rtol=0)


def test_affine_shifts_turns_and_continues_the_background() -> None:
    canvas = torch.full((64, 1, 32, 32), 200, dtype=torch.uint8)  # light background
    canvas[:, :, 12:20, 14:18] = 0
    pixels = Pixels(canvas, torch.tensor([[32, 32]]).repeat(64, 1))
    how = {"size": 32, "short_side": 32, "normalise": Normalise((0.0,), (1 / 255,))}
    moved = augment("affine(rotate=0, scale=0, shift=0.25)", **how)(pixels, Generator())
    ink = (200 - moved[:, 0]) / 200
    torch.testing.assert_close(
        ink.sum((1, 2)), torch.full((64,), 32.0), atol=0.1, rtol=0
    )  # nothing is lost, the background continues
    at = torch.arange(32.0)
    dy = (ink.sum(2) * at).sum(1) / 32 - 15.5
    assert dy.abs().max() <= 4.01  # a quarter of half the width
    assert dy.abs().max() > 3
    turned = augment("affine(rotate=1.5, scale=0, shift=0)", **how)(pixels, Generator())
    assert ((200 - turned).sum((1, 2, 3)) / 200 - 32).abs().max() < 1
    zoomed = augment("affine(rotate=0, scale=0.5, shift=0)", **how)(pixels, Generator())
    area = (200 - zoomed).sum((1, 2, 3)) / 200
    assert area.min() < 32 / 1.3**2
    assert area.max() > 32 * 1.3**2


@pytest.mark.parametrize(
    "spec",
    ["resized_crop(scale=(1.0, 1.0), ratio=(1.0, 1.0))", "crop", "affine(rotate=0, scale=0, shift=0, flip=True)"],
)
def test_half_of_the_images_are_mirrored(spec: str) -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(2000, 1, 32, 32).contiguous()
    pixels = Pixels(ramp, torch.tensor([[32, 32]]).repeat(2000, 1))
    view = augment(spec, size=32, short_side=32, normalise=Normalise((0.0,), (1.0,)))
    out = view(pixels, Generator().manual_seed(0))
    mirrored = (out[:, 0, 0, 0] > out[:, 0, 0, -1]).double().mean()
    assert 0.45 < mirrored < 0.55


def test_grey_images_have_one_channel() -> None:
    pixels = photos([(32, 32)] * 2, channels=1, canvas=(32, 32))
    assert augment("affine", size=32, short_side=32, normalise=GREY)(pixels, Generator()).shape == (2, 1, 32, 32)
    with pytest.raises(NearkinError, match="3 channels do not fit a network that expects 1"):
        centre(28, GREY)(photos([(32, 32)]))


def test_autocast_and_gradients_do_not_affect_crops() -> None:
    pixels = photos([(32, 60)])
    view = augment("resized_crop", size=28, short_side=32, normalise=RAW)
    plain = view(pixels, Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(plain, view(pixels, Generator().manual_seed(0)))


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: augment("resize_crop", size=28, short_side=32, normalise=RAW), "Did you mean 'resized_crop'"),
    (lambda: augment("resized_crop(scal=1)", size=28, short_side=32, normalise=RAW), "has no option 'scal'"),
    (lambda: augment("resized_crop(size=1)", size=28, short_side=32, normalise=RAW), "has no option 'size'"),
    (lambda: augment("resized_crop(scale=0.2)", size=28, short_side=32, normalise=RAW), "scale must be a tuple of 2"),
    (lambda: augment("resized_crop(scale=(0.5, 2))", size=28, short_side=32, normalise=RAW), "≤ 1"),
    (lambda: augment("resized_crop(ratio=(0, 1))", size=28, short_side=32, normalise=RAW), "ratio is a pair"),
    (lambda: augment("crop(flip=1)", size=28, short_side=32, normalise=RAW), "flip must be True or False"),
    (lambda: augment("affine(rotate=-1)", size=28, short_side=32, normalise=RAW), "rotate ≥ 0"),
    (lambda: augment("affine(scale=1)", size=28, short_side=32, normalise=RAW), "0 ≤ scale < 1"),
    (lambda: augment("jitter(contrast=2)", size=28, short_side=32, normalise=RAW), "from 0 to 1"),
    (lambda: augment("erase(scale=(0, 1))", size=28, short_side=32, normalise=RAW), "erase needs"),
    (lambda: augment("erase(none, none)", size=28, short_side=32, normalise=RAW), "one augmentation and options"),
    (lambda: augment("crop(none)", size=28, short_side=32, normalise=RAW), "only options such as"),
    (lambda: augment("crop", size=33, short_side=32, normalise=RAW), "do not fit into images stored at 32"),
    (lambda: centre(33, RAW, short_side=32), "do not fit into images stored at 32"),
    (lambda: centre(65, RAW)(photos([(64, 64)])), "does not fit into images of 64"),
    (lambda: centre(32, Normalise((0.5,), (0.0,))), "std above zero"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_errors_are_sentences(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence.replace("(", r"\(")):
        call()


def test_table_and_short_side() -> None:
    assert set(AUGMENTS) == {"resized_crop", "crop", "affine", "none", "jitter", "erase"}
    assert [short_side_for(size) for size in (224, 227, 256, 448)] == [256, 259, 293, 512]
