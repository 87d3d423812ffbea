"""Memory: a resumable ring buffer of embeddings and labels."""

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.relation import EMPTY, References
from nearkin.methods.state import PreciseModule
from nearkin.space import at_least_float32


class Memory(PreciseModule):
    """The last `size` embeddings. Slots not filled yet have the label EMPTY and are ignored."""

    vectors: Tensor
    labels: Tensor
    pointer: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1:
            raise NearkinError(f"A memory holds at least one entry, not {size}.")
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), EMPTY))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def references(self) -> References:
        """The memory as references."""
        return References(self.vectors, self.labels)

    def with_batch(self, x: Tensor, y: Tensor, keep: Tensor) -> References:
        """The memory as it will be after `enqueue` of the whole batch or of nothing; a row is not its own reference."""
        size = len(self.labels)
        x, y, keep, first = x[-size:], y[-size:], keep[-size:], max(len(y) - size, 0)
        oldest = (torch.arange(size, device=y.device) - self.pointer) % size < len(y)
        labels = torch.where(oldest & keep.any(), EMPTY, self.labels)
        dtype = torch.promote_types(x.dtype, self.vectors.dtype)
        vectors = torch.cat([self.vectors.to(dtype), x.to(dtype)])
        rows = torch.cat([torch.full_like(self.labels, -1), torch.arange(first, first + len(y), device=y.device)])
        return References(vectors, torch.cat([labels, torch.where(keep, y, EMPTY)]), rows)

    @torch.no_grad()
    def enqueue(self, x: Tensor, y: Tensor, keep: Tensor | None = None) -> None:
        """Add the batch, or the rows that `keep` marks, in place of the oldest entries; no host sync."""
        size = len(self.labels)
        if keep is None:
            keep = torch.ones_like(y, dtype=torch.bool)
        order = torch.argsort(keep.to(torch.uint8), stable=True, descending=True)  # kept rows first, in their order
        x, y, keep = at_least_float32(x)[order], y.long()[order], keep[order]
        kept = keep.sum()
        if len(y) > size:  # only the last `size` kept rows fit
            start = (kept - size).clamp_min(0)
            rows = start + torch.arange(size, device=y.device)
            x, y, keep, kept = x[rows], y[rows], keep[rows], kept.clamp_max(size)
        slots = (self.pointer + torch.arange(len(y), device=y.device)) % size
        # Slots are distinct, so a row that is not kept can write back the content of its slot.
        self.vectors[slots] = torch.where(keep[:, None], x.to(self.vectors.dtype), self.vectors[slots])
        self.labels[slots] = torch.where(keep, y, self.labels[slots])
        self.pointer.copy_((self.pointer + kept) % size)
