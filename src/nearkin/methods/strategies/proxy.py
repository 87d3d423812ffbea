"""Loss-Proxy. Gürbüz, Can, Alatan: Deep Metric Learning with Chance Constraints. WACV 2024, Eq. 8 and Fig. 6a.

A pair loss between the batch and trained class proxies, instead of within the batch.

    min_{θ,ρ} 1/(nC) Σ_{i∈[C]} Σ_{j∈[n]} ℓ(ρ_i, z_j; θ)                                                             (8)

Symbols
    θ the network's weights; ρ_i proxies, K per class (`per_class`); z_j samples; ℓ the inner loss, with samples as
    anchors. `pair_weight`: weight of the same loss within the batch. `speed`: factor of the proxies' learning rate.
    `initial`: proxies start on training samples, picked from a pool of `pool` images per class ("samples"), on random
    vectors ("normal"), or on class means ("means").

Algorithm
    1  at_check  before the first step: proxies from data
    2  loss      the inner loss of the batch against all proxies; the optimiser updates both

Settings
    As `ccp`, whose first sub-problem this is: K = 8, b = 12 (CUB, Cars), K = 4, b = 7 (SOP, In-Shop).

Departures
    The paper has K = 1 in Eq. 8; its experiments have as many as `ccp`. The inner loss defines the reduction.

Relations
    `ccp` solves this problem repeatedly. `proxy(multi_similarity)` is close to `proxy_anchor`, with samples as anchors;
    `proxy(triplet)` is close to `proxy_nca`, which takes the soft maximum.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Embed, Loss, Step, Strategy
from nearkin.methods.proxies import DRAW, Proxies
from nearkin.methods.strategies.ccp import first_pick
from nearkin.methods.strategies.inner_loss import require_pairs

Initial = Literal["samples", "normal", "means"]


class Proxy(Strategy):
    """A pair loss against `per_class` trained proxies per class."""

    natural_inner = "contrastive(form=c2, negative=0.3841)"
    later_options = ("sample_rate",)
    has_sample_losses = True
    drawn: Tensor

    def __init__(
        self,
        inner: Loss,
        *,
        classes: int,
        dim: int,
        per_class: int = 8,
        pool: int = 12,
        pair_weight: float = 0.0,
        speed: float = 1.0,
        initial: Initial = "samples",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__(inner)
        require_pairs(inner, "proxy")
        if pool < 1:
            raise NearkinError(f"proxy needs a pool of at least 1 image per class, not {pool}.")
        self.pool, self.pair_weight = pool, pair_weight
        vectors: Literal["normal", "means"] = "means" if initial == "means" else "normal"
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=vectors, sample_rate=sample_rate)
        self.register_buffer("drawn", torch.tensor(int(initial != "samples")))

    @property
    def known_classes(self) -> int | None:
        return self.proxies.classes

    def lacks(self, step: Step) -> str:
        data = self.proxies.lacks() or ("" if bool(self.drawn) else DRAW.format("proxy draws its proxies"))
        return super().lacks(step) or data

    def loss(self, step: Step) -> Tensor:
        loss = self.inner.objective(self.relation(step, self.proxies.references(step.y)))
        return loss + self.pair_weight * self.inner.loss(step) if self.pair_weight else loss

    @torch.no_grad()
    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        super().at_check(model, embed, labels, score)
        self.proxies.from_data(embed, labels)
        if self.training and not bool(self.drawn):
            p = self.proxies
            _, points = first_pick(
                embed, labels, classes=p.classes, per_class=p.per_class, pool=self.pool, space=self.space, held=p.held
            )
            p.vectors.copy_(points.flatten(0, 1))
            self.drawn.fill_(1)
