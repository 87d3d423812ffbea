"""Proxy-Anchor. Kim, Kim, Cho, Kwak: Proxy Anchor Loss for Deep Metric Learning. CVPR 2020.

Each proxy is an anchor that pulls the samples of its class and pushes all others; the hardest count most.

    L(X) = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X_p⁺} exp(−α(s(x, p) − δ)))
         + 1/|P|  Σ_{p∈P}  log(1 + Σ_{x∈X_p⁻} exp( α(s(x, p) + δ)))                                      (4)

Symbols
    P all proxies; P⁺ those with a positive sample in the batch; X_p⁺, X_p⁻ the batch's positives and negatives of p;
    s cosine similarity; α scale; δ margin. With weights ω [B, P] every exponent is multiplied by its ω (Proxy-ISA,
    Eq. 12; the strategy applies the averages of its Eq. 13 to the two lines of Eq. 4).

Settings
    α = 32, δ = 0.1, proxies' learning rate × 100, AdamW 1e-4 (SOP, In-Shop 6e-4), weight decay 1e-4, batch 180,
    512-d, average + max pooling, 1 warm-up epoch (ResNet-50: 5) on head and proxies, 60 epochs,
    learning rate halved every 10 (CUB) or 20 (Cars) epochs, × 0.25 every 20 (SOP, In-Shop).

Departures
    The paper has one proxy per class; with `per_class` > 1 each of them is an anchor.
    `positives="all"` divides the positive sum by |P| as VCPA's Eq. 4 does; "batch", the default, is Eq. 4 here.
    Sums are computed by log-sum-exp, unlike in the authors' code.

Relations
    `multi_similarity` with proxies as anchors and one margin; `mpa` at K = 1 is this loss.
"""

from typing import Literal

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import (
    Relation,
    at_own_classes,
    column_count,
    exists,
    log1p_sum_exp,
    over_columns,
    sum_of_columns,
    total_of,
    weighted,
)


def pull_and_push(
    r: Relation,
    *,
    alpha: float,
    delta: float,
    positives: Literal["batch", "all"] = "batch",
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The two lines of Eq. 4."""
    own, of_own = at_own_classes(r, weights)
    pull = log1p_sum_exp(weighted(-alpha * (own.s - delta), of_own), own.pos, by="column")  # Eq. 4, first line
    push = log1p_sum_exp(weighted(alpha * (r.s + delta), weights), r.neg, by="column")  # Eq. 4, second line
    P = float(column_count(r))
    with_positive = over_columns(r, total_of(exists(own.pos, by="column")))
    counted = P if positives == "all" else with_positive.clamp_min(1)
    return sum_of_columns(r, pull) / counted, sum_of_columns(r, push) / P


def proxy_anchor(
    r: Relation,
    *,
    alpha: float,
    delta: float,
    positives: Literal["batch", "all"] = "batch",
    weights: Tensor | None = None,
) -> Tensor:
    """Eq. 4 with the references as proxies."""
    pull, push = pull_and_push(r, alpha=alpha, delta=delta, positives=positives, weights=weights)
    return pull + push


class ProxyAnchor(Loss):
    """Proxy-Anchor with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        alpha: float = 32.0,
        delta: float = 0.1,
        positives: Literal["batch", "all"] = "batch",
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("proxy_anchor", alpha=alpha)
        self.alpha, self.delta = alpha, delta
        self.positives: Literal["batch", "all"] = positives
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def pull_and_push(self, r: Relation, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The two terms of the objective, for a strategy that weights them separately."""
        return pull_and_push(r, alpha=self.alpha, delta=self.delta, positives=self.positives, weights=weights)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return proxy_anchor(r, alpha=self.alpha, delta=self.delta, positives=self.positives, weights=weights)
