"""Stores: the same pixels wherever they are kept, the cache, bad files, and threads that leave when told to."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.pixels import cache as pixel_cache
from nearkin.data.pixels import open as opening
from nearkin.data.pixels import stores, threads
from nearkin.data.pixels.decode import BadImage, decode, decode_file
from nearkin.data.pixels.open import free_memory, open_store
from nearkin.data.pixels.stores import MemoryStore, StreamStore
from nearkin.data.pixels.threads import map_in_threads, start_workers
from nearkin.data.pixels.tiles import TILE, Packed, Pixels, canvas_for, first_tiles, tile_counts, unpack, write_tiles
from nearkin.data.pixels.views import Normalise, centre
from nearkin.errors import NearkinError

SHORT = 24
SIZES = [(24, 24), (30, 50), (64, 40), (20, 90), (100, 33), (24, 47), (12, 10), (40, 40)]
HOST = torch.device("cpu")


def save(path: Path, height: int, width: int, *, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Images:
    """Eight images in two classes; every second one a JPEG."""
    names = [f"{n}.{'jpg' if n % 2 else 'png'}" for n in range(len(SIZES))]
    paths = [
        save(tmp_path / "data" / name, *size, seed=n) for n, (name, size) in enumerate(zip(names, SIZES, strict=True))
    ]
    return Images(paths, torch.arange(len(SIZES)) % 2, ("even", "odd"))


def check(pixels: Pixels, want: list[Tensor]) -> None:
    """Each image in the corner of its canvas, blank elsewhere."""
    assert pixels.canvas.dtype == torch.uint8
    assert pixels.size.tolist() == [list(image.shape[1:]) for image in want]
    for canvas, image in zip(pixels.canvas, want, strict=True):
        expected = torch.zeros_like(canvas)
        expected[:, : image.shape[1], : image.shape[2]] = image
        assert torch.equal(canvas, expected)


def decoded(images: Images, *, channels: int = 3) -> list[Tensor]:
    paths = [Path(str(source)) for source in images.sources]
    return [decode_file(path, short_side=SHORT, channels=channels) for path in paths]


def no_decoding(*_: object, **__: object) -> Tensor:
    raise AssertionError("an image was decoded that the cache has")


@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_hold_any_image(channels: int) -> None:
    images = [
        torch.randint(0, 256, (channels, h, w), dtype=torch.uint8) for h, w in [(5, 31), (7, 32), (1, 33), (9, 1)]
    ]
    size = torch.tensor([image.shape[1:] for image in images])
    first, count = first_tiles(size, channels), tile_counts(size, channels)
    tiles = torch.full((int(1 + count.sum()), TILE), 77, dtype=torch.uint8)
    tiles[0] = 0
    for image, a, n in zip(images, first.tolist(), count.tolist(), strict=True):
        write_tiles(image, tiles[a : a + n])
    canvas = canvas_for(size, channels)
    assert canvas == (channels, 16, 48)
    index = torch.tensor([3, 0, 2, 2, 1])
    check(unpack(Packed(tiles, first, size).rows(index), canvas), [images[n] for n in index.tolist()])


@pytest.mark.parametrize("location", ["device", "stream"])
@pytest.mark.parametrize("channels", [1, 3])
def test_stores_give_the_decoded_pixels(photos: Images, location: opening.Location, channels: int) -> None:
    store, images, bad = open_store(photos, short_side=SHORT, channels=channels, device="cpu", location=location)
    assert isinstance(store, StreamStore if location == "stream" else MemoryStore)
    assert (len(store), images, bad) == (len(photos), photos, [])
    want = decoded(photos, channels=channels)
    index = torch.tensor([6, 1, 1, 4])
    check(store[index], [want[n] for n in index.tolist()])
    batches = [torch.tensor([0, 7]), torch.tensor([3]), torch.tensor([5, 2, 4])]
    for read_ahead in (0, 1, 5):
        followed = list(store.read_batches(iter(batches), read_ahead))
        assert [rows.tolist() for rows, _ in followed] == [batch.tolist() for batch in batches]
        for rows, pixels in followed:
            check(pixels, [want[n] for n in rows.tolist()])


def test_stream_and_memory_give_the_same_pixels_at_test_time(photos: Images) -> None:
    view = centre(20, Normalise((0.0,) * 3, (1 / 255,) * 3), short_side=SHORT)
    every = torch.arange(len(photos))
    kept, read_again = (
        view(open_store(photos, short_side=SHORT, device="cpu", location=k)[0][every]) for k in ("device", "stream")
    )
    assert (kept - read_again).abs().max() <= 1
    assert kept.std() > 10


def test_host_memory_feeds_another_device(photos: Images) -> None:
    """The way of images that fit into the host's memory only, with the meta device for want of another."""
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", location="host")
    assert isinstance(store, MemoryStore)
    want = decoded(photos)
    fed = MemoryStore(store.packed, short_side=SHORT, channels=3, device=torch.device("meta"))
    assert fed.loader is not None
    fed.loader.device = HOST
    check(fed[torch.tensor([5, 2])], [want[5], want[2]])
    (followed,) = fed.read_batches(iter([torch.tensor([7, 0, 3])]), 2)
    check(followed[1], [want[7], want[0], want[3]])


