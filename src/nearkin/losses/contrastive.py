"""Contrastive. Hadsell, Chopra, LeCun: Dimensionality Reduction by Learning an Invariant Mapping. CVPR 2006.

Pairs of kin are pulled together, other pairs pushed apart up to a margin. Three forms are in use:

    c1       1/B Σ_i ( Σ_{j∈P_i} (1 − s_ij)_+ + Σ_{j∈N_i} (s_ij − m)_+ )                  XBM's, on cosine similarity
    c2       R{(d_ij − m⁺)_+ : j∈P_i} + R{(m⁻ − d_ij)_+ : j∈N_i}                          two margins, on distance
    squared  1/B Σ_i ( Σ_{j∈P_i} d_ij² + Σ_{j∈N_i} (m⁻ − d_ij)_+² )                       PROFS, Eq. 3.1

Symbols
    P_i, N_i references of the same and of other classes than sample i; s similarity; d Euclidean distance;
    m margin on s (`margin`); m⁺, m⁻ margins on d (`positive`, `negative`);
    R the mean over the non-zero terms of all i, j (`reduce="mean"`), or their sum (`reduce="sum"`).

Settings
    c1: m = 0.5 (Wang et al., Cross-Batch Memory, CVPR 2020).
    c2: (m⁺, m⁻) = CUB (0, .3841), Cars (.2652, .5409), SOP and In-Shop (.2858, .5130), in the ball (CCP, appendix).
    squared: m⁻ = 1 on the unit sphere (PROFS, §5.3).

Departures
    c1 leaves out the authors' 1e-5 slack on positives; ours drops only a sample's pair with itself.

Relations
    `margin` has a learnable boundary between m⁺ and m⁻; `xbm` and `ccp` compare with a memory or proxies in place of
    the batch. With `reduce="sum"`, c2 is PROFS's Eq. 4.6 (ε⁺ = m⁺, ε⁻ = m⁻).
"""

from typing import Literal

from torch import Tensor

from nearkin.method import Loss
from nearkin.similarity import Relation, distance, mean_where, total_of, weighted

Form = Literal["c1", "c2", "squared"]


def c1(r: Relation, *, margin: float, weights: Tensor | None = None) -> Tensor:
    """Hinges on similarity, summed over references, averaged over samples."""
    pull = weighted(1 - r.s, weights).clamp_min(0)
    push = weighted(r.s - margin, weights).clamp_min(0)
    return (total_of(pull, r.pos) + total_of(push, r.neg)) / len(r.rows)


def c2(
    r: Relation, *, positive: float, negative: float, reduce: Literal["mean", "sum"], weights: Tensor | None = None
) -> Tensor:
    """Hinges on distance with a margin for either side, each averaged over its non-zero terms, or summed."""
    d = distance(r)
    pull = weighted(d - positive, weights).clamp_min(0)
    push = weighted(negative - d, weights).clamp_min(0)
    if reduce == "sum":
        return total_of(pull, r.pos) + total_of(push, r.neg)
    return mean_where(pull, r.pos & (pull > 0)) + mean_where(push, r.neg & (push > 0))


def squared(r: Relation, *, negative: float, weights: Tensor | None = None) -> Tensor:
    """Squared distances of kin and squared hinges of others, summed over references, averaged over samples."""
    d = distance(r)
    pull = weighted(d, weights).square()
    push = weighted(negative - d, weights).clamp_min(0).square()
    return (total_of(pull, r.pos) + total_of(push, r.neg)) / len(r.rows)


class Contrastive(Loss):
    """The contrastive loss in the form c1, c2 or squared."""

    images_per_class = 4

    def __init__(
        self,
        *,
        form: Form = "c2",
        margin: float = 0.5,
        positive: float = 0.0,
        negative: float = 1.0,
        reduce: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        self.form, self.margin, self.positive, self.negative = form, margin, positive, negative
        self.reduce: Literal["mean", "sum"] = reduce

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        if self.form == "c1":
            return c1(r, margin=self.margin, weights=weights)
        if self.form == "c2":
            return c2(r, positive=self.positive, negative=self.negative, reduce=self.reduce, weights=weights)
        return squared(r, negative=self.negative, weights=weights)
