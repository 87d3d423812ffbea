"""Images are kept larger than the network's input: views resize them, alike from memory, streams and single files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Generator

from nearkin.data.images import Images
from nearkin.data.pixels import crops, views
from nearkin.data.pixels.decode import Storage, decode_file, stored_size
from nearkin.data.pixels.open import estimated_bytes, open_inputs, open_store
from nearkin.data.pixels.tiles import TILE
from nearkin.data.pixels.views import Normalise, augment, centre

RAW = Normalise((0.0,) * 3, (1 / 255,) * 3)  # leaves pixels 0 … 255
KEPT = {"short_side": 150, "enlarge": False}
SHAPES = [(150, 210), (300, 260), (90, 140), (137, 400), (60, 60), (400, 170)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Images:
    """Pictures of large and small detail, larger and smaller than they are kept."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    paths = []
    for number, (height, width) in enumerate(SHAPES):
        large = np.asarray(Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize((width, height)), float)
        paths.append(folder / f"{number}.png")
        pixels = (0.8 * large + rng.uniform(0, 51, (height, width, 3))).astype(np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    return Images(paths, torch.arange(len(SHAPES)) % 2, ("even", "odd"))


def by_pillow(path: Path, *, size: int, short_side: int) -> torch.Tensor:
    """The central square of a stored picture, resized by Pillow: [3, size, size]."""
    stored = decode_file(path, **KEPT)
    height, width = stored_size(*stored.shape[1:], short_side)
    picture = Image.fromarray(stored.permute(1, 2, 0).numpy())
    done = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), float)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return torch.from_numpy(done[top : top + size, left : left + size].transpose(2, 0, 1))


@pytest.mark.parametrize(("size", "short_side"), [(64, 73), (112, 128), (130, 150), (160, 183)])
def test_test_views_are_within_one_grey_level_of_pillow(photos, size, short_side):
    store, _, _ = open_store(photos, **KEPT, device="cpu")
    assert store[torch.tensor([1])].size.tolist() == [[173, 150]]
    assert store[torch.tensor([4])].size.tolist() == [[60, 60]]  # not enlarged
    seen = centre(size, RAW, short_side=short_side)(store[torch.arange(len(photos))])
    for path, one in zip(photos.sources, seen, strict=True):
        assert (one - by_pillow(path, size=size, short_side=short_side)).abs().max() <= 1
    assert seen.std() > 20


def test_memory_streams_and_single_files_give_the_same_pixels(photos, tmp_path):
    view, rows = centre(112, RAW, short_side=128), torch.arange(len(photos))
    want = view(open_store(photos, **KEPT, device="cpu", location="device")[0][rows])
    for location in ("host", "stream", "device"):
        store, _, _ = open_store(photos, **KEPT, device="cpu", location=location, cache=tmp_path)
        assert torch.equal(view(store[rows]), want), location
    for row, path in enumerate(photos.sources):
        single = open_inputs([path], **KEPT, channels=3, device=torch.device("cpu"))
        assert torch.equal(view(single[torch.tensor([0])])[0], want[row])
        decoded = decode_file(path, **KEPT)  # as the server reads an upload
        upload = open_inputs([decoded], **KEPT, channels=3, device=torch.device("cpu"), near_enough=False)
        assert torch.equal(view(upload[torch.tensor([0])])[0], want[row])


@pytest.mark.parametrize("spec", ["resized_crop", "crop", "crop(squash=False)", "affine", "none"])
def test_one_by_one_and_together_give_the_same_crops(photos, monkeypatch, spec):
    store, _, _ = open_store(photos, **KEPT, device="cpu")
    view = augment(spec, size=56, short_side=64, normalise=RAW)
    alone = view(store[torch.arange(len(photos))], Generator().manual_seed(0))
    for module in (views, crops):
        monkeypatch.setattr(module, "crop_for", lambda *_: crops.crop)
    together = view(store[torch.arange(len(photos))], Generator().manual_seed(0))
    torch.testing.assert_close(alone, together, atol=1.01, rtol=0)
    assert alone.std() > 20


@pytest.mark.parametrize("spec", ["crop(squash=False, flip=False)", "affine(rotate=0, scale=0, shift=0)", "none"])
def test_views_show_as_much_of_an_image_however_it_is_stored(tmp_path, spec):
    ramp = np.linspace(0, 255, 160).round().astype(np.uint8)
    Image.fromarray(np.stack([np.tile(ramp, (160, 1))] * 3, 2)).save(tmp_path / "ramp.png")
    images = Images([tmp_path / "ramp.png"], torch.tensor([0]), ("ramp",))
    view = augment(spec, size=56, short_side=64, normalise=RAW)
    exact, larger = (
        view(open_store(images, device="cpu", **how)[0][torch.tensor([0])], Generator().manual_seed(1))
        for how in ({"short_side": 64}, KEPT)
    )
    torch.testing.assert_close(exact, larger, atol=2.5, rtol=0)


def test_small_crops_show_detail_that_smaller_pixels_lack(photos):
    view = augment("resized_crop(scale=(0.1, 0.1))", size=56, short_side=64, normalise=RAW)
    fine, soft = (
        view(open_store(photos, device="cpu", **how)[0][torch.tensor([0, 1])], Generator().manual_seed(1))
        for how in (KEPT, {"short_side": 64})
    )
    assert fine.diff(dim=3).abs().mean() > 1.5 * soft.diff(dim=3).abs().mean()


def test_the_estimate_of_memory_is_near_the_truth(photos):
    store, _, _ = open_store(photos, **KEPT, device="cpu")
    estimate = estimated_bytes(photos, storage=Storage(**KEPT), channels=3)
    assert estimate == pytest.approx(len(store.packed.tiles) * TILE, rel=0.01)
    glyphs = Images(torch.zeros(10, 1, 32, 32, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64), ("a",))
    assert estimated_bytes(glyphs, storage=Storage(64, enlarge=False), channels=1) == 10 * 32 * 32
