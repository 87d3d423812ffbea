"""MoCo-PA. Kim, Guerrero, Pham, Pavlovic: Variational Continual Proxy-Anchor for Deep Metric Learning. AISTATS 2022,
Sec. 4.7; after He, Fan, Wu, Xie, Girshick: Momentum Contrast for Unsupervised Visual Representation Learning. 2020.

A loss with proxies over the batch and a queue of earlier samples, which a slow copy of the network has embedded.

    w ← αw + (1 − α)θ                                                                                           (14)
    L = L_PA(B ∪ Q),  Q the last n samples as (f_w(x), y)                                                     (§4.7)

Symbols
    f_θ the network; f_w the momentum network of the same architecture; α momentum (`momentum`); Q the queue, first in
    first out, of n samples (`queue`).

Algorithm
    0  bind          w = θ, in buffers
    1  loss          the loss of batch and queue together; gradients reach the batch's embeddings and the proxies
    2  after_step    Eq. 14
    3  after_step    the batch's images through f_w, into Q over the oldest

Settings
    α = 0.999, n = 900 at batch 180; all else as Proxy-Anchor.

Departures
    The paper does not say in which order 2, 3 and the step of θ come: they follow it, so that no sample meets its own
    copy. Slots not filled yet are neither kin nor others; a loss that divides by its samples counts them.
    Eq. 14 is for parameters; statistics of batch norm in train mode are those of f_w's own passes. f_w is not compiled
    and computes in float32.

Relations
    `xbm` remembers the network's own embeddings, for losses on pairs; `vcpa` carries the proxies' posterior instead.
    With α = 0 the queue holds what θ gives after its step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.memory import Memory
from nearkin.methods.proxies import Proxies
from nearkin.methods.relation import EMPTY, relate
from nearkin.methods.strategies.inner_steps import proxies_of
from nearkin.space import at_least_float32, never_lower


class MomentumNetwork(nn.Module):
    """w: a copy of a model's parameters and buffers, in buffers; the model lends its architecture."""

    def bind(self, model: nn.Module) -> None:
        """w = θ."""
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            self.register_buffer(_key(name), (at_least_float32(t.detach()) if t.is_floating_point() else t).clone())

    @torch.no_grad()
    def follow(self, model: nn.Module, momentum: float) -> None:
        """Move w a little towards θ."""
        pairs = [(self.get_buffer(_key(name)), p) for name, p in model.named_parameters()]
        w, theta = [w for w, _ in pairs], [p.detach().to(w.dtype) for w, p in pairs]
        torch._foreach_lerp_(w, theta, 1 - momentum)  # Eq. 14

    @torch.no_grad()
    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        """f_w(x), in the mode the model is in."""
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        out: Tensor = functional_call(model, {name: self.get_buffer(_key(name)) for name in names}, (images,))
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]


def _key(name: str) -> str:
    """A buffer's name holds no dot, and is no attribute of the module."""
    return "w/" + name.replace(".", "/")


class MoCo(Strategy):
    """A loss with proxies over the batch and a queue of `queue` samples embedded by a momentum network."""

    natural_inner = "proxy_anchor"

    def __init__(self, inner: Loss, *, dim: int, momentum: float = 0.999, queue: int = 900) -> None:
        super().__init__(inner)
        proxies_of(inner, "moco")
        if not 0 <= momentum <= 1:
            raise NearkinError(f"moco: momentum is from 0 to 1, not {momentum}.")
        self.momentum = momentum
        self.memory = Memory(queue, dim)
        self.network = MomentumNetwork()

    @property
    def proxies(self) -> Proxies:
        """The proxies of the loss."""
        assert self.inner.proxies is not None
        return self.inner.proxies

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        self.network.bind(model)

    def loss(self, step: Step) -> Tensor:
        queue = self.memory
        x = torch.cat([step.x, queue.vectors.to(torch.promote_types(step.x.dtype, queue.vectors.dtype))])
        y = torch.cat([step.y, queue.labels])
        r = relate(x, y, self.inner.references(step.x, step.y), self.space)
        filled = (y != EMPTY)[:, None]
        return self.inner.objective(r._replace(pos=r.pos & filled, neg=r.neg & filled))

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if not self.training:
            return
        if step.model is None or step.images is None or not list(self.network.buffers()):
            raise NearkinError(
                "moco embeds each batch a second time: call bind(model) before the first step, and give after_step the "
                "model and the images, as in Step(x, y, model=model, images=images)."
            )
        self.network.follow(step.model, self.momentum)
        self.memory.enqueue(self.network.embed(step.model, step.images), step.y)
