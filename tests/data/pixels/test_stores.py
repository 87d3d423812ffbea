"""Stores: the same pixels from memory and from a stream, read ahead as far as allowed."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from image_helpers import SHORT_SIDE, add_bad_files, check_pixels, decode_images, make_photos, save_noise
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.pixels import decoders, stores, threads
from nearkin.data.pixels import open as opening
from nearkin.data.pixels.decoders import Decoders, Request, decode_request
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.data.pixels.open import open_store
from nearkin.data.pixels.stores import MemoryStore, StreamStore
from nearkin.data.pixels.views import Normalise, centre


@pytest.fixture
def photos(tmp_path: Path) -> Images:
    return make_photos(tmp_path / "data")


def running_workers() -> int:
    return sum(thread.name.startswith("nearkin") for thread in threading.enumerate())


@pytest.mark.parametrize("location", ["device", "stream"])
@pytest.mark.parametrize("channels", [1, 3])
def test_stores_give_the_decoded_pixels(photos: Images, location: opening.Location, channels: int) -> None:
    store, images, bad = open_store(photos, short_side=SHORT_SIDE, channels=channels, device="cpu", location=location)
    assert isinstance(store, StreamStore if location == "stream" else MemoryStore)
    assert (len(store), images, bad) == (len(photos), photos, [])
    want = decode_images(photos, channels=channels)
    index = torch.tensor([6, 1, 1, 4])
    check_pixels(store[index], [want[n] for n in index.tolist()])
    batches = [torch.tensor([0, 7]), torch.tensor([3]), torch.tensor([5, 2, 4])]
    for read_ahead in (0, 1, 5):
        followed = list(store.read_batches(iter(batches), read_ahead))
        assert [rows.tolist() for rows, _ in followed] == [batch.tolist() for batch in batches]
        for rows, pixels in followed:
            check_pixels(pixels, [want[n] for n in rows.tolist()])


def test_stream_and_memory_give_the_same_pixels_at_test_time(photos: Images) -> None:
    view = centre(20, Normalise((0.0,) * 3, (1 / 255,) * 3), short_side=SHORT_SIDE)
    every = torch.arange(len(photos))
    opened = (open_store(photos, short_side=SHORT_SIDE, device="cpu", location=k)[0] for k in ("device", "stream"))
    kept, read_again = (view(store[every]) for store in opened)
    assert (kept - read_again).abs().max() <= 1
    assert kept.std() > 10


def test_batches_from_host_memory_reach_another_device(photos: Images) -> None:
    """Images that fit only into the host's memory, with the meta device in place of a GPU."""
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="host")
    assert isinstance(store, MemoryStore)
    want = decode_images(photos)
    fed = MemoryStore(store.packed, channels=3, device=torch.device("meta"))
    assert fed.loader is not None
    fed.loader.device = torch.device("cpu")
    check_pixels(fed[torch.tensor([5, 2])], [want[5], want[2]])
    (followed,) = fed.read_batches(iter([torch.tensor([7, 0, 3])]), 2)
    check_pixels(followed[1], [want[7], want[0], want[3]])


def test_stream_leaves_out_bad_headers_and_stops_at_bad_pixels(photos: Images, tmp_path: Path) -> None:
    store, images, bad = open_store(
        add_bad_files(photos, tmp_path), short_side=SHORT_SIDE, device="cpu", location="stream"
    )
    assert [image.path.name for image in bad] == ["text.jpg", "gone.jpg"]
    assert len(store) == len(images) == 9
    following = store.read_batches(iter([torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([5])]), 2)
    next(following)
    with pytest.raises(BadImage, match=r"half\.jpg: it is truncated"):
        next(following)
    assert running_workers() == 0


def test_a_file_that_changes_while_streaming_is_named(photos: Images) -> None:
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="stream")
    save_noise(Path(str(photos.sources[2])), 50, 24)
    with pytest.raises(BadImage, match=r"2\.png: its size has changed"):
        store[torch.tensor([2])]


