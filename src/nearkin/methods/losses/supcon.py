"""SupCon. Khosla, Teterwak, Wang, Sarna, Tian, Isola, Maschinot, Liu, Krishnan: Supervised Contrastive Learning.
NeurIPS 2020.

A softmax of each positive against all other references; the mean over positives is outside the logarithm.

    L = mean_i  −1/|P_i| Σ_{j∈P_i} log( exp(s_ij/τ) / Σ_{k∈P_i∪N_i} exp(s_ik/τ) )                            (2, L_out)

Symbols
    P_i, N_i references of the class of sample i and of other classes, never i itself and no empty slot;
    s cosine similarity; τ temperature (`temperature`); the mean is over samples with a positive, or 0 if
    there is none. Weights multiply s/τ in numerator and denominator.

Settings
    τ = 0.1; two augmented views of each image.

Departures
    The paper sums over samples; we take the mean. Instead of two views, a batch may hold several images of a class.

Relations
    `n_pair` leaves the other positives out of the denominator and has no temperature.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, log_sum_exp, mean_terms, total, weighted


def supcon(r: Relation, *, temperature: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 2, row by row."""
    z = weighted(r.s / temperature, weights)
    P = count(r.pos, by="row")
    mean_positive = total(z, r.pos, by="row") / P.clamp_min(1)
    return mean_terms(r, log_sum_exp(z, r.pos | r.neg, by="row") - mean_positive, P > 0)  # Eq. 2


class SupCon(Loss):
    """Supervised contrastive loss with the mean over positives outside the logarithm."""

    images_per_class = 4

    def __init__(self, *, temperature: float = 0.1) -> None:
        super().__init__()
        above_zero("supcon", temperature=temperature)
        self.temperature = temperature

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return supcon(r, temperature=self.temperature, weights=weights)
