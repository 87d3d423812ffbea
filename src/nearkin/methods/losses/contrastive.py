"""Contrastive. Hadsell, Chopra, LeCun: Dimensionality Reduction by Learning an Invariant Mapping. CVPR 2006.

Pulls pairs of the same class together and pushes other pairs apart up to a margin. Three forms are in use:

    c1       1/B Σ_i ( Σ_{j∈P_i} (1 − s_ij)_+ + Σ_{j∈N_i} (s_ij − m)_+ )                  XBM's, on cosine similarity
    c2       R{(d_ij − m⁺)_+ : j∈P_i} + R{(m⁻ − d_ij)_+ : j∈N_i}                          two margins, on distance
    squared  1/|𝒫| Σ_i ( Σ_{j∈P_i} d_ij² + Σ_{j∈N_i} (m⁻ − d_ij)_+² )                     PROFS, Eq. 3.1

Symbols
    B rows; P_i, N_i references of the class of sample i and of other classes; s similarity; d Euclidean distance;
    m margin on s (`margin`); m⁺, m⁻ margins on d (`positive`, `negative`);
    R the mean over the non-zero terms of all i, j (`reduce="mean"`; 0 if there is none), or their sum
    (`reduce="sum"`); 𝒫 all pairs of the sums, |𝒫| = Σ_i |P_i| + |N_i|, at least 1.
    `mining="hard"`: N_i is reduced to its |P_i| hardest, or all if there are fewer: those of largest s (c1) or smallest
    d (c2, squared); ties by column number. A row without positives then has no negatives.
    Weights multiply the inside of each (·)_+, and d before it is squared; they do not affect mining.

Settings
    c1: m = 0.5 (Wang et al., Cross-Batch Memory, CVPR 2020).
    c2: (m⁺, m⁻) = CUB (0, .3841), Cars (.2652, .5409), SOP and In-Shop (.2858, .5130), in the ball (CCP, appendix).
    squared: m⁻ = 1 on the unit sphere, `mining="hard"` (PROFS, §5.3).

Departures
    c1 leaves out the slack of 1e-5 on positives in XBM's and CCP's code; only a sample's pair with itself is dropped.
    XBM's code also leaves out the − m of a counted negative: another value, the same gradient.
    Each row has as many hard negatives as positives, as in PROFS for each representative, also if the batch is
    compared with itself; the baseline in the text matches the two numbers over the whole batch.

Relations
    `margin` has a learnable boundary between m⁺ and m⁻; `xbm` and `ccp` compare with a memory or proxies instead of
    the batch. With `reduce="sum"`, c2 is PROFS's Eq. 4.6 (ε⁺ = m⁺, ε⁻ = m⁻).
"""

from typing import Literal

from torch import Tensor

from nearkin.errors import zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, distance, mean_terms, sum_terms, top_of_row, total_of, weighted

Form = Literal["c1", "c2", "squared"]
Mining = Literal["all", "hard"]
Reduce = Literal["mean", "sum"]


def hard_negatives(r: Relation, hardness: Tensor) -> Tensor:
    """Mask of the hardest negatives of each row, as many as it has positives."""
    return top_of_row(hardness.detach(), r.neg, count(r.pos, by="row"))


def c1(r: Relation, *, margin: float, mining: Mining, weights: Tensor | None = None) -> Tensor:
    """Hinges on similarity, summed over references, averaged over samples."""
    neg = hard_negatives(r, r.s) if mining == "hard" else r.neg
    pull = weighted(1 - r.s, weights).clamp_min(0)
    push = weighted(r.s - margin, weights).clamp_min(0)
    return (sum_terms(r, pull, r.pos) + sum_terms(r, push, neg)) / len(r.rows)


def c2(
    r: Relation, *, positive: float, negative: float, reduce: Reduce, mining: Mining, weights: Tensor | None = None
) -> Tensor:
    """Hinges on distance with one margin per side, each averaged over its non-zero terms, or summed."""
    d = distance(r)
    neg = hard_negatives(r, -d) if mining == "hard" else r.neg
    pull = weighted(d - positive, weights).clamp_min(0)
    push = weighted(negative - d, weights).clamp_min(0)
    if reduce == "sum":
        return sum_terms(r, pull, r.pos) + sum_terms(r, push, neg)
    return mean_terms(r, pull, r.pos & (pull > 0)) + mean_terms(r, push, neg & (push > 0))


def squared(r: Relation, *, negative: float, mining: Mining, weights: Tensor | None = None) -> Tensor:
    """Squared distances of positives and squared hinges of negatives, averaged over all pairs."""
    d = distance(r)
    neg = hard_negatives(r, -d) if mining == "hard" else r.neg
    pull = weighted(d, weights).square()
    push = weighted(negative - d, weights).clamp_min(0).square()
    pairs = total_of(r.pos) + total_of(neg)
    return (sum_terms(r, pull, r.pos) + sum_terms(r, push, neg)) / pairs.clamp_min(1)


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
        reduce: Reduce = "mean",
        mining: Mining = "all",
    ) -> None:
        super().__init__()
        zero_or_more("contrastive", positive=positive, negative=negative)
        self.form, self.margin, self.positive, self.negative = form, margin, positive, negative
        self.reduce: Reduce = reduce
        self.mining: Mining = mining

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        if self.form == "c1":
            return c1(r, margin=self.margin, mining=self.mining, weights=weights)
        if self.form == "squared":
            return squared(r, negative=self.negative, mining=self.mining, weights=weights)
        return c2(
            r,
            positive=self.positive,
            negative=self.negative,
            reduce=self.reduce,
            mining=self.mining,
            weights=weights,
        )
