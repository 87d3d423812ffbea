"""Circle. Sun, Cheng, Zhang, Zhang, Zheng, Wang, Wei: Circle Loss: A Unified Perspective of Pair Similarity. CVPR 2020.

Weights each similarity by its distance from its optimum, which makes the decision boundary a circle.

    L = mean_i log(1 + Σ_{k∈N_i} exp(γ a⁻_ik (s_ik − m)) · Σ_{j∈P_i} exp(−γ a⁺_ij (s_ij − (1 − m))))              (1)
    a⁺_ij = (1 + m − s_ij)_+,   a⁻_ik = (s_ik + m)_+                                                              (2)

Symbols
    P_i, N_i references of the class of sample i and of other classes; s cosine similarity; m relaxation
    (`margin`); γ scale (`gamma`); the mean is over samples with both a positive and a negative, or 0 if there is
    none. a⁺, a⁻ are constants of the gradient. Weights multiply the exponents of Eq. 1.

Settings
    m = 0.25, γ = 256 (faces), 128 (persons); m = 0.4, γ = 80 (CUB, Cars, SOP).

Departures
    None.

Relations
    Without a⁺, a⁻ this is `n_pair`'s softmax with several positives; `multi_similarity` keeps the two sums apart.
"""

from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, exists, log_sum_exp, mean_terms, weighted


def circle(r: Relation, *, margin: float, gamma: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 1, row by row."""
    s = r.s.detach()
    pull = -gamma * (1 + margin - s).clamp_min(0) * (r.s - (1 - margin))  # Eq. 2
    push = gamma * (s + margin).clamp_min(0) * (r.s - margin)  # Eq. 2
    both = exists(r.pos, by="row") & exists(r.neg, by="row")
    z = log_sum_exp(weighted(pull, weights), r.pos, by="row") + log_sum_exp(weighted(push, weights), r.neg, by="row")
    return mean_terms(r, F.softplus(z, threshold=50), both)  # Eq. 1


class Circle(Loss):
    """Circle loss on pairs."""

    images_per_class = 4

    def __init__(self, *, margin: float = 0.25, gamma: float = 256.0) -> None:
        super().__init__()
        above_zero("circle", gamma=gamma)
        self.margin, self.gamma = margin, gamma

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return circle(r, margin=self.margin, gamma=self.gamma, weights=weights)
