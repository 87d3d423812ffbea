"""Images that stay open: the same files give the same store, the least recently used is freed."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data.images import Images
from nearkin.data.pixels import open as opening
from nearkin.data.pixels.open import keep_images_open, open_store

OPEN = {"short_side": 16, "device": "cpu"}


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
    """How many images each real reading of files had."""
    calls = []
    real = opening.open_files

    def counted(paths, **how):
        calls.append(len(paths))
        return real(paths, **how)

    monkeypatch.setattr(opening, "open_files", counted)
    return calls


def test_the_same_files_are_opened_once_and_give_the_same_pixels(photos, opened):
    relabelled = Images(list(photos.sources), 1 - photos.labels, photos.names)
    with keep_images_open():
        first, good, bad = open_store(photos, **OPEN)
        again, others, same_bad = open_store(relabelled, **OPEN)
    assert opened == [6]
    assert again is first
    assert len(good) == len(others) == 5
    assert [b.row for b in same_bad] == [b.row for b in bad] == [2]
    assert torch.equal(others.labels, 1 - good.labels)
    assert torch.equal(again[torch.arange(5)].canvas, first[torch.arange(5)].canvas)


def test_other_files_sizes_and_channels_are_opened_separately(photos, opened):
    with keep_images_open(9):
        open_store(photos, **OPEN)
        open_store(photos.take([0, 1, 3]), **OPEN)
        open_store(photos, short_side=18, device="cpu")
        open_store(photos, **OPEN, channels=1)
    assert opened == [6, 3, 6, 6]


def test_the_least_recently_used_store_is_freed_first(photos, opened):
    a, b, c = photos.take([0, 1]), photos.take([3, 4]), photos.take([0, 5])
    with keep_images_open(2):
        for images in (a, b, a, c):  # a was used after b when c comes
            open_store(images, **OPEN)
        open_store(a, **OPEN)
        assert len(opened) == 3
        open_store(b, **OPEN)
        assert len(opened) == 4


def test_pixels_in_memory_are_not_kept():
    pixels = Images(torch.zeros(4, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), ("a", "b"))
    with keep_images_open():
        first, again = (open_store(pixels, **OPEN, channels=1)[0] for _ in range(2))
    assert first is not again


def test_stores_are_freed_after_the_context_and_shared_with_contexts_inside(photos, opened):
    with keep_images_open():
        with keep_images_open():
            store = weakref.ref(open_store(photos, **OPEN)[0])
        open_store(photos, **OPEN)
        assert opened == [6]
        assert store() is not None
    gc.collect()
    assert store() is None
    open_store(photos, **OPEN)
    assert opened == [6, 6]
