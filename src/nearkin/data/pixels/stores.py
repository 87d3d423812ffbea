"""Work on many images at once: threads, since reading, decoding, resizing and hashing all let go of Python's lock."""
# MERGED: Images that fit into no memory: decoded anew for every batch, by threads that work ahead of the training.
# MERGED: Images decoded once and kept: on the device, or in the host's memory where the device's is too small.

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nearkin.data.images import Progress
from nearkin.data.pixels.decode import PIXEL_LIMIT, BadImage, decode, read
from nearkin.data.pixels.tiles import TILE, Packed, Pixels, canvas_for, first_tiles, tile_counts, unpack, write_tiles

T = TypeVar("T")
R = TypeVar("R")

_GROUP = 16  # images a thread takes at a time


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Worker threads that stop at the next image once they are dismissed."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(cores(), thread_name_prefix="nearkin")
        self.dismissed = threading.Event()

    def give(self, function: Callable[[T], R], items: Iterable[T]) -> "Future[list[R]]":
        """Have one thread apply a function to some items."""
        return self.pool.submit(self._work, function, items)

    def _work(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        done = []
        for item in items:
            if self.dismissed.is_set():
                break
            done.append(function(item))
        return done


@contextmanager
def crew() -> Iterator[Crew]:
    """Worker threads that are gone at the end, whether it comes by success, error or Ctrl-C."""
    workers = Crew()
    try:
        yield workers
    finally:
        workers.dismissed.set()
        workers.pool.shutdown(wait=True, cancel_futures=True)


def each(function: Callable[[T], R], items: Sequence[T], *, progress: Progress = None) -> list[R]:
    """A function's results for all items, in their order; the first error ends it."""
    results: list[R] = []
    with crew() as workers:
        groups = [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]
        for future in [workers.give(function, group) for group in groups]:
            results += future.result()
            if progress is not None:
                progress(len(results), len(items))
    return results


class _Batch(NamedTuple):
    """A batch that threads are working on."""

    rows: Tensor
    packed: Packed
    work: "list[Future[list[None]]]"


class Feed:
    """Batches put together on the host by threads: `fill(row, slot)` writes an image into its tiles."""

    def __init__(
        self, size: Tensor, *, channels: int, device: torch.device, fill: Callable[[int, Tensor], None]
    ) -> None:
        self.size, self.fill, self.device = size, fill, device
        self.canvas = canvas_for(size, channels)

    def __getitem__(self, index: Tensor) -> Pixels:
        with crew() as workers:
            return self._finish(self._begin(index, workers))

    def follow(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels; the next `read_ahead` are being read meanwhile."""
        with crew() as workers:
            waiting: deque[_Batch] = deque()
            for index in batches:
                waiting.append(self._begin(index, workers))
                if len(waiting) > read_ahead:
                    batch = waiting.popleft()
                    yield batch.rows, self._finish(batch)
            while waiting:
                batch = waiting.popleft()
                yield batch.rows, self._finish(batch)

    def _begin(self, index: Tensor, workers: Crew) -> _Batch:
        rows = index.cpu()
        size = self.size[rows]
        first = first_tiles(size, self.canvas.channels)
        ends = (first + tile_counts(size, self.canvas.channels)).tolist()
        # From pinned memory the copy to a GPU goes by itself, and nobody waits for it.
        tiles = torch.empty(max(ends, default=1), TILE, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        tiles[0] = 0
        jobs = [(row, tiles[a:b]) for row, a, b in zip(rows.tolist(), first.tolist(), ends, strict=True)]
        shares = (jobs[start :: cores()] for start in range(min(cores(), len(jobs))))
        return _Batch(index, Packed(tiles, first, size), [workers.give(self._fill, share) for share in shares])

    def _fill(self, job: tuple[int, Tensor]) -> None:
        self.fill(*job)

    def _finish(self, batch: _Batch) -> Pixels:
        for work in batch.work:
            work.result()
        there = (part.to(self.device, non_blocking=True) for part in batch.packed)
        return unpack(Packed(*there), self.canvas)


class Stream:
    """A store that decodes on demand. A file that cannot be decoded ends the work with a BadImage that names it."""

    def __init__(
        self,
        paths: Sequence[Path],
        size: Tensor,
        *,
        short: int,
        channels: int,
        device: torch.device,
        limit: int = PIXEL_LIMIT,
    ) -> None:
        self.paths, self.size, self.short, self.limit = paths, size, short, limit
        self.feed = Feed(size, channels=channels, device=device, fill=self._fill)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Tensor) -> Pixels:
        return self.feed[index]

    def follow(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels, while the next `read_ahead` are being decoded; with 0 none is asked for early."""
        return self.feed.follow(batches, read_ahead)

    def _fill(self, row: int, slot: Tensor) -> None:
        path = self.paths[row]
        image = decode(read(path), path, short=self.short, channels=self.feed.canvas.channels, limit=self.limit)
        if list(image.shape[1:]) != self.size[row].tolist():
            raise BadImage(path, "its size has changed since the data were opened", row=row)
        write_tiles(image, slot)


class Resident:
    """A store whose images are all in memory; a batch is one gather, on the device if that is where they are."""

    def __init__(self, packed: Packed, *, short: int, channels: int, device: torch.device) -> None:
        self.short, self.device = short, device
        self.packed = packed
        self.canvas = canvas_for(packed.size.cpu(), channels)
        self.feed: Feed | None = None
        if packed.tiles.device.type != device.type:
            self.count = tile_counts(packed.size, channels).tolist()
            self.begin = packed.first.tolist()
            self.feed = Feed(packed.size, channels=channels, device=device, fill=self._fill)

    def __len__(self) -> int:
        return len(self.packed.first)

    def __getitem__(self, index: Tensor) -> Pixels:
        if self.feed is not None:
            return self.feed[index]
        here = index.to(self.device, non_blocking=True)
        return unpack(self.packed.rows(here), self.canvas)

    def follow(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels. Only what has to come from the host is read ahead."""
        if self.feed is not None:
            return self.feed.follow(batches, read_ahead)
        return ((index, self[index]) for index in batches)

    def _fill(self, row: int, slot: Tensor) -> None:
        first = self.begin[row]
        slot.numpy()[:] = self.packed.tiles[first : first + self.count[row]].numpy()
