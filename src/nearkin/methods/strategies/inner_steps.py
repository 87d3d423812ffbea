"""What strategies share that move proxies themselves, within a step: proxies as a buffer, a loss at other proxies, and
Adam with its moments in buffers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss
from nearkin.methods.proxies import Proxies
from nearkin.methods.relation import References, relate
from nearkin.space import Space, never_lower


def proxies_of(inner: Loss, strategy: str) -> Proxies:
    """The inner loss's proxies, or a sentence where it has none."""
    if inner.proxies is None:
        raise NearkinError(f"{strategy} needs a loss with proxies; {inner.spec.name or 'this one'} has none.")
    return inner.proxies


def hold(proxies: Proxies, vectors: Tensor) -> None:
    """Make the proxies' vectors a buffer: the strategy moves them, no optimiser does."""
    del proxies.vectors
    proxies.register_buffer("vectors", vectors)


def objective_at(vectors: Tensor, inner: Loss, x: Tensor, y: Tensor, space: Space) -> Tensor:
    """The inner loss of a batch with its proxies at `vectors`."""
    assert inner.proxies is not None
    here = References(vectors, inner.proxies.labels, None, inner.proxies.per_class)
    return inner.objective(relate(x, y, here, space))


class Moved(NamedTuple):
    """New state, on its way from `loss` to `after_step`: a loss that is computed twice moves nothing twice."""

    y: Tensor  # the batch's labels, by which it is known
    tensors: list[Tensor]

    @torch.no_grad()
    def keep(self, held: Sequence[Tensor]) -> None:
        """Copy the new state into the buffers."""
        for old, new in zip(held, self.tensors, strict=True):
            old.copy_(new)


class InnerAdam(nn.Module):
    """AdamW for `count` tensors of one shape. Steps are taken on copies of the moments, to be kept or not."""

    moments: Tensor  # [2, count, …] of the gradients and of their squares
    taken: Tensor  # how many steps

    def __init__(self, count: int, shape: Sequence[int], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.count, self.lr, self.weight_decay = count, lr, weight_decay
        self.register_buffer("moments", torch.zeros(2, count, *shape))
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def held(self) -> list[Tensor]:
        """All that changes with a step."""
        return [self.moments, self.taken]

    def move(
        self,
        start: Sequence[Tensor],
        objective: Callable[..., Tensor],
        steps: int,
        after: Callable[[list[Tensor]], None] = lambda _: None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where the tensors are after so many steps on `objective(*tensors)`, `after` called on them after each; and
        what `held` becomes."""
        tensors = [t.detach().clone() for t in start]
        moments = self.moments.clone()
        taken = [self.taken.to(torch.float32, copy=True) for _ in tensors]
        for _ in range(steps):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in tensors]
                gradients = torch.autograd.grad(objective(*leaves), leaves)
            with torch.no_grad():
                # Fused: one launch, and on a GPU the count of steps stays there.
                adamw(
                    tensors,
                    list(gradients),
                    list(moments[0]),
                    list(moments[1]),
                    [],
                    taken,
                    fused=True,
                    amsgrad=False,
                    beta1=0.9,
                    beta2=0.999,
                    lr=self.lr,
                    weight_decay=self.weight_decay,
                    eps=1e-8,
                    maximize=False,
                )
                after(tensors)
        return tensors, [moments, self.taken + steps]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]
