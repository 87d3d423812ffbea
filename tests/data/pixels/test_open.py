"""Opening images: the location of their pixels, pixels in memory, and bad files."""

import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from image_helpers import SHORT_SIDE, add_bad_files, check_pixels, decode_images, make_photos
from PIL import Image

from nearkin.data.images import Dataset, Images
from nearkin.data.pixels import cache as pixel_cache
from nearkin.data.pixels import open as opening
from nearkin.data.pixels.decode import measure
from nearkin.data.pixels.open import free_memory, keep_images_open, open_store
from nearkin.data.pixels.stores import MemoryStore, StreamStore
from nearkin.data.pixels.tiles import TILE, tile_counts
from nearkin.errors import NearkinError


@pytest.fixture
def photos(tmp_path: Path) -> Images:
    return make_photos(tmp_path / "data")


def test_pixels_in_memory_keep_their_size() -> None:
    for shape in ((5, 1, 32, 32), (3, 3, 28, 40)):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        images = Images(pixels, torch.zeros(len(pixels), dtype=torch.int64), ("a",))
        side = min(shape[2:])
        for short in (side, round(side * 256 / 224)):
            store, same, bad = open_store(images, short_side=short, channels=shape[1], device="cpu")
            assert (same is images, bad) == (True, [])
            check_pixels(store[torch.tensor([2, 0])], [pixels[2], pixels[0]])


def test_pixels_in_memory_are_resized_for_larger_and_smaller_crops() -> None:
    pixels = torch.randint(0, 256, (2, 1, 32, 48), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(2, dtype=torch.int64), ("a",))
    for short, size in ((64, [64, 96]), (16, [16, 24])):
        store, _, _ = open_store(images, short_side=short, channels=3, device="cpu")
        got = store[torch.tensor([1])]
        assert got.size.tolist() == [size]
        want = torch.nn.functional.interpolate(pixels[1:].double(), size=size, mode="bilinear", antialias=True)
        assert (got.canvas[:, :, : size[0], : size[1]].double() - want).abs().max() <= 1
    with pytest.raises(NearkinError, match="uint8"):
        open_store(Images(pixels.float(), images.labels, ("a",)), short_side=32, device="cpu")


@pytest.mark.parametrize("cached", [False, True])
def test_bad_images_are_left_out_and_named(photos: Images, tmp_path: Path, cached: bool) -> None:
    mixed = add_bad_files(photos, tmp_path)
    for _ in range(1 + cached):
        cache = tmp_path / "c" if cached else None
        store, images, bad = open_store(mixed, short_side=SHORT_SIDE, device="cpu", cache=cache)
        assert [(image.row, image.path.name) for image in bad] == [(1, "text.jpg"), (4, "half.jpg"), (10, "gone.jpg")]
        assert list(images.sources) == list(photos.sources)
        assert images.labels.tolist() == photos.labels.tolist()
        assert images.names == ("even", "odd")
        check_pixels(store[torch.arange(len(store))], decode_images(photos))


def test_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NearkinError, match="There are no images"):
        open_store(Images([], torch.zeros(0, dtype=torch.int64), ()), short_side=SHORT_SIDE, device="cpu")
    (tmp_path / "a.jpg").write_text("no")
    images = Images([tmp_path / "a.jpg"] * 2, torch.zeros(2, dtype=torch.int64), ("a",))
    for location in ("auto", "stream"):
        with pytest.raises(NearkinError, match=r"None of the 2 images can be used.*a\.jpg"):
            open_store(images, short_side=SHORT_SIDE, device="cpu", location=location)


def test_too_many_pixels_are_refused_by_name(photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_cache, "measure", partial(measure, limit=2000))
    _, images, bad = open_store(photos, short_side=SHORT_SIDE, device="cpu")
    assert [image.row for image in bad] == [2, 4]
    assert all("limit of 2,000" in str(image) for image in bad)
    assert len(images) == 6


def test_the_location_depends_on_free_memory(photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"cpu": 0}
    monkeypatch.setattr(opening, "free_memory", lambda device: room[device.type])
    assert isinstance(open_store(photos, short_side=SHORT_SIDE, device="cpu")[0], StreamStore)
    sizes = torch.tensor([image.shape[1:] for image in decode_images(photos)])
    room["cpu"] = TILE * int(1 + tile_counts(sizes, 3).sum())
    assert isinstance(open_store(photos, short_side=SHORT_SIDE, device="cpu")[0], MemoryStore)
    room["cpu"] -= 1
    assert isinstance(open_store(photos, short_side=SHORT_SIDE, device="cpu")[0], StreamStore)
    with pytest.raises(NearkinError, match="not 'disk'"):
        open_store(photos, short_side=SHORT_SIDE, device="cpu", location="disk")  # type: ignore[arg-type]


def test_free_memory_is_plausible() -> None:
    assert 0 < opening._host_memory() < 2**46
    assert free_memory(torch.device("cpu")) < opening._host_memory()


# Images that stay open.

OPEN = {"short_side": 16, "device": "cpu"}


@pytest.fixture
def files(tmp_path: Path) -> Images:
    """Six files in two classes; the third is not an image."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{n}.png" for n in range(6)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    paths[2].write_bytes(b"no image")
    return Images(paths, torch.arange(6) % 2, ("even", "odd"))


@pytest.fixture
def opened(monkeypatch):
    """The number of files of each call of `open_files`."""
    calls = []
    real = opening.open_files

    def counted(paths, **how):
        calls.append(len(paths))
        return real(paths, **how)

    monkeypatch.setattr(opening, "open_files", counted)
    return calls


def test_the_same_files_are_opened_once_and_give_the_same_pixels(files, opened):
    relabelled = Images(list(files.sources), 1 - files.labels, files.names)
    with keep_images_open():
        first, good, bad = open_store(files, **OPEN)
        again, others, same_bad = open_store(relabelled, **OPEN)
    assert opened == [6]
    assert again is first
    assert len(good) == len(others) == 5
    assert [b.row for b in same_bad] == [b.row for b in bad] == [2]
    assert torch.equal(others.labels, 1 - good.labels)
    assert torch.equal(again[torch.arange(5)].canvas, first[torch.arange(5)].canvas)


def test_other_files_sizes_and_channels_are_opened_separately(files, opened):
    with keep_images_open(9):
        open_store(files, **OPEN)
        open_store(files.take([0, 1, 3]), **OPEN)
        open_store(files, short_side=18, device="cpu")
        open_store(files, **OPEN, channels=1)
    assert opened == [6, 3, 6, 6]


def test_the_least_recently_used_store_is_freed_first(files, opened):
    a, b, c = files.take([0, 1]), files.take([3, 4]), files.take([0, 5])
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


def test_stores_are_freed_after_the_context_and_shared_with_contexts_inside(files, opened):
    with keep_images_open():
        with keep_images_open():
            store = weakref.ref(open_store(files, **OPEN)[0])
        open_store(files, **OPEN)
        assert opened == [6]
        assert store() is not None
    gc.collect()
    assert store() is None
    open_store(files, **OPEN)
    assert opened == [6, 6]


def test_misleading_names_are_found_with_the_unreadable_images(photos: Images) -> None:
    assert not isinstance(photos.sources, torch.Tensor)
    path = photos.sources[0]
    Image.new("RGB", (24, 24)).save(path, "GIF")
    found = opening.find_unreadable(Dataset("folder", photos, photos.take([1]), ()))
    assert found == [f"1 image is read by content, which is of another format than the name says: {path} (GIF)."]
