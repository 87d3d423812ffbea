"""Steps on proxies inside a training step: proxies as a buffer, and Adam with its moments in buffers."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nearkin.methods.proxies import Proxies
from nearkin.methods.state import PreciseModule

PUBLISHED_LR = 1e-4
"""The rate of Proxy-Anchor's code, until a strategy is told the run's."""

NEEDS_RATE = (
    "{} moves its proxies at the learning rate of the run, times their speed: call method.groups(lr) before the "
    "first step and whenever the rate changes, or set its option lr."
)


def hold(proxies: Proxies, vectors: Tensor) -> None:
    """Make the proxies' vectors a buffer, so that the strategy moves them and no optimiser does."""
    del proxies.vectors
    proxies.register_buffer("vectors", vectors)


@torch.no_grad()
def keep(new: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Copy the new state into the buffers."""
    for old, value in zip(held, new, strict=True):
        old.copy_(value)


class InnerAdam(PreciseModule):
    """AdamW for `count` tensors of one shape. Steps work on copies of the moments, which the caller may keep.

    Its learning rate is `lr`, or if that is 0 what the strategy's `groups` was last told, times `factor`.
    """

    per_proxy: ClassVar = {"moments": 2}
    moments: Tensor  # [2, count, …] of the gradients and of their squares
    taken: Tensor  # number of steps

    def __init__(
        self, count: int, shape: Sequence[int], *, lr: float, factor: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.count, self.lr, self.factor, self.weight_decay = count, lr, factor, weight_decay
        self.run_lr: float | None = None
        self.register_buffer("moments", torch.zeros(2, count, *shape))
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.lr or self.factor * (PUBLISHED_LR if self.run_lr is None else self.run_lr)

    @property
    def knows_rate(self) -> bool:
        """Whether the rate was given or told."""
        return bool(self.lr) or self.run_lr is not None

    def held(self) -> list[Tensor]:
        """The state that changes with a step."""
        return [self.moments, self.taken]

    def move(
        self,
        start: Sequence[Tensor],
        objective: Callable[..., Tensor],
        steps: int,
        after: Callable[[list[Tensor]], None] = lambda _: None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors after `steps` steps on `objective(*tensors)`, and the new values of `held`.

        `after` is called with the tensors after each step.
        """
        tensors, rate = [t.detach().clone() for t in start], self.rate
        moments = self.moments.clone()
        taken = [self.taken.to(torch.float32, copy=True) for _ in tensors]
        for _ in range(steps):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in tensors]
                gradients = torch.autograd.grad(objective(*leaves), leaves)
            with torch.no_grad():
                # Fused: one launch, and the step count stays on the GPU.
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
                    lr=rate,
                    weight_decay=self.weight_decay,
                    eps=1e-8,
                    maximize=False,
                )
                after(tensors)
        return tensors, [moments, self.taken + steps]
