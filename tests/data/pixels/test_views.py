"""Augmentations and the test view: what they show, and errors for wrong ones."""

from collections.abc import Callable

import pytest
import torch
from image_helpers import random_pixels
from torch import Generator

from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import AUGMENTS, Normalise, augment, centre, short_side_for
from nearkin.errors import NearkinError

RAW = Normalise((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))  # leaves pixels 0 … 255
GREY = Normalise((0.5,), (0.5,))


@pytest.mark.parametrize("squash", [True, False])
def test_the_squash_option_of_crop(squash: bool) -> None:
    pixels = random_pixels([(32, 64)] * 4)
    pixels.canvas[:] = torch.arange(64, dtype=torch.uint8)  # brightness is the x coordinate
    view = augment(f"crop(squash={squash}, flip=False)", size=28, short_side=32, normalise=RAW)
    steps = view(pixels, Generator().manual_seed(0)).diff(dim=3)[..., 2:-2].mean()
    assert steps.item() == pytest.approx(2 if squash else 1, abs=0.01)


def test_normalise_and_bgr() -> None:
    pixels = random_pixels([(16, 16)] * 2, canvas=(16, 32))
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
    pixels = random_pixels([(32, 60), (40, 32), (32, 32)])
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
    pixels = random_pixels(sizes)
    others = random_pixels([(64, 32), (40, 32), (33, 50)], seed=9)
    others.canvas[1] = pixels.canvas[1]
    one = view(pixels, Generator().manual_seed(3))[1]
    two = view(others, Generator().manual_seed(3))[1]
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_affine_without_movement_is_the_centre() -> None:
    pixels = random_pixels([(32, 40), (32, 32)])
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
    pixels = random_pixels([(32, 32)] * 2, channels=1, canvas=(32, 32))
    assert augment("affine", size=32, short_side=32, normalise=GREY)(pixels, Generator()).shape == (2, 1, 32, 32)
    with pytest.raises(NearkinError, match="3 channels do not fit a network that expects 1"):
        centre(28, GREY)(random_pixels([(32, 32)]))


def test_autocast_and_gradients_do_not_affect_crops() -> None:
    pixels = random_pixels([(32, 60)])
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
    (lambda: centre(65, RAW)(random_pixels([(64, 64)])), "does not fit into images of 64"),
    (lambda: centre(32, Normalise((0.5,), (0.0,))), "std above zero"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_errors_are_sentences(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence.replace("(", r"\(")):
        call()


def test_table_and_short_side() -> None:
    assert set(AUGMENTS) == {"resized_crop", "crop", "affine", "none", "jitter", "erase"}
    assert [short_side_for(size) for size in (224, 227, 256, 448)] == [256, 259, 293, 512]
