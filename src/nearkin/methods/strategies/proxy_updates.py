"""PA-1st, PA-2nd. Kim, Guerrero, Pham, Pavlovic: Variational Continual Proxy-Anchor for Deep Metric Learning.
AISTATS 2022, Sec. 4.6.

Moves the proxies of a loss several times per batch, by AdamW or Newton steps, to test whether that is VCPA's gain.

    p ← AdamW step on L(B; p)                                                                                (PA-1st)
    p ← p − ∇L_PA(B; p)/∇²L_PA(B; p), with VCPA's Eq. 24, 25                                                 (PA-2nd)

Symbols
    p the proxies; L(B; p) the inner loss of the batch; M updates per batch (`steps`), of first or second `order`.

Algorithm
    1  loss         M updates of p on the batch's detached embeddings, from where the last batch left them
    2  loss         the inner loss at the new p, which moves θ
    3  after_step   keep p

Settings
    M = 10; AdamW for first order. Learning rate and weight decay are not stated: those of Proxy-Anchor's code for its
    proxies, the run's rate times their `speed` of 100, with its schedule, and 1e-4. `lr` is a rate of its own instead.

Departures
    The Hessian is at least `damping`, since nothing else keeps it above 0; ‖p‖ is at least 1e-6 in it.

Relations
    `vcpa` has Gaussians instead of p, and a KL term that restrains them. With `steps=1`, first order, this is nearly
    `proxy_anchor`, where θ moves by the proxies before their step.
"""

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.strategies.inner_loss import inner_proxies, objective_at, require_proxies
from nearkin.methods.strategies.proxy_steps import NEEDS_RATE, InnerAdam, hold, keep
from nearkin.methods.strategies.vcpa import Batch, anchor_batch, anchor_slopes, check_closed_forms


def newton_step(p: Tensor, b: Batch, *, damping: float) -> Tensor:
    """One second-order update of proxies [P, D]."""
    g, H = anchor_slopes(p, b)
    return torch.addcdiv(p, g, H.clamp_min(damping), value=-1)  # PA-2nd


class ProxyUpdates(Strategy):
    """A loss whose proxies move `steps` times per batch; second order works only for proxy_anchor."""

    natural_inner = "proxy_anchor"
    proxies = inner_proxies

    def __init__(
        self,
        inner: Loss,
        *,
        steps: int = 10,
        order: Literal[1, 2] = 1,
        lr: float = 0.0,
        weight_decay: float = 1e-4,
        damping: float = 1e-8,
    ) -> None:
        super().__init__(inner)
        proxies = require_proxies(inner, "proxy_updates")
        if order == 2:
            check_closed_forms(inner, "proxy_updates", instead="use order=1")
        if steps < 1 or lr < 0 or weight_decay < 0 or damping <= 0:
            raise NearkinError(
                "proxy_updates: steps is at least 1, damping is above 0, lr and weight_decay are at least 0; got "
                f"{steps=}, {damping=}, {lr=}, {weight_decay=}."
            )
        self.steps, self.damping = steps, damping
        hold(proxies, proxies.vectors.detach())
        rates = {"lr": lr, "factor": proxies.speed, "weight_decay": weight_decay}
        self.adam = InnerAdam(1, proxies.vectors.shape, **rates) if order == 1 else None

    def groups(self, lr: float) -> list[dict[str, Any]]:
        if self.adam is not None:
            self.adam.run_lr = lr
        return super().groups(lr)

    def lacks(self, step: Step) -> str:
        known = self.adam is None or self.adam.knows_rate
        return super().lacks(step) or ("" if known else NEEDS_RATE.format("proxy_updates"))

    def step_kind(self, size: int) -> Hashable | None:
        kind = super().step_kind(size)
        return kind if self.adam is None or kind is None else (kind, self.adam.rate)

    def loss(self, step: Step) -> Tensor:
        if not self.training:
            return self.inner.loss(step)
        moved = self._move(step)
        self.note(step, *moved)
        return self._objective(moved[0], step.x, step.y)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if self.training:
            moved = self.noted(step) or self._move(step)
            keep(moved, [self.proxies.vectors, *([] if self.adam is None else self.adam.held())])

    def _objective(self, p: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return objective_at(p, self.inner, x, y, self.space)

    def _move(self, step: Step) -> list[Tensor]:
        """The state after this batch: M updates from the state after the last one."""
        p, x = self.proxies.vectors.detach(), step.x.detach()
        if self.adam is not None:
            moved, moments = self.adam.move([p], lambda p: self._objective(p, x, step.y), self.steps)
            return moved + moments
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            b = anchor_batch(self.inner, x, step.y, self.space).at(step.y, self.proxies.labels)
            for _ in range(self.steps):
                p = newton_step(p, b, damping=self.damping)
        return [p]
