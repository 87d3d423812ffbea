"""Normalised softmax. Zhai, Wu: Classification is a Strong Baseline for Deep Metric Learning. BMVC 2019.

A softmax classifier with unit weight vectors, one proxy per class, and a low temperature.

    S(x, c) = max_k s(x, w_ck)                                                                           (1)
    L(X) = 1/|X'| Σ_{x∈X'} −log( exp(S(x, c_x)/T) / Σ_c exp(S(x, c)/T) )                                 (2)
    L_ε(X) = L(X) + ε/|X'| Σ_{x∈X'} (S(x, c_x) − 1/C Σ_c S(x, c))/T                                      (3)

    Equation numbers are ours.

Symbols
    s cosine similarity; w_ck proxy k of class c (the paper: K = 1, where S is s); c_x the class of x; the sum is over
    all classes, including c_x; X' the samples of the batch X whose class has a proxy (else L = 0);
    T temperature (`temperature`); ε label smoothing (`smoothing`); C the number of classes.
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.

Settings
    T = 0.05, K = 1, layer norm before the embedding is normalised, class-balanced batches. The authors' code:
    ResNet-50, 2,048-d, batch 75 with 25 images per class (CUB, Cars) or 5 (SOP, In-Shop).

Departures
    The paper has one proxy per class; at `per_class` > 1 a class is as near as its nearest proxy, as in `arcface`.
    Batches are random unless the run sets `images_per_class`; layer norm is a setting of the run.
    The paper's sampling of classes, for very many classes, is left out.
    The paper has no label smoothing: Eq. 3 is Eq. 2 with a target of 1 − ε + ε/C for the class of x and ε/C for others.

Relations
    `cosface` and `arcface` add a margin to S(x, c_x); `soft_triple` has a soft maximum in Eq. 1 and a regulariser.
"""

from torch import Tensor

from nearkin.errors import NearkinError, above_zero
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import by_class, class_weights, cross_entropy, of_own_class
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, count, exists, mean_terms, total, weighted


def norm_softmax(q: Relation, *, temperature: float, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Eq. 3, with one column per class."""
    S, weight = of_own_class(q, weights)
    own, z = weighted(S / temperature, weight), weighted(q.s / temperature, weights)
    loss = cross_entropy(own, z, q)  # Eq. 2
    if not smoothing:
        return loss
    every = q.pos | q.neg
    mean = total(z, every, by="row") / count(every, by="row").clamp_min(1)
    return loss + smoothing * mean_terms(q, own - mean, exists(q.pos, by="row"))  # Eq. 3


class NormSoftmax(Loss):
    """Normalised softmax with `per_class` proxies per class."""

    later_options = ("smoothing",)
    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        temperature: float = 0.05,
        smoothing: float = 0.0,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("norm_softmax", temperature=temperature)
        if not 0 <= smoothing < 1:
            raise NearkinError(f"norm_softmax needs a smoothing from 0 to below 1, not {smoothing}.")
        self.temperature, self.smoothing = temperature, smoothing
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        q = by_class(r, similarity="max")  # Eq. 1
        weights = class_weights(r, weights)
        return norm_softmax(q, temperature=self.temperature, smoothing=self.smoothing, weights=weights)
