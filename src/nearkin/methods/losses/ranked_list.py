"""Ranked list. Wang, Hua, Kodirov, Hu, Garnier, Robertson: Ranked List Loss for Deep Metric Learning. CVPR 2019.

Pulls positives into a ball around the sample and pushes negatives out of a larger one; the nearest count most.

    L = 1/B Σ_i (L_P(i) + λ L_N(i))
    L_P(i) = 1/|P*_i| Σ_{j∈P*_i} (d_ij − (α − m)),          P*_i = {j ∈ P_i : d_ij > α − m}
    L_N(i) = Σ_{j∈N*_i} w_ij (α − d_ij) / Σ_{j∈N*_i} w_ij,  N*_i = {j ∈ N_i : d_ij < α},  w_ij = exp(T (α − d_ij))

Symbols
    B rows; P_i, N_i references of the class of sample i and of other classes; d Euclidean distance; α radius
    negatives are pushed out of (`radius`); m margin (`margin`); T temperature of the negatives (`temperature`);
    λ weight of the negatives (`balance`). L_P(i), L_N(i) are 0 if P*_i, N*_i are empty; every row counts in B.
    w is a constant of the gradient. Weights multiply d − (α − m) and α − d, in the exponent of w too.

Settings
    α = 1.2, m = 0.4, T = 10, λ = 1, as commonly used. The authors' code for CUB: α = 1.4, m = 0.2, T = 10, 20 classes
    of 3 images per batch.

Departures
    w is held constant, since it is there to weight gradients; if it were differentiated, as in some public code, it
    would pull in the farther of N*_i. A later version of the paper writes (1 − λ) L_P + λ L_N: half of this at λ = 0.5.

Relations
    `margin` with β = α − m/2 and margin m/2 has the same two balls, and samples negatives instead of weighting them.
"""

import torch
from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, distance, log_sum_exp, sum_terms, total, weighted


def ranked_list(
    r: Relation, *, radius: float, margin: float, temperature: float, balance: float, weights: Tensor | None = None
) -> Tensor:
    """The mean over samples of L_P + λ L_N."""
    d = distance(r)
    outside, inside = weighted(d - (radius - margin), weights), weighted(radius - d, weights)
    far, near = r.pos & (d > radius - margin), r.neg & (d < radius)
    pull = total(outside, far, by="row") / count(far, by="row").clamp_min(1)
    z = temperature * inside.detach()
    w = torch.where(near, (z - log_sum_exp(z, near, by="row")[:, None]).clamp(-80, 0).exp(), 0)
    push = total(w * inside, near, by="row")
    return sum_terms(r, pull + balance * push) / len(r.rows)


class RankedList(Loss):
    """Ranked list loss."""

    images_per_class = 3

    def __init__(
        self, *, radius: float = 1.2, margin: float = 0.4, temperature: float = 10.0, balance: float = 1.0
    ) -> None:
        super().__init__()
        above_zero("ranked_list", radius=radius)
        zero_or_more("ranked_list", margin=margin, temperature=temperature, balance=balance)
        self.radius, self.margin, self.temperature, self.balance = radius, margin, temperature, balance

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return ranked_list(
            r,
            radius=self.radius,
            margin=self.margin,
            temperature=self.temperature,
            balance=self.balance,
            weights=weights,
        )