def test_pixels_in_memory_stay_as_they_are() -> None:
    for shape in ((5, 1, 32, 32), (3, 3, 28, 40)):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        images = Images(pixels, torch.zeros(len(pixels), dtype=torch.int64), ("a",))
        side = min(shape[2:])
        for short in (side, round(side * 256 / 224)):
            store, same, bad = open_store(images, short_side=short, channels=shape[1], device="cpu")
            assert (same is images, bad) == (True, [])
            check(store[torch.tensor([2, 0])], [pixels[2], pixels[0]])


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


def test_cache_spares_the_decoding(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = decoded(photos)
    seen: list[tuple[int, int]] = []
    open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c", progress=lambda *now: seen.append(now))
    assert seen[-1] == (len(photos), len(photos))
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    check(store[torch.arange(len(photos))], want)
    part = photos.take([5, 2])  # another split
    store, _, _ = open_store(part, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    check(store[torch.arange(2)], [want[5], want[2]])
    moved = [shutil.move(path, tmp_path / f"moved{n}") for n, path in enumerate(map(str, photos.sources))]
    elsewhere = Images([Path(path) for path in moved], photos.labels, photos.names)  # other names, same content
    store, _, _ = open_store(elsewhere, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    check(store[torch.arange(len(photos))], want)
    assert not list(tmp_path.glob("c/*/*/new-*"))


def test_cache_decodes_only_what_is_new(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(photos.take([0, 1, 2, 3]), short_side=SHORT, device="cpu", cache=tmp_path / "c")
    names = []

    def watched(data: bytes, path: Path, **options: int) -> Tensor:
        names.append(path)
        return decode(data, path, **options)

    monkeypatch.setattr(pixel_cache, "decode", watched)
    save(Path(str(photos.sources[2])), 31, 40, seed=99)  # changed in place
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    assert sorted(names) == sorted(photos.sources[n] for n in (2, 4, 5, 6, 7))
    check(store[torch.arange(len(photos))], decoded(photos))
    names.clear()
    open_store(photos, short_side=SHORT, channels=1, device="cpu", cache=tmp_path / "c")
    open_store(photos, short_side=SHORT + 1, device="cpu", cache=tmp_path / "c")
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
    open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    (damaged,) = tmp_path.glob(f"c/*/*/*/{name}")
    harm(damaged)
    store, _, bad = open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    assert bad == []
    check(store[torch.arange(len(photos))], decoded(photos))
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")  # whole again


def test_a_kill_while_writing_leaves_no_half_cache(
    photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pixel_cache.packs_folder(tmp_path / "c", short_side=SHORT, channels=3)
    writer = pixel_cache.PackWriter(folder)  # never finished, as after a kill
    writer.file.close()
    open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    assert writer.path.exists()  # it might still be at work
    monkeypatch.setattr(pixel_cache, "_STALE", -1)
    open_store(photos.take([0]), short_side=SHORT, channels=3, device="cpu", cache=tmp_path / "c")
    save(tmp_path / "extra.png", 30, 30)
    extra = Images([tmp_path / "extra.png"], torch.zeros(1, dtype=torch.int64), ("a",))
    open_store(extra, short_side=SHORT, device="cpu", cache=tmp_path / "c")
    assert not writer.path.exists()


def test_cache_that_cannot_be_written_is_a_sentence(photos: Images, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where a folder should be")
    with pytest.raises(NearkinError, match="Cannot write decoded images"):
        open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path / "c")


def test_chunks_do_not_show(photos: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_cache, "CHUNK", 200)
    seen: list[tuple[int, int]] = []
    store, _, _ = open_store(
        photos, short_side=SHORT, device="cpu", cache=tmp_path, progress=lambda *now: seen.append(now)
    )
    check(store[torch.arange(len(photos))], decoded(photos))
    done = [count for count, _ in seen[len(seen) // 2 :]]
    assert done == sorted(done)
    assert done[-1] == len(photos)
    monkeypatch.setattr(pixel_cache, "decode", no_decoding)
    check(open_store(photos, short_side=SHORT, device="cpu", cache=tmp_path)[0][torch.arange(8)], decoded(photos))


def spoil(images: Images, tmp_path: Path) -> Images:
    """Add a text file (row 1), a truncated JPEG (row 4) and a missing file (the last row, a class of its own)."""
    jpeg = Path(str(images.sources[1])).read_bytes()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "half.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    paths = [Path(str(source)) for source in images.sources]
    paths = [paths[0], tmp_path / "text.jpg", *paths[1:3], tmp_path / "half.jpg", *paths[3:], tmp_path / "gone.jpg"]
    labels = [0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 2]
    return Images(paths, torch.tensor(labels), ("even", "odd", "lost"))


@pytest.mark.parametrize("cached", [False, True])
def test_bad_images_are_left_out_and_named(photos: Images, tmp_path: Path, cached: bool) -> None:
    mixed = spoil(photos, tmp_path)
    for _ in range(1 + cached):
        cache = tmp_path / "c" if cached else None
        store, images, bad = open_store(mixed, short_side=SHORT, device="cpu", cache=cache)
        assert [(image.row, image.path.name) for image in bad] == [(1, "text.jpg"), (4, "half.jpg"), (10, "gone.jpg")]
        assert list(images.sources) == list(photos.sources)
        assert images.labels.tolist() == photos.labels.tolist()
        assert images.names == ("even", "odd")
        check(store[torch.arange(len(store))], decoded(photos))


def test_stream_leaves_out_bad_headers_and_stops_at_bad_pixels(photos: Images, tmp_path: Path) -> None:
    store, images, bad = open_store(spoil(photos, tmp_path), short_side=SHORT, device="cpu", location="stream")
    assert [image.path.name for image in bad] == ["text.jpg", "gone.jpg"]
    assert len(store) == len(images) == 9
    following = store.read_batches(iter([torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([5])]), 2)
    next(following)
    with pytest.raises(BadImage, match=r"half\.jpg: it is truncated"):
        next(following)
    assert workers() == 0


def test_a_file_that_changes_under_a_stream_is_named(photos: Images) -> None:
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", location="stream")
    save(Path(str(photos.sources[2])), 50, 24)
    with pytest.raises(BadImage, match=r"2\.png: its size has changed"):
        store[torch.tensor([2])]


def test_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NearkinError, match="There are no images"):
        open_store(Images([], torch.zeros(0, dtype=torch.int64), ()), short_side=SHORT, device="cpu")
    (tmp_path / "a.jpg").write_text("no")
    images = Images([tmp_path / "a.jpg"] * 2, torch.zeros(2, dtype=torch.int64), ("a",))
    for location in ("auto", "stream"):
        with pytest.raises(NearkinError, match=r"None of the 2 images can be used.*a\.jpg"):
            open_store(images, short_side=SHORT, device="cpu", location=location)


def test_too_many_pixels_are_refused_by_name(photos: Images) -> None:
    _, images, bad = open_store(photos, short_side=SHORT, device="cpu", limit=2000)
    assert [image.row for image in bad] == [2, 4]
    assert all("limit of 2,000" in str(image) for image in bad)
    assert len(images) == 6


def test_where_images_are_kept_depends_on_the_room(photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"cpu": 0}
    monkeypatch.setattr(opening, "free_memory", lambda device: room[device.type])
    assert isinstance(open_store(photos, short_side=SHORT, device="cpu")[0], StreamStore)
    room["cpu"] = TILE * int(1 + tile_counts(torch.tensor([image.shape[1:] for image in decoded(photos)]), 3).sum())
    assert isinstance(open_store(photos, short_side=SHORT, device="cpu")[0], MemoryStore)
    room["cpu"] -= 1
    assert isinstance(open_store(photos, short_side=SHORT, device="cpu")[0], StreamStore)
    with pytest.raises(NearkinError, match="not 'disk'"):
        open_store(photos, short_side=SHORT, device="cpu", location="disk")  # type: ignore[arg-type]


def test_free_memory_is_believable() -> None:
    assert 0 < opening._host_memory() < 2**46
    assert free_memory(HOST) < opening._host_memory()


def workers() -> int:
    return sum(thread.name.startswith("nearkin") for thread in threading.enumerate())


def counted(asked: list[int]) -> Iterator[Tensor]:
    for n in range(1000):
        asked.append(n)
        yield torch.tensor([n % 8, (n + 1) % 8])


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_nothing_is_asked_for_earlier_than_allowed(photos: Images, read_ahead: int) -> None:
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", location="stream")
    asked: list[int] = []
    following = store.read_batches(counted(asked), read_ahead)
    for n in range(5):
        next(following)
        assert len(asked) == n + 1 + read_ahead
    following.close()  # type: ignore[attr-defined]
    assert workers() == 0
    kept, _, _ = open_store(photos, short_side=SHORT, device="cpu")
    asked.clear()
    next(kept.read_batches(counted(asked), 0))
    assert len(asked) == 1


def test_work_goes_on_while_a_batch_is_used(photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Path] = []

    def watched(path: Path, **options: int) -> Tensor:
        done.append(path)
        return decode_file(path, **options)

    monkeypatch.setattr(stores, "decode_file", watched)
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", location="stream")
    following = store.read_batches(counted([]), 2)
    next(following)
    end = time.monotonic() + 20
    while len(done) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(done) == 6  # this batch and the two after it
    del following
    assert workers() == 0


def test_errors_and_interrupts_leave_no_threads(photos: Images) -> None:
    store, _, _ = open_store(photos, short_side=SHORT, device="cpu", location="stream")

    def interrupted() -> None:
        for n, _ in enumerate(store.read_batches(counted([]), 2)):
            if n == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert workers() == 0

    def fails() -> Iterator[Tensor]:
        yield torch.tensor([0])
        raise RuntimeError("the sampler broke")

    with pytest.raises(RuntimeError, match="the sampler broke"):
        list(store.read_batches(fails(), 2))
    assert workers() == 0


def test_workers_stop_at_the_next_image() -> None:
    ran: list[int] = []

    def slow(n: int) -> None:
        ran.append(n)
        time.sleep(0.01)

    with start_workers() as workers_:
        workers_.submit(slow, range(1000))
        while not ran:
            time.sleep(0.001)
    assert len(ran) < 100
    assert workers() == 0


def test_map_in_threads_keeps_order_and_stops_at_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GROUP", 2)
    assert map_in_threads(lambda n: n * n, range(50)) == [n * n for n in range(50)]
    assert map_in_threads(str, []) == []
    ran: list[int] = []

    def fail(n: int) -> None:
        ran.append(n)
        time.sleep(0.002)
        if n == 4:
            raise ValueError("four")

    with pytest.raises(ValueError, match="four"):
        map_in_threads(fail, range(1000))
    assert len(ran) < 500
    assert workers() == 0
