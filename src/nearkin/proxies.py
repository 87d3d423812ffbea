"""Proxies: trainable class representatives, K to a class, grouped by class, never below float32."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError, zero_or_more
from nearkin.similarity import References, at_least_float32, never_lower

Initial = Literal["normal", "means"]


class Proxies(nn.Module):
    """Vectors [C·K, D] with their labels; class c owns rows c·K … c·K + K − 1.

    `speed` multiplies the learning rate (Proxy-Anchor's code: 100). `initial="normal"` draws N(0, 2/(C·K)) as that code
    does; `"means"` takes class means of the data at the first check.
    """

    labels: Tensor
    drawn: Tensor

    def __init__(
        self, classes: int, dim: int, *, per_class: int = 1, speed: float = 100.0, initial: Initial = "normal"
    ) -> None:
        super().__init__()
        if classes < 1 or dim < 1 or per_class < 1:
            raise NearkinError(
                f"Proxies need at least one class, dimension and proxy a class: got {classes=} {dim=} {per_class=}."
            )
        zero_or_more("Proxies", speed=speed)
        self.per_class, self.speed, self.initial = per_class, speed, initial
        vectors = torch.randn(classes * per_class, dim) * (2 / (classes * per_class)) ** 0.5
        self.vectors = nn.Parameter(vectors)
        self.register_buffer("labels", torch.arange(classes).repeat_interleave(per_class))
        self.register_buffer("drawn", torch.tensor(initial == "normal"))

    @property
    def classes(self) -> int:
        return len(self.labels) // self.per_class

    def references(self) -> References:
        """All proxies, as what a batch is compared with."""
        return References(self.vectors, self.labels, None, self.per_class)

    @torch.no_grad()
    def from_data(self, embed: Callable[[], Tensor], labels: Tensor) -> None:
        """Once, where asked for: proxy k of a class becomes the mean of every K-th sample of it, from the k-th on."""
        if bool(self.drawn):
            return
        x = at_least_float32(embed())
        order = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=self.classes)
        starts = counts.cumsum(0) - counts
        position = torch.empty_like(labels)
        position[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
        slot = labels * self.per_class + position % self.per_class
        sums = torch.zeros_like(self.vectors).index_add_(0, slot, x.to(self.vectors.dtype))
        sizes = torch.bincount(slot, minlength=len(self.vectors))[:, None]
        # A class with fewer samples than proxies keeps random proxies for the rest.
        self.vectors.copy_(torch.where(sizes > 0, sums / sizes.clamp_min(1), self.vectors))
        self.drawn.fill_(True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]
