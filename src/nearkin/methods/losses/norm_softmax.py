"""Normalised softmax. Zhai, Wu: Classification is a Strong Baseline for Deep Metric Learning. BMVC 2019.

A softmax classifier with unit weight vectors, one proxy per class, and a low temperature.

    S(x, c) = max_k s(x, w_ck)                                                                           (1)
    L(X) = 1/|X'| Σ_{x∈X'} −log( exp(S(x, c_x)/T) / Σ_c exp(S(x, c)/T) )                                 (2)

    Equation numbers are ours.

Symbols
    s cosine similarity; w_ck proxy k of class c (the paper: K = 1, where S is s); c_x the class of x; the sum is over
    all classes, including c_x; X' the samples of the batch X whose class has a proxy (else L = 0);
    T temperature (`temperature`).
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.

Settings
    T = 0.05, K = 1, layer norm before the embedding is normalised, class-balanced batches. The authors' code:
    ResNet-50, 2,048-d, batch 75 with 25 images per class (CUB, Cars) or 5 (SOP, In-Shop).

Departures
    The paper has one proxy per class; at `per_class` > 1 a class is as near as its nearest proxy, as in `arcface`.
    Batches are random unless the run sets `images_per_class`; layer norm is a setting of the run.
    The paper's sampling of classes, for very many classes, is left out.

Relations
    `cosface` and `arcface` add a margin to S(x, c_x); `soft_triple` has a soft maximum in Eq. 1 and a regulariser.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import by_class, class_weights, cross_entropy, of_own_class
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, weighted


def norm_softmax(q: Relation, *, temperature: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 2, with one column per class."""
    S, weight = of_own_class(q, weights)
    return cross_entropy(weighted(S / temperature, weight), weighted(q.s / temperature, weights), q)  # Eq. 2


class NormSoftmax(Loss):
    """Normalised softmax with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        temperature: float = 0.05,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
    ) -> None:
        super().__init__()
        above_zero("norm_softmax", temperature=temperature)
        self.temperature = temperature
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        q = by_class(r, similarity="max")  # Eq. 1
        return norm_softmax(q, temperature=self.temperature, weights=class_weights(r, weights))
