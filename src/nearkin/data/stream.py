"""Images that fit into no memory: decoded anew for every batch, by threads that work ahead of the training.

`Feed` is the machinery, shared with images that fit into the host's memory but not into the device's: it knows every
image's size, lays a batch out in tiles, lets threads fill them, and sends the batch to the device in one copy.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.data.decode import PIXEL_LIMIT, BadImage, decode, read
from nearkin.data.parallel import Crew, cores, crew
from nearkin.data.pixels import (
    TILE,
    Packed,
    Pixels,
    canvas_for,
    first_tiles,
    tile_counts,
    unpack,
    write_tiles,
)


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
