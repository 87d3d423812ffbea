"""NCA. Goldberger, Roweis, Hinton, Salakhutdinov: Neighbourhood Components Analysis. NIPS 2004.

The probability that a sample picks a neighbour of its own class, if nearer ones are picked more often.

    p_ij = exp(−σ d_ij) / Σ_{k∈P_i∪N_i} exp(−σ d_ik)                                                         (1)
    p_i  = Σ_{j∈P_i} p_ij                                                                                    (2)
    L    = mean_i −log p_i                                                                                   (3)

    Equation 3 is the paper's second objective, the logarithm of the probability that all samples are right.

Symbols
    P_i, N_i references of the class of sample i and of other classes, never i itself and no empty slot; d squared
    Euclidean distance of the projected vectors (unit vectors: 2 − 2 cos); σ scale (`scale`); the mean is over samples
    with a positive, or 0 if there is none. Weights multiply σ d.

Settings
    σ = 1.

Departures
    The paper learns a linear map of raw features, and with it the scale of distances; here the network is the map,
    embeddings have norm 1 and the scale is fixed: a few times 1 makes farther neighbours count less.
    The paper maximises the sum of p_i, or of log p_i, over all samples; we take the mean over a batch.

Relations
    `proxy_nca` has proxies as neighbours and leaves the positive out of the sum. `supcon` takes the mean over positives
    outside the logarithm, so that all of them must be near; here one is enough.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, log_sum_exp, mean_terms, squared_distance, weighted


def nca(r: Relation, *, scale: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 3 over the rows."""
    z = weighted(-scale * squared_distance(r), weights)
    log_p = log_sum_exp(z, r.pos, by="row") - log_sum_exp(z, r.pos | r.neg, by="row")  # Eq. 1, 2
    return mean_terms(r, -log_p, count(r.pos, by="row") > 0)  # Eq. 3


class NCA(Loss):
    """Neighbourhood components analysis on the samples of a batch."""

    images_per_class = 4

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        above_zero("nca", scale=scale)
        self.scale = scale

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return nca(r, scale=self.scale, weights=weights)
