"""Angular. Wang, Zhou, Wen, Liu, Lin: Deep Metric Learning with Angular Loss. ICCV 2017.

Keeps the angle at the negative below α in every triangle of a sample, a positive and a negative.

    L = 1/|𝒫| Σ_{(i,j)∈𝒫} log(1 + Σ_{k∈N_i} exp f_ijk)  +  w L_n_pair
    f_ijk = 4 tan²α (x_i + v_j)·v_k − 2 (1 + tan²α) x_i·v_j

Symbols
    x, v samples and references, projected into the space (unit vectors by default); N_i the references of other
    classes than sample i; 𝒫 the pairs (i, j) of a sample and a reference of its class, for each i at most the K of
    smallest similarity s_ij (`positives`), |𝒫| at least 1; α the angle in degrees (`angle`).
    A pair without negatives adds log 1 = 0 and counts in |𝒫|.
    w weight of the N-pair loss (`n_pair`), 1/|𝒫'| Σ_{(i,j)∈𝒫'} log(1 + Σ_{k∈N_i} exp(s_ik − s_ij)) over all pairs 𝒫'
    of a sample and a reference of its class, without the norm term.
    Weights ω multiply inside: 4 tan²α ω_ik (x_i + v_j)·v_k − 2 (1 + tan²α) ω_ij x_i·v_j; and s in the N-pair loss.

Settings
    α = 45°, 2 images per class; with N-pair, L_n_pair + 2 L (λ = 2 in public code): here w = 0.5, at twice the rate.

Departures
    The N-pair term compares the same unit vectors; public code does not normalise them there.
    The paper pairs each sample with one positive; here with its hardest, up to K = 8. That is all
    of them in a usual batch, and bounds memory to B·K·R numbers if the references are a memory.

Relations
    `n_pair` compares inner products only, without the third side v_j·v_k.
"""

import math

import torch
from torch import Tensor

from nearkin.errors import NearkinError, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.n_pair import n_pair
from nearkin.methods.relation import Relation, listed, log1p_sum_exp, mean_terms
from nearkin.space import full_precision


def angular(r: Relation, *, angle: float, positives: int, weights: Tensor | None = None) -> Tensor:
    """The first term of the loss, over the hardest positives and all negatives of each sample."""
    t = math.tan(math.radians(angle)) ** 2
    K = min(positives, r.s.shape[1])
    j = torch.where(r.pos, -r.s.detach(), -torch.inf).topk(K, dim=1).indices  # [B, K]
    taken = r.pos.gather(1, j)
    i, k = listed(taken)
    j, taken = j[i, k], taken[i, k]
    x, v = r.x.index_select(0, i), r.vectors.index_select(0, j)  # [P, D]
    with full_precision(v):
        third = (4 * t * (x + v)) @ r.vectors.T  # [P, R]
    side = 2 * (1 + t) * (x * v).sum(-1)
    if weights is not None:
        third, side = weights[i] * third, weights[i, j] * side
    return mean_terms(r, log1p_sum_exp(third - side[:, None], r.neg[i], by="row"), taken, rows=i)


class Angular(Loss):
    """The angular loss, alone or with N-pair."""

    images_per_class = 2
    one_per_class = True

    def __init__(self, *, angle: float = 45.0, n_pair: float = 0.0, positives: int = 8) -> None:
        super().__init__()
        zero_or_more("angular", n_pair=n_pair)
        if not 0 < angle < 90 or positives < 1:
            raise NearkinError(
                f"angular takes an angle of 0 to 90 degrees and at least 1 positive, not {angle} and {positives}."
            )
        self.angle, self.n_pair, self.positives = angle, n_pair, positives

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        value = angular(r, angle=self.angle, positives=self.positives, weights=weights)
        return value + self.n_pair * n_pair(r, weights) if self.n_pair else value
