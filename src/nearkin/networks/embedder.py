"""The network that embeds images: trunk, pooling, linear head, projection into a space."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.networks.backbones import Trunk
from nearkin.networks.freed_memory import keep_freed_memory
from nearkin.space import Space, at_least_float32
from nearkin.spec import check_options, look_up, parse

Pool = Callable[[Tensor], Tensor]  # [B, W, h, w] → [B, W]


def average(x: Tensor) -> Tensor:
    """Return the mean over the map, in float32 or higher: [B, W, h, w] → [B, W]."""
    return x.mean((-2, -1), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def maximum(x: Tensor) -> Tensor:
    """Return the maximum over the map."""
    # Not amax: its gradient compares values, and a compiled network that rounds differently may find none (0/0).
    return at_least_float32(x.flatten(-2).max(-1).values)


def average_and_maximum(x: Tensor) -> Tensor:
    """Return the sum of mean and maximum."""
    return average(x) + maximum(x)


class GeM(nn.Module):
    """Generalised mean over the map, (mean xᵖ)^(1/p) of values at least `eps`: p = 1 is the mean, p → ∞ the maximum."""

    def __init__(self, *, p: float = 3.0, learn: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        if p <= 0 or eps <= 0:
            raise NearkinError(f"gem needs p and eps above 0, not p={p}, eps={eps}.")
        self.p = nn.Parameter(torch.tensor(float(p))) if learn else float(p)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[B, W, h, w] → [B, W]."""
        return at_least_float32(x).clamp_min(self.eps).pow(self.p).mean((-2, -1)).pow(1 / self.p)


POOLS: dict[str, Callable[..., Pool]] = {
    "avg": lambda: average,
    "max": lambda: maximum,
    "avg+max": lambda: average_and_maximum,
    "gem": GeM,
}


def make_pool(text: str) -> Pool:
    """Make a pooling from its name: avg, max, avg+max (summed), gem or gem(p=3, learn=True)."""
    if text in POOLS:
        return POOLS[text]()
    call = parse(text)
    entry = look_up(call.name, POOLS, what="pooling")
    return entry(**check_options(call, entry))


INITIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "kaiming": partial(nn.init.kaiming_normal_, mode="fan_out"),
    "glorot": nn.init.xavier_uniform_,
}


class Head(nn.Module):
    """Feature map [B, W, h, w] → pooled [B, W] → optional layer norm → linear, unless dim is 0 → [B, dim or W].

    Features [B, W] are pooled already: those of a frozen trunk are computed once and kept.
    The linear map is initialised as in Proxy-Anchor's code, or by Glorot's uniform distribution.
    """

    def __init__(
        self, width: int, dim: int, *, pool: Pool, bias: bool, layer_norm: bool, initial: str = "kaiming"
    ) -> None:
        super().__init__()
        self.pool = pool
        # No affine part: the linear map has one.
        self.norm = nn.LayerNorm(width, elementwise_affine=False) if layer_norm else None
        self.linear = nn.Linear(width, dim, bias=bias) if dim else None
        if self.linear is not None:
            INITIAL[initial](self.linear.weight)
            if bias:
                nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors before the projection."""
        v = x if x.ndim == 2 else self.pool(x)
        if self.norm is not None:
            v = self.norm(v)
        if self.linear is None:
            return v
        out: Tensor = self.linear(v.to(self.linear.weight.dtype))
        return out


def channels_last(x: Tensor) -> Tensor:
    """Return images in the memory layout in which networks are fastest; features [B, width] as they are."""
    return x if x.ndim == 2 else x.contiguous(memory_format=torch.channels_last)


PASS = 32 * 3 * 224 * 224
"""Numbers in the images that pass a network at once on a CPU, where more only take more memory."""


def pass_images(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what a network makes of images, or of features, without gradients: on a CPU a few images at a time."""
    x = channels_last(x)
    if x.is_cuda or x.ndim == 2:
        return network(x)
    keep_freed_memory()
    return torch.cat([network(some) for some in torch.split(x, max(1, PASS // x.shape[1:].numel()))])


class Embedder(nn.Module):
    """Trunk, head, and the projection into the space: normalised images → points [B, dim], float32 or higher.

    In place of images it takes their pooled features [B, width], which a frozen trunk computes once.
    """

    def __init__(
        self,
        trunk: Trunk,
        *,
        dim: int = 512,
        pool: str = "avg+max",
        bias: bool = True,
        layer_norm: bool = False,
        head_init: str = "kaiming",
        space: str = "cosine",
    ) -> None:
        super().__init__()
        if dim < 0:
            raise NearkinError(f"An embedding has at least one dimension (0: those of the trunk), not {dim}.")
        pooling = make_pool(pool)  # checked even if the trunk pools itself
        self.dim, self.space = dim or trunk.width, Space(space)
        self.trunk = trunk
        pooling = average if trunk.pooled else pooling
        self.head = Head(trunk.width, dim, pool=pooling, bias=bias, layer_norm=layer_norm, initial=head_init)

    def features(self, x: Tensor) -> Tensor:
        """Return the pooled features of the trunk [B, width], without the head."""
        return self.head.pool(self.trunk(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings [B, dim]."""
        return self.space.project(self.head(x if x.ndim == 2 else self.trunk(x)))