def count_requests(asked: list[int]) -> Iterator[Tensor]:
    for n in range(1000):
        asked.append(n)
        yield torch.tensor([n % 8, (n + 1) % 8])


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_no_batch_is_requested_earlier_than_allowed(photos: Images, read_ahead: int) -> None:
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="stream")
    asked: list[int] = []
    following = store.read_batches(count_requests(asked), read_ahead)
    for n in range(5):
        next(following)
        assert len(asked) == n + 1 + read_ahead
    following.close()  # type: ignore[attr-defined]
    assert running_workers() == 0
    kept, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu")
    asked.clear()
    next(kept.read_batches(count_requests(asked), 0))
    assert len(asked) == 1


def test_batches_are_decoded_ahead(photos: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def watched(request: Request, **options: int) -> Tensor:
        done.append(request.path)
        return decode_request(request, **options)

    monkeypatch.setattr(stores, "decode_request", watched)
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="stream")
    following = store.read_batches(count_requests([]), 2)
    next(following)
    end = time.monotonic() + 20
    while len(done) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(done) == 6  # this batch and the two after it
    del following
    assert running_workers() == 0


def test_memory_of_batches_is_used_again_when_they_are_gone(photos: Images) -> None:
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="stream")
    assert isinstance(store, StreamStore)
    want = decode_images(photos)
    first = store[torch.arange(8)]
    at = first.canvas.data_ptr()
    part = first.canvas[0]
    del first
    assert store[torch.arange(8)].canvas.data_ptr() != at  # a part of the first batch is still used
    store.loader.memory.free.clear()
    del part
    again = store[torch.tensor([2, 5])]  # of other sizes: nothing of the first batch shows
    assert again.canvas.data_ptr() == at
    check_pixels(again, [want[2], want[5]])


def test_processes_decode_as_threads_do(photos: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also when a process is killed; the meta device stands for a GPU."""
    pool = Decoders()
    monkeypatch.setattr(stores, "decoders", lambda: pool)
    monkeypatch.setattr(stores, "AFTER", 0)
    monkeypatch.setattr(stores, "FEWEST", 1)
    for module in (decoders, stores, threads):
        monkeypatch.setattr(module, "cores", lambda: 1)
    with_bad = add_bad_files(photos, tmp_path)
    opened, _, _ = open_store(with_bad, short_side=SHORT_SIDE, device="cpu", location="stream")
    assert isinstance(opened, StreamStore)
    how = {"short_side": SHORT_SIDE, "channels": 3, "device": torch.device("meta")}
    store = StreamStore(opened.paths, opened.size, **how)
    store.loader.device = torch.device("cpu")
    row = {path.name: number for number, path in enumerate(store.paths)}
    good = torch.tensor([row[Path(str(path)).name] for path in photos.sources])
    want = decode_images(photos)
    pool.start()
    decoder = pool.idle.get(timeout=60)  # it has started
    pool.idle.put(decoder)
    local = [0]
    monkeypatch.setattr(stores, "decode_request", lambda *a, **k: local.append(1) or decode_request(*a, **k))
    check_pixels(store[good[[5, 2]]], [want[5], want[2]])
    check_pixels(store[good], want)  # more than before
    with pytest.raises(BadImage, match=r"half\.jpg: it is truncated"):
        store[torch.tensor([0, row["half.jpg"]])]
    assert len(local) == 1  # all of it was decoded there
    decoder.connection.shutdown(socket.SHUT_RDWR)
    check_pixels(store[good[[7, 0, 3]]], [want[7], want[0], want[3]])
    assert len(local) == 4
    assert pool.take() is None
    pool.close()


def test_errors_and_interrupts_leave_no_threads(photos: Images) -> None:
    store, _, _ = open_store(photos, short_side=SHORT_SIDE, device="cpu", location="stream")

    def interrupted() -> None:
        for n, _ in enumerate(store.read_batches(count_requests([]), 2)):
            if n == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert running_workers() == 0

    def fails() -> Iterator[Tensor]:
        yield torch.tensor([0])
        raise RuntimeError("the sampler broke")

    with pytest.raises(RuntimeError, match="the sampler broke"):
        list(store.read_batches(fails(), 2))
    assert running_workers() == 0
