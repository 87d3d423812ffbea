"""MoCo-PA. Kim, Guerrero, Pham, Pavlovic: Variational Continual Proxy-Anchor for Deep Metric Learning. AISTATS 2022,
Sec. 4.7; after He, Fan, Wu, Xie, Girshick: Momentum Contrast for Unsupervised Visual Representation Learning. 2020.

A loss with proxies over the batch and a queue of earlier samples, embedded by a slowly moving copy of the network.

    w ← αw + (1 − α)θ                                                                                           (14)
    L = L_PA(B ∪ Q),  Q the last n samples as (f_w(x), y)                                                     (§4.7)

Symbols
    f_θ the network; f_w the momentum network of the same architecture; α momentum (`momentum`); Q the queue, first in
    first out, of n samples (`queue`).

Algorithm
    0  bind          w = θ, in buffers
    1  loss          the loss of batch and queue together; gradients reach the batch's embeddings and the proxies
    2  after_step    Eq. 14
    3  after_step    embed the batch by f_w, and put it into Q in place of the oldest

Settings
    α = 0.999, n = 900 at batch 180; otherwise as Proxy-Anchor.

Departures
    The paper does not give the order of 2, 3 and the step of θ: here they follow it, so that no sample is compared with
    its own copy. Empty slots are neither positive nor negative; a loss that divides by its samples counts them.
    Eq. 14 is for parameters; batch-norm statistics in train mode come from the passes of f_w. f_w is not compiled and
    computes in float32.

Relations
    `xbm` stores the network's own embeddings, for losses on pairs; `vcpa` carries the posterior of the proxies instead.
    With α = 0 the queue holds the embeddings of θ after its step.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.memory import Memory
from nearkin.methods.relation import EMPTY, raise_precision, relate
from nearkin.methods.strategies.inner_loss import inner_proxies, require_proxies
from nearkin.methods.strategies.model_copy import ModelCopy
from nearkin.networks.rank_batch_norm import own_pass

NEEDS = (
    "moco embeds each batch a second time: call method.bind(model) before the first step, and pass the images, as in "
    "method(model(images), labels, images=images) or Step(x, y, images=images)."
)


class MomentumNetwork(ModelCopy):
    """w, a copy of a model's parameters and buffers; the model provides the architecture."""

    prefix = "w/"

    def bind(self, model: nn.Module) -> None:
        """w = θ."""
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            self.store(name, t)

    @torch.no_grad()
    def follow(self, model: nn.Module, momentum: float) -> None:
        """Move w towards θ."""
        pairs = [(self.get_buffer(self.key(name)), p) for name, p in model.named_parameters()]
        w, theta = [w for w, _ in pairs], [p.detach().to(w.dtype) for w, p in pairs]
        torch._foreach_lerp_(w, theta, 1 - momentum)  # Eq. 14

    @torch.no_grad()
    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        """f_w(x), in the current mode of the model."""
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        out: Tensor = functional_call(model, {name: self.get_buffer(self.key(name)) for name in names}, (images,))
        return out


class MoCo(Strategy):
    """A loss with proxies over the batch and a queue of `queue` samples embedded by a momentum network."""

    natural_inner = "proxy_anchor"
    proxies = inner_proxies

    def __init__(self, inner: Loss, *, dim: int, momentum: float = 0.999, queue: int = 900) -> None:
        super().__init__(inner)
        require_proxies(inner, "moco")
        if not 0 <= momentum <= 1:
            raise NearkinError(f"moco: momentum is a number from 0 to 1, not {momentum}.")
        self.momentum = momentum
        self.memory = Memory(queue, dim)
        self.network = MomentumNetwork()
        self.bound: tuple[nn.Module] | None = None  # in a tuple, so that it is not registered as a submodule

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        self.network.bind(model)
        self.bound = (model,)

    def loss(self, step: Step) -> Tensor:
        queue = self.memory
        dtype = torch.promote_types(step.x.dtype, queue.vectors.dtype)
        x = torch.cat([raise_precision(step.x, dtype, self.space), queue.vectors.to(dtype)])
        y = torch.cat([step.y, queue.labels])
        r = relate(x, y, self.inner.references(step.x, step.y), self.space)
        filled = (y != EMPTY)[:, None]
        return self.inner.objective(r._replace(pos=r.pos & filled, neg=r.neg & filled))

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if not self.training:
            return
        if self.bound is None or step.images is None:
            raise NearkinError(NEEDS)
        model = self.bound[0] if step.model is None else step.model
        self.network.follow(model, self.momentum)
        with own_pass(model, step.x.device, *(step.y.tolist() if ranks.size() > 1 else ())):
            embedded = self.network.embed(model, step.images)
        self.memory.enqueue(embedded if len(embedded) == len(step.y) else ranks.gather(embedded), step.y)

    def lacks(self, step: Step) -> str:
        return super().lacks(step) or (NEEDS if self.bound is None or step.images is None else "")
