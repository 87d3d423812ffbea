"""Lifted structure. Oh Song, Xiang, Jegelka, Savarese: Deep Metric Learning via Lifted Structured Embedding. CVPR 2016.

Compares each pair of the same class with all negatives of both samples; the nearest count most.

    L = 1/(2|𝒫|) Σ_{(i,j)∈𝒫} (J_ij)_+²
    J_ij = max( max_{k∈N_i} α − d_ik,  max_{l∈M_j} α − d_lj ) + d_ij                                              (3)
    J_ij = log( Σ_{k∈N_i} exp(α − d_ik) + Σ_{l∈M_j} exp(α − d_lj) ) + d_ij                                        (4)

Symbols
    𝒫 all pairs of a sample i and a reference j of its class (of a batch with itself both (i, j) and (j, i)), |𝒫| at
    least 1; N_i the references of other classes than sample i; M_j the samples of other classes than reference j;
    d Euclidean distance; α margin (`margin`). Default: Eq. 4, the smooth upper bound that the paper trains;
    `smooth=False`: Eq. 3. A pair whose N_i and M_j are both empty has J = −∞: it adds 0 and counts in |𝒫|.
    Weights multiply α − d and d of their pair.

Settings
    α = 1, embeddings not normalised (space `euclidean`), batch 128, SGD.

Departures
    None on a batch. On other relations the second sum is over the samples, down the column of reference j, so pairs of
    references are left out, as PROFS asks (§5.3). Embeddings are not normalised: set `space="cosine"` to compare on the
    unit sphere as later papers do. In training they start with mean norm 11 (`short_start`): from long embeddings the
    loss may make a pretrained network collapse, and from very short ones it learns little.

Relations
    Eq. 3 is `triplet` with the hardest negative of both samples of a pair, squared.
"""

import torch
from torch import Tensor

from nearkin.errors import zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, distance, largest, log_sum_exp, sum_terms, total_of, weighted
from nearkin.space import Space


def lifted(r: Relation, *, margin: float, smooth: bool, weights: Tensor | None = None) -> Tensor:
    """Eq. 4, or Eq. 3 if not smooth."""
    d = distance(r)
    near = weighted(margin - d, weights)
    if smooth:
        rows, columns = log_sum_exp(near, r.neg, by="row"), log_sum_exp(near, r.neg, by="column")
        nearest = torch.logaddexp(rows[:, None], columns)
    else:
        rows, columns = largest(near, r.neg, by="row"), largest(near, r.neg, by="column")
        nearest = torch.maximum(rows[:, None], columns)
    J = (nearest + weighted(d, weights)).clamp_min(0)  # Eq. 3, 4
    return sum_terms(r, J.square(), r.pos) / (2 * total_of(r.pos)).clamp_min(1)


class Lifted(Loss):
    """Lifted structure loss, smooth or with the hardest negative only."""

    space = Space.EUCLIDEAN
    images_per_class = 4

    def __init__(self, *, margin: float = 1.0, smooth: bool = True) -> None:
        super().__init__()
        zero_or_more("lifted", margin=margin)
        self.margin, self.smooth = margin, smooth

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return lifted(r, margin=self.margin, smooth=self.smooth, weights=weights)
