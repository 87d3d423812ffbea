"""Stores: the pixels of many images, returned in batches on the device.

`MemoryStore` holds images that were decoded once, in the device's memory or in the host's if that is too small.
`StreamStore` decodes images that fit in no memory for every batch, in threads that read ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.data.pixels.decode import BadImage, decode_file
from nearkin.data.pixels.threads import Workers, cores, start_workers
from nearkin.data.pixels.tiles import (
    TILE,
    Canvas,
    Packed,
    Pixels,
    Sides,
    canvas_for,
    first_tiles,
    sides_of,
    tile_counts,
    unpack,
    write_tiles,
)


class MemoryStore:
    """Images that are all in memory. A batch is one gather if that is the device's memory."""

    def __init__(self, packed: Packed, *, channels: int, device: torch.device, near_enough: bool = False) -> None:
        self.packed, self.device = packed, device
        self.size = size = packed.size.cpu()
        self.canvas, self.sides = canvas_for(size, channels), sides_of(size, near_enough=near_enough)
        self.loader: BatchLoader | None = None
        if packed.tiles.device.type != device.type:
            self.first, self.counts = packed.first.tolist(), tile_counts(packed.size, channels).tolist()
            self.loader = BatchLoader(size, self.sides, channels=channels, device=device, write_image=self._copy)

    def __len__(self) -> int:
        return len(self.packed.first)

    def __getitem__(self, index: Tensor) -> Pixels:
        if self.loader is not None:
            return self.loader.read(index)
        rows = self.packed.rows(index.to(self.device, non_blocking=True))
        return unpack(rows, smallest_canvas(rows.size, self.canvas), self.sides)

    def read_batches(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels. Only images in the host's memory are read ahead."""
        if self.loader is not None:
            return self.loader.read_batches(batches, read_ahead)
        return ((index, self[index]) for index in batches)

    def _copy(self, row: int, tiles: Tensor) -> None:
        first = self.first[row]
        tiles.numpy()[:] = self.packed.tiles[first : first + self.counts[row]].numpy()


def smallest_canvas(size: Tensor, canvas: Canvas) -> Canvas:
    """Return the canvas for a batch: on the CPU as small as its images allow; a GPU would have to be asked for it."""
    return canvas_for(size, canvas.channels) if size.device.type == "cpu" and len(size) else canvas


class StreamStore:
    """Images that are decoded on demand. A file that cannot be decoded raises a BadImage that names it."""

    def __init__(
        self,
        paths: Sequence[Path],
        size: Tensor,
        *,
        short_side: int,
        enlarge: bool = True,
        channels: int,
        device: torch.device,
    ) -> None:
        self.paths, self.size, self.short_side, self.enlarge = paths, size, short_side, enlarge
        sides = sides_of(size, near_enough=False)
        self.loader = BatchLoader(size, sides, channels=channels, device=device, write_image=self._decode)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Tensor) -> Pixels:
        return self.loader.read(index)

    def read_batches(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels, while the next `read_ahead` are decoded; with 0, none is requested early."""
        return self.loader.read_batches(batches, read_ahead)

    def _decode(self, row: int, tiles: Tensor) -> None:
        path = self.paths[row]
        channels = self.loader.canvas.channels
        image = decode_file(path, short_side=self.short_side, channels=channels, enlarge=self.enlarge)
        if list(image.shape[1:]) != self.size[row].tolist():
            raise BadImage(path, "its size has changed since the data were opened", row=row)
        write_tiles(image, tiles)


Store = MemoryStore | StreamStore


class _Batch(NamedTuple):
    """A batch that threads are working on."""

    rows: Tensor
    packed: Packed
    work: "list[Future[list[None]]]"


class BatchLoader:
    """Assemble batches on the host in threads: `write_image(row, tiles)` writes one image into its tiles."""

    def __init__(
        self,
        size: Tensor,
        sides: Sides,
        *,
        channels: int,
        device: torch.device,
        write_image: Callable[[int, Tensor], None],
    ) -> None:
        self.size, self.sides, self.write_image, self.device = size, sides, write_image, device
        self.canvas = canvas_for(size, channels)

    def read(self, index: Tensor) -> Pixels:
        """Return one batch."""
        with start_workers() as workers:
            return self._finish(self._start(index, workers))

    def read_batches(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels, while the next `read_ahead` are read."""
        with start_workers() as workers:
            waiting: deque[_Batch] = deque()
            for index in batches:
                waiting.append(self._start(index, workers))
                if len(waiting) > read_ahead:
                    batch = waiting.popleft()
                    yield batch.rows, self._finish(batch)
            while waiting:
                batch = waiting.popleft()
                yield batch.rows, self._finish(batch)

    def _start(self, index: Tensor, workers: Workers) -> _Batch:
        rows = index.cpu()
        size = self.size[rows]
        first = first_tiles(size, self.canvas.channels)
        ends = (first + tile_counts(size, self.canvas.channels)).tolist()
        # A copy from pinned memory to a GPU is asynchronous.
        tiles = torch.empty(max(ends, default=1), TILE, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        tiles[0] = 0
        jobs = [(row, tiles[a:b]) for row, a, b in zip(rows.tolist(), first.tolist(), ends, strict=True)]
        shares = (jobs[start :: cores()] for start in range(min(cores(), len(jobs))))
        return _Batch(index, Packed(tiles, first, size), [workers.submit(self._write, share) for share in shares])

    def _write(self, job: tuple[int, Tensor]) -> None:
        self.write_image(*job)

    def _finish(self, batch: _Batch) -> Pixels:
        for work in batch.work:
            work.result()
        packed = batch.packed.to(self.device)
        return unpack(packed, smallest_canvas(packed.size, self.canvas), self.sides)
