"""Memory: a ring buffer of embeddings and labels, all of it in buffers, so that a loaded one goes on where it was."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.relation import EMPTY, References
from nearkin.space import at_least_float32, never_lower


class Memory(nn.Module):
    """The last `size` embeddings that were put in; slots not filled yet carry the label EMPTY and count for nothing."""

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
        """The memory as what a batch is compared with."""
        return References(self.vectors, self.labels)

    @torch.no_grad()
    def enqueue(self, x: Tensor, y: Tensor, keep: Tensor | None = None) -> None:
        """Put in the batch, or those rows of it that `keep` marks, over the oldest entries; no host sync."""
        size = len(self.labels)
        if keep is None:
            keep = torch.ones_like(y, dtype=torch.bool)
        order = torch.argsort(keep.to(torch.uint8), stable=True, descending=True)  # kept rows first, in their order
        x, y, keep = at_least_float32(x)[order], y[order], keep[order]
        kept = keep.sum()
        if len(y) > size:  # only the last `size` kept rows survive
            start = (kept - size).clamp_min(0)
            rows = start + torch.arange(size, device=y.device)
            x, y, keep, kept = x[rows], y[rows], keep[rows], kept.clamp_max(size)
        slots = (self.pointer + torch.arange(len(y), device=y.device)) % size
        # Slots are distinct, so a row that is not kept can write back what its slot holds already.
        self.vectors[slots] = torch.where(keep[:, None], x.to(self.vectors.dtype), self.vectors[slots])
        self.labels[slots] = torch.where(keep, y, self.labels[slots])
        self.pointer.copy_((self.pointer + kept) % size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]
