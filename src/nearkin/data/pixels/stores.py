"""Stores: the pixels of many images, or what a network made of them, returned in batches on the device.

`MemoryStore` holds images that were decoded once, in the device's memory or in the host's if that is too small.
`StreamStore` decodes images that fit in no memory for every batch, in threads that read ahead; for a GPU, in processes.
`FeatureStore` holds features of views of the images, which a network that does not learn computes only once.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.data.paths import Bytes
from nearkin.data.pixels.archives import locate
from nearkin.data.pixels.decoders import AFTER, FEWEST, Request, decode_request, decoders
from nearkin.data.pixels.image_bytes import BadImage
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
    write_rows,
)

_SHARE = 16  # images that a thread writes before it looks whether to stop


class Share(NamedTuple):
    """Images of a batch that one thread writes."""

    rows: list[int]
    sizes: list[tuple[int, int]]
    places: list[Tensor]  # uint8 [C, at least h, at least w]
    tiles: Tensor | None  # all places, if they follow each other


class MemoryStore:
    """Images that are all in memory. A batch is one gather if that is the device's memory."""

    def __init__(self, packed: Packed, *, channels: int, device: torch.device, near_enough: bool = False) -> None:
        self.packed, self.device = packed, device
        self.size = size = packed.size.cpu()
        self.canvas, self.sides = canvas_for(size, channels), sides_of(size, near_enough=near_enough)
        self.loader: BatchLoader | None = None
        if packed.tiles.device.type != device.type:
            self.first, self.counts = packed.first.tolist(), tile_counts(packed.size, channels).tolist()
            self.loader = BatchLoader(size, self.sides, channels=channels, device=device, write=self._copy)

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

    def _copy(self, share: Share) -> None:
        for row, place in zip(share.rows, share.places, strict=True):
            first = self.first[row]
            place.numpy().reshape(-1, TILE)[:] = self.packed.tiles[first : first + self.counts[row]].numpy()


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
        self.decoded = 0  # images, in this process
        sides = sides_of(size, near_enough=False)
        self.loader = BatchLoader(size, sides, channels=channels, device=device, write=self._decode)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Tensor) -> Pixels:
        return self.loader.read(index)

    def read_batches(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
        """Each batch with its pixels, while the next `read_ahead` are decoded; with 0, none is requested early."""
        return self.loader.read_batches(batches, read_ahead)

    def _decode(self, share: Share) -> None:
        """Decode images in another process if there is one, else here."""
        requests = [
            Request(str(path), locate(path), size)
            for path, size in zip(map(self.paths.__getitem__, share.rows), share.sizes, strict=True)
        ]
        how = {"short_side": self.short_side, "channels": self.loader.canvas.channels, "enlarge": self.enlarge}
        if share.tiles is not None and self._decode_elsewhere(share, requests, how):
            return
        for row, request, place in zip(share.rows, requests, share.places, strict=True):
            try:
                write_rows(decode_request(request, **how), place)
            except BadImage as error:
                raise BadImage(error.path, error.reason, row=row) from None
        self.decoded += len(requests)

    def _decode_elsewhere(self, share: Share, requests: list[Request], how: dict[str, Any]) -> bool:
        """Whether another process has decoded the images."""
        assert share.tiles is not None
        if self.decoded < AFTER or cores() < FEWEST:
            return False
        decoders().start()
        if (decoder := decoders().take()) is None:
            return False
        try:
            failed = decoder.decode(requests, share.tiles, **how)
        except OSError:  # it was killed
            decoder.close()
            return False
        decoders().idle.put(decoder)
        for number, reason in failed:
            raise BadImage(requests[number].path, reason, row=share.rows[number])
        return True


class FeatureStore:
    """Features [N, views, width] of views of images, in place of their pixels; of images that are tested, one view."""

    def __init__(self, features: Tensor, pixels: "PixelStore", *, device: torch.device) -> None:
        self.features, self.pixels, self.device = features, pixels, device
        self.size = pixels.size.to(features.device)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: Tensor) -> Pixels:
        rows = index.to(self.features.device, non_blocking=True)
        canvas = self.features[rows, :, None].to(self.device, non_blocking=True)  # one row per view
        return Pixels(canvas, self.size[rows].to(self.device, non_blocking=True))

    def read_batches(self, batches: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:  # noqa: ARG002
        """Each batch with its features; there is nothing to read ahead."""
        return ((index, self[index]) for index in batches)


PixelStore = MemoryStore | StreamStore
Store = PixelStore | FeatureStore


def first_view(features: Pixels) -> Tensor:
    """Return the features [B, width] of the first view of a batch from a FeatureStore."""
    return features.canvas[:, 0, 0]


class _Batch(NamedTuple):
    """A batch that threads are working on."""

    rows: Tensor
    size: Tensor
    memory: Tensor  # canvases, or tiles for another device
    work: "list[Future[list[None]]]"


class BatchLoader:
    """Assemble batches on the host in threads: `write(share)` writes some images where they belong."""

    def __init__(
        self, size: Tensor, sides: Sides, *, channels: int, device: torch.device, write: Callable[[Share], None]
    ) -> None:
        self.size, self.sides, self.write, self.device = size, sides, write, device
        self.memory = _Memory()
        self.tiled = device.type != "cpu"  # with little between the images, because they are sent
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
        numbers = index.cpu()
        size = self.size[numbers]
        memory, shares = (self._in_tiles if self.tiled else self._on_canvases)(numbers.tolist(), size)
        return _Batch(index, size, memory, [workers.submit(self.write, [share]) for share in shares])

    def _on_canvases(self, rows: list[int], size: Tensor) -> tuple[Tensor, list[Share]]:
        """Memory for a batch that is used where it is made."""
        shape = len(rows), *smallest_canvas(size, self.canvas)
        memory = self.memory.take(math.prod(shape)).view(shape)
        sizes = [(h, w) for h, w in size.tolist()]
        places = list(memory)
        return memory, [Share(rows[a:b], sizes[a:b], places[a:b], None) for a, b in _shares(len(rows))]

    def _in_tiles(self, rows: list[int], size: Tensor) -> tuple[Tensor, list[Share]]:
        """Memory for a batch that is sent to another device."""
        channels = self.canvas.channels
        ends = [1, *(first_tiles(size, channels) + tile_counts(size, channels)).tolist()]
        # A copy from pinned memory to a GPU is asynchronous.
        memory = torch.empty(ends[-1], TILE, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        memory[0] = 0
        sizes = [(h, w) for h, w in size.tolist()]
        places = [memory[a:b].view(channels, h, -1) for a, b, (h, _) in zip(ends, ends[1:], sizes, strict=False)]
        return memory, [
            Share(rows[a:b], sizes[a:b], places[a:b], memory[ends[a] : ends[b]]) for a, b in _shares(len(rows))
        ]

    def _finish(self, batch: _Batch) -> Pixels:
        for work in batch.work:
            work.result()
        if not self.tiled:
            return Pixels(batch.memory, batch.size, self.sides)
        packed = Packed(batch.memory, first_tiles(batch.size, self.canvas.channels), batch.size).to(self.device)
        return unpack(packed, smallest_canvas(packed.size, self.canvas), self.sides)


class _Memory:
    """Memory of batches, used again once no tensor refers to it: new memory takes a tenth of the time of decoding."""

    def __init__(self) -> None:
        self.free: list[Bytes] = []

    def take(self, count: int) -> Tensor:
        """Return so many bytes of any values."""
        memory = next((known for known in self.free if len(known) >= count), None)
        if memory is None:
            self.free.clear()  # they are too small
            memory = np.empty(count, np.uint8)
        else:
            self.free = [known for known in self.free if known is not memory]
        part = memory[:count]
        weakref.finalize(part, self._put_back, memory).atexit = False
        return torch.from_numpy(part)

    def _put_back(self, memory: Bytes) -> None:
        self.free.append(memory)


def _shares(count: int) -> list[tuple[int, int]]:
    """Ranges of the images of a batch for one thread at a time."""
    most = max(1, min(_SHARE, -(-count // cores())))
    return [(start, min(count, start + most)) for start in range(0, count, most)]
