"""Images opened once for many runs: the same store again, other images anew, the oldest given up."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data.images import Images
from nearkin.data.pixels import open as shared
from nearkin.data.pixels.open import SharedStores

OPEN = {"short": 16, "device": "cpu"}


@pytest.fixture
def photos(tmp_path: Path) -> Images:
    """Six images in two classes; the third is no image."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{n}.png" for n in range(6)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    paths[2].write_bytes(b"no image")
    return Images(paths, torch.arange(6) % 2, ("even", "odd"))


@pytest.fixture
def opened(monkeypatch):
    """How often the files were really opened."""
    calls = []
    real = shared.open_store

    def counted(images, **given):
        calls.append(len(images))
        return real(images, **given)

    monkeypatch.setattr(shared, "open_store", counted)
    return calls


def test_the_same_files_are_opened_once_and_give_the_same_pixels(photos, opened):
    stores = SharedStores()
    first, good, bad = stores(photos, **OPEN)
    relabelled = Images(list(photos.sources), 1 - photos.labels, photos.names)
    again, others, same_bad = stores(relabelled, **OPEN)
    assert opened == [6]
    assert again is first
    assert len(good) == len(others) == 5
    assert [b.row for b in same_bad] == [b.row for b in bad] == [2]
    assert torch.equal(others.labels, 1 - good.labels)
    assert torch.equal(again[torch.arange(5)].canvas, first[torch.arange(5)].canvas)


def test_other_files_sizes_and_channels_are_opened_anew(photos, opened):
    stores = SharedStores(keep=9)
    stores(photos, **OPEN)
    stores(photos.take([0, 1, 3]), **OPEN)
    stores(photos, short=18, device="cpu")
    stores(photos, **OPEN, channels=1)
    assert opened == [6, 3, 6, 6]


def test_the_oldest_makes_room(photos, opened):
    stores = SharedStores(keep=2)
    a, b, c = photos.take([0, 1]), photos.take([3, 4]), photos.take([0, 5])
    for images in (a, b, a, c):  # a is younger than b when c comes
        stores(images, **OPEN)
    assert len(stores.opened) == 2
    stores(a, **OPEN)
    assert len(opened) == 3
    stores(b, **OPEN)
    assert len(opened) == 4


def test_pixels_in_memory_are_not_kept(opened):
    stores = SharedStores()
    pixels = Images(torch.zeros(4, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), ("a", "b"))
    stores(pixels, **OPEN, channels=1)
    stores(pixels, **OPEN, channels=1)
    assert opened == [4, 4]
    assert not stores.opened
