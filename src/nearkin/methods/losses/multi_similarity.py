"""Multi-similarity. Wang, Han, Huang, Dong, Scott: Multi-Similarity Loss with General Pair Weighting. CVPR 2019.

Weights each positive and negative of a sample by its similarity relative to the others; the hardest count most.

    L = 1/B Σ_i ( 1/α log(1 + Σ_{j∈P_i} exp(−α(s_ij − λ))) + 1/β log(1 + Σ_{j∈N_i} exp(β(s_ij − λ))) )        (1)

    mining:  keep j ∈ P_i where s_ij < max_{k∈N_i} s_ik + ε                                                   (2)
             keep j ∈ N_i where s_ij > min_{k∈P_i} s_ik − ε                                                   (3)

Symbols
    B rows; P_i, N_i references of the class of sample i and of other classes; s cosine similarity; α, β scales;
    λ similarity margin (`base`); ε slack of the mining (`epsilon`). With `mining` (the default) the sums of Eq. 1 run
    over what Eq. 2 and 3 keep, whose max and min run over all of N_i and P_i; without it over all of P_i and N_i.
    An empty sum is 0. Every row counts in B. A row without positives adds its negative term without mining and nothing
    with it (an empty minimum is +∞, an empty maximum −∞); likewise a row without negatives.
    Weights multiply the exponents of Eq. 1, not the comparisons of Eq. 2 and 3.

Settings
    α = 2, β = 50, λ = 1, ε = 0.1. The authors' code: β = 40, λ = 0.5, 5 images per class, on CUB batch 80, Adam 3e-5,
    weight decay 5e-4. The defaults here are a common combination: β = 50, λ = 0.5.
    CCP, no mining: (α, β, λ) = CUB, SOP (2, 40, 0.5), Cars (14.35, 75.83, 0.66), In-Shop (8.49, 57.38, 0.41).

Departures
    None in the mathematics. Mining is two thresholds per row on the dense similarities: no sort, no lists of pairs.

Relations
    `proxy_anchor` is Eq. 1 with proxies as anchors, one scale and one margin. Against a memory (`xbm`) or
    proxies (`ccp`) the sums run over their columns.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, largest, log1p_sum_exp, smallest, sum_terms, weighted


def mine(r: Relation, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Masks of the positives and negatives that mining keeps."""
    s = r.s.detach()
    pos = r.pos & (s < (largest(s, r.neg, by="row") + epsilon)[:, None])  # Eq. 2
    neg = r.neg & (s > (smallest(s, r.pos, by="row") - epsilon)[:, None])  # Eq. 3
    return pos, neg


def multi_similarity(
    r: Relation, *, alpha: float, beta: float, base: float, epsilon: float | None, weights: Tensor | None = None
) -> Tensor:
    """Eq. 1, over mined pairs unless epsilon is None."""
    pos, neg = (r.pos, r.neg) if epsilon is None else mine(r, epsilon=epsilon)
    above = weighted(r.s - base, weights)
    pull = log1p_sum_exp(-alpha * above, pos, by="row")
    push = log1p_sum_exp(beta * above, neg, by="row")
    return sum_terms(r, pull / alpha + push / beta) / len(r.rows)  # Eq. 1


class MultiSimilarity(Loss):
    """Multi-similarity loss, with or without mining."""

    images_per_class = 5

    def __init__(
        self,
        *,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        mining: bool = True,
    ) -> None:
        super().__init__()
        above_zero("multi_similarity", alpha=alpha, beta=beta)
        self.alpha, self.beta, self.base = alpha, beta, base
        self.epsilon = epsilon if mining else None

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return multi_similarity(
            r, alpha=self.alpha, beta=self.beta, base=self.base, epsilon=self.epsilon, weights=weights
        )
