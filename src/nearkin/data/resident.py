"""Images decoded once and kept: on the device, or in the host's memory where the device's is too small."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nearkin.data.pixels import Packed, Pixels, canvas_for, tile_counts, unpack
from nearkin.data.stream import Feed


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
