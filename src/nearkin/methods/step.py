"""Step: the inputs of one training step, and the count of optimiser steps that have been taken in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one training step. Outside our loop only `x` and `y` are set."""

    x: Tensor  # [B, D] embeddings
    y: Tensor  # [B] labels
    model: nn.Module | None = None
    images: Tensor | None = None  # [B, C, S, S] the model's input; of several ranks only the own rows
    index: Tensor | None = None  # [B] rows of the training set
    rng: torch.Generator | None = None
    notes: tuple[Tensor, ...] = ()  # what `loss` left for `after_step`
    by_sample: bool = False  # losses of samples are wanted, [B], and not their mean
    batches: int = 1  # how many were joined, under gradient accumulation

    def __post_init__(self) -> None:
        # Narrow integers have no −1 for empty slots (uint8) or cannot index; int64 stays the same tensor.
        object.__setattr__(self, "y", self.y.long())

    def detached(self, notes: tuple[Tensor, ...]) -> Self:
        """The tensors of the step without their graph, and without the model; for keeping."""
        return replace(self, x=self.x.detach(), model=None, rng=None, notes=notes)

    def is_batch(self, other: Self) -> bool:
        """Whether both hold the same batch. The values are read only if it is not the same memory."""
        return _equal(self.x, other.x) and _equal(self.y, other.y)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for files."""
        named = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return named | {f"notes.{i}": t for i, t in enumerate(self.notes)}

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor]) -> Self:
        """The step with these tensors."""
        notes = tuple(named[key] for i in range(len(named)) if (key := f"notes.{i}") in named)
        return cls(named["x"], named["y"], images=named.get("images"), index=named.get("index"), notes=notes)


def join(steps: Sequence[Step]) -> Step:
    """Several batches as one, without the notes of the losses."""
    if len(steps) == 1:
        return steps[0]

    def together(parts: list[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there) if len(there) == len(parts) else None

    x, y = torch.cat([step.x for step in steps]), torch.cat([step.y for step in steps])
    images, index = together([s.images for s in steps]), together([s.index for s in steps])
    return Step(x, y, images=images, index=index, batches=len(steps))


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(a.detach(), b.detach())


_taken = 0


def _count(*_: object) -> None:
    global _taken
    _taken += 1


@cache
def _listen() -> None:
    register_optimizer_step_post_hook(_count)


def optimiser_steps() -> int:
    """The steps that optimisers of any kind have taken in this process since the first call."""
    _listen()
    return _taken
