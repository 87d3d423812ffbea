"""Changed colours against their definition pixel by pixel, and erased boxes: how often, how large, how filled."""

import pytest
import torch
from torch import Generator, Tensor

from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Normalise, augment

RAW = Normalise((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))  # leaves pixels 0 … 255


def images(count: int, channels: int = 3) -> Pixels:
    canvas = torch.randint(60, 120, (count, channels, 32, 32), generator=Generator().manual_seed(0), dtype=torch.uint8)
    return Pixels(canvas, torch.full((count, 2), 32))


def view(text: str, pixels: Pixels, seed: int = 0) -> Tensor:
    rng = Generator().manual_seed(seed)
    normalise = RAW if pixels.canvas.shape[1] == 3 else Normalise((0.0,), (1 / 255,))
    return augment(text, size=32, short_side=32, normalise=normalise)(pixels, rng)


def test_colours_change_by_the_drawn_factors() -> None:
    pixels = images(5)
    got = view("jitter(none, brightness=0.2, contrast=0.3, saturation=0.4)", pixels)
    draws = torch.rand(5, 3, generator=Generator().manual_seed(0)).tolist()
    for image, draw, result in zip(pixels.canvas.double(), draws, got, strict=True):
        b, c, s = (1 + most * (2 * u - 1) for most, u in zip((0.2, 0.3, 0.4), draw, strict=True))
        x = b * image
        grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
        x = grey.mean() + c * (x - grey.mean())
        grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
        torch.testing.assert_close(result.double(), grey + s * (x - grey), atol=1e-3, rtol=0)


def test_colours_stay_within_0_and_255_and_grey_images_take_no_saturation() -> None:
    pixels = images(64)
    bright = pixels._replace(canvas=pixels.canvas.mul(2))
    assert view("jitter(none, brightness=1, contrast=1)", bright).amax() == 255
    grey = images(4, channels=1)
    same = view("jitter(none, brightness=0, contrast=0, saturation=1)", grey)
    torch.testing.assert_close(same, grey.canvas.float(), atol=1e-3, rtol=0)


def test_boxes_of_the_mean_colour_are_erased_at_the_rate() -> None:
    pixels = images(4000)
    got = view("erase(none, rate=0.25, scale=(0.1, 0.2), ratio=(0.5, 2))", pixels)
    plain = pixels.canvas.float()
    erased = (got - plain.mean((2, 3), keepdim=True)).abs().amax(1) < 1e-3  # [N, 32, 32]
    shares = erased.float().mean((1, 2))
    hit = shares > 0.05
    assert float(hit.float().mean()) == pytest.approx(0.25, abs=0.03)
    assert 0.07 < float(shares[hit].min()) <= float(shares[hit].max()) < 0.24, "within the scale, but for rounding"
    assert torch.equal(got[~hit], plain[~hit])
    box = erased[hit].float()
    filled = box.amax(1).sum(1) * box.amax(2).sum(1)  # height × width
    torch.testing.assert_close(box.sum((1, 2)), filled, msg="what is erased is a rectangle")
    middle = (box.amax(1) * torch.arange(32)).sum(1) / box.amax(1).sum(1)
    assert float(middle.mean()) == pytest.approx(15.5, abs=0.6), "boxes are anywhere with the same chance"


def test_crops_are_the_same_whatever_changes_them() -> None:
    pixels = images(8)
    off = "erase(jitter(resized_crop(flip=False), brightness=0, contrast=0, saturation=0), rate=0)"
    draws = 2 * 10 + 3 + 3 + 5
    uniform = torch.rand(8, draws, generator=Generator().manual_seed(3))
    alone = augment("resized_crop(flip=False)", size=32, short_side=32, normalise=RAW)
    with pytest.MonkeyPatch.context() as patch:  # the crop inside gets the first of the draws
        patch.setattr(torch, "rand", lambda rows, columns, **_: uniform[:rows, :columns])
        plain = alone(pixels, Generator())
        changed = augment(off, size=32, short_side=32, normalise=RAW)(pixels, Generator())
    torch.testing.assert_close(changed, plain, atol=1e-3, rtol=0)
    assert view("jitter", pixels).shape == plain.shape
