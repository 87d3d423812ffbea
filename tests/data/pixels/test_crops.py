"""Crops compared with cutting and resizing by torch, and random boxes with their definition."""

import math

import pytest
import torch
from image_helpers import random_pixels
from torch import Generator, Tensor
from torch.nn import functional as F

from nearkin.data.pixels.crops import TRIES, Boxes, central, crop, plain_boxes, resized_boxes, squashed_boxes


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
    pixels = random_pixels([(40, 64)] * len(boxes))
    flip = torch.tensor([False, True, False, True, False, True])
    got = crop(pixels.canvas, boxes_of(boxes, size), size=size, flip=flip)
    for image, box, mirrored, one in zip(pixels.canvas, boxes, flip, got, strict=True):
        want = cut(image, box, (size, size))
        torch.testing.assert_close(one.double(), want.flip(2) if mirrored else want, atol=2e-3, rtol=0)


def test_crop_reads_nothing_outside_the_box() -> None:
    pixels = random_pixels([(40, 64)])
    boxes = boxes_of([(8, 8, 16, 16)], 12)
    before = crop(pixels.canvas, boxes, size=12, flip=torch.tensor([False]))
    inside = pixels.canvas[:, :, 8:24, 8:24].clone()
    pixels.canvas.fill_(255)
    pixels.canvas[:, :, 8:24, 8:24] = inside
    assert torch.equal(before, crop(pixels.canvas, boxes, size=12, flip=torch.tensor([False])))


def test_squashed_crop_equals_squashing_then_cutting() -> None:
    pixels = random_pixels([(32, 64), (50, 32), (32, 32)])
    draws = torch.tensor([[0.0, 0.99999], [0.5, 0.3], [0.7, 0.0]])
    boxes = squashed_boxes(pixels.size, draws, short_side=32, size=28)
    got = crop(pixels.canvas, boxes, size=28, flip=torch.tensor([False, False, True]))
    corners = [(0, 4), (2, 1), (3, 0)]  # floor(u · 5)
    for b, (top, left) in enumerate(corners):
        h, w = pixels.size[b].tolist()
        want = cut(pixels.canvas[b], (0, 0, h, w), (32, 32))[:, top : top + 28, left : left + 28]
        torch.testing.assert_close(got[b].double(), want.flip(2) if b == 2 else want, atol=2e-3, rtol=0)


def test_plain_crop_does_not_resize() -> None:
    pixels = random_pixels([(32, 64), (50, 32), (32, 32)])
    draws = torch.tensor([[0.0, 0.99999], [0.5, 0.3], [0.7, 0.0]])
    boxes = plain_boxes(pixels.size, draws, size=28)
    got = crop(pixels.canvas, boxes, size=28, flip=torch.tensor([False, False, True]))
    corners = [(0, 36), (11, 1), (3, 0)]  # floor(u · (side − 27))
    for b, (top, left) in enumerate(corners):
        want = pixels.canvas[b, :, top : top + 28, left : left + 28]
        torch.testing.assert_close(got[b], (want.flip(2) if b == 2 else want).float(), atol=2e-3, rtol=0)


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
    pixels = random_pixels([(32, 33), (35, 32), (41, 64), (32, 32), (64, 37)])
    got = central(pixels, 32)
    for image, (h, w), one in zip(pixels.canvas, pixels.size.tolist(), got, strict=True):
        top, left = round((h - 32) / 2), round((w - 32) / 2)
        assert torch.equal(one, image[:, top : top + 32, left : left + 32])


def test_centre_of_an_image_of_that_size_is_the_image() -> None:
    pixels = random_pixels([(32, 32)] * 3, canvas=(32, 32))
    assert central(pixels, 32) is pixels.canvas
