"""NT-Xent. Chen, Kornblith, Norouzi, Hinton: A Simple Framework for Contrastive Learning of Visual Representations.
ICML 2020.

A softmax of each positive against the negatives of its sample, at a low temperature.

    ℓ_ij = −log( exp(s_ij/τ) / (exp(s_ij/τ) + Σ_{k∈N_i} exp(s_ik/τ)) )                                       (1)
    L    = 1/|𝒫| Σ_{(i,j)∈𝒫} ℓ_ij

Symbols
    𝒫 all pairs of a sample i and a reference j of its class, |𝒫| at least 1; N_i the references of other classes than
    i; s cosine similarity; τ temperature (`temperature`). A pair without negatives adds 0 and counts in |𝒫|.
    Weights multiply s/τ of positives and negatives.

Settings
    τ = 0.1 (ImageNet), 0.5 (CIFAR-10); two augmented views of each image, whose class is the image.

Departures
    The paper has one positive per sample, the other view of its image. With several, each has its own term, and the
    others are left out of its denominator.

Relations
    `n_pair` on unit vectors, with a temperature and without the weight of the norms. `supcon` has all positives in
    the denominator and takes their mean per sample first.
"""

from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, log_sum_exp, mean_terms, weighted


def nt_xent(r: Relation, *, temperature: float, weights: Tensor | None = None) -> Tensor:
    """The mean of Eq. 1 over positive pairs."""
    z = weighted(r.s / temperature, weights)
    negatives = log_sum_exp(z, r.neg, by="row")
    return mean_terms(r, F.softplus(negatives[:, None] - z, threshold=50), r.pos)  # Eq. 1


class NTXent(Loss):
    """Normalised temperature-scaled cross-entropy over positive pairs."""

    images_per_class = 2

    def __init__(self, *, temperature: float = 0.1) -> None:
        super().__init__()
        above_zero("nt_xent", temperature=temperature)
        self.temperature = temperature

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return nt_xent(r, temperature=self.temperature, weights=weights)
