"""The cache of decoded images: found by content, rebuilt after damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from image_helpers import SHORT_SIDE, check_pixels, decode_images, make_photos, save_noise
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.pixels import cache as pixel_cache
from nearkin.data.pixels.decode import decode
from nearkin.data.pixels.open import open_store
from nearkin.errors import NearkinError


@pytest.fixture
def photos(tmp_path: Path) -> Images:
    return make_photos(tmp_path / "data")


def no_decoding(*_: object, **__: object) -> Tensor:
    raise AssertionError("an image was decoded that the cache has")


def test_cached_images_are_not_decoded_again(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = decode_images(photos)
    seen: list[tuple[int, int]] = []
    watch = lambda *now: seen.append(now)  # noqa: E731
    open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c", progress=watch)
    assert seen[-1] == (len(photos), len(photos))
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    check_pixels(store[torch.arange(len(photos))], want)
    part = photos.take([5, 2])  # another split
    store, _, _ = open_store(part, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    check_pixels(store[torch.arange(2)], [want[5], want[2]])
    moved = [shutil.move(path, tmp_path / f"moved{n}") for n, path in enumerate(map(str, photos.sources))]
    elsewhere = Images([Path(path) for path in moved], photos.labels, photos.names)  # other names, same content
    store, _, _ = open_store(elsewhere, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    check_pixels(store[torch.arange(len(photos))], want)
    assert not list(tmp_path.glob("c/*/*/new-*"))


def test_cache_decodes_only_what_is_new(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(photos.take([0, 1, 2, 3]), short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    names = []

    def watched(data: bytes, path: Path, **options: int) -> Tensor:
        names.append(path)
        return decode(data, path, **options)

    monkeypatch.setattr(pixel_cache, "decode", watched)
    save_noise(Path(str(photos.sources[2])), 31, 40, seed=99)  # changed in place
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    assert sorted(names) == sorted(photos.sources[n] for n in (2, 4, 5, 6, 7))
    check_pixels(store[torch.arange(len(photos))], decode_images(photos))
    names.clear()
    open_store(photos, short_side=SHORT_SIDE, channels=1, device="cpu", cache=tmp_path / "c")
    open_store(photos, short_side=SHORT_SIDE + 1, device="cpu", cache=tmp_path / "c")
    assert len(names) == 2 * len(photos)  # other pixels, other packs


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["tiles.bin", "index.npz"])
def test_damaged_cache_is_noticed_and_rebuilt(
    photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], name: str
) -> None:
    open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    (damaged,) = tmp_path.glob(f"c/*/*/*/{name}")
    harm(damaged)
    store, _, bad = open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    assert bad == []
    check_pixels(store[torch.arange(len(photos))], decode_images(photos))
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")  # complete again


def test_unfinished_packs_are_removed_later(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pixel_cache.packs_folder(tmp_path / "c", short_side=SHORT_SIDE, channels=3)
    unfinished = folder / "new-killed"  # as a killed process leaves it
    unfinished.mkdir(parents=True)
    open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    assert unfinished.exists()  # its process might still be running
    monkeypatch.setattr(pixel_cache, "_STALE", -1)
    open_store(photos.take([0]), short_side=SHORT_SIDE, channels=3, device="cpu", cache=tmp_path / "c")
    save_noise(tmp_path / "extra.png", 30, 30)
    extra = Images([tmp_path / "extra.png"], torch.zeros(1, dtype=torch.int64), ("a",))
    open_store(extra, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")
    assert not unfinished.exists()


def test_a_cache_that_cannot_be_written_is_an_error(photos: Images, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where a folder should be")
    with pytest.raises(NearkinError, match="Cannot write decoded images"):
        open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path / "c")


def test_chunks_do_not_change_the_result(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_cache, "CHUNK", 200)
    seen: list[tuple[int, int]] = []
    store, _, _ = open_store(
        photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path, progress=lambda *now: seen.append(now)
    )
    check_pixels(store[torch.arange(len(photos))], decode_images(photos))
    done = [count for count, _ in seen[len(seen) // 2 :]]
    assert done == sorted(done)
    assert done[-1] == len(photos)
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", cache=tmp_path)
    check_pixels(store[torch.arange(8)], decode_images(photos))
