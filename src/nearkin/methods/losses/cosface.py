"""CosFace. Wang, Wang, Zhou, Ji, Gong, Zhou, Li, Liu: CosFace: Large Margin Cosine Loss for Deep Face Recognition.
CVPR 2018.

A softmax over cosines that subtracts a margin from the cosine of a sample and its own class.

    S(x, c) = max_k s(x, w_ck)                                                                           (1)
    L(X) = 1/|X'| Σ_{x∈X'} −log( e^{λ(S(x, c_x) − m)} / (e^{λ(S(x, c_x) − m)} + Σ_{c≠c_x} e^{λ S(x, c)}) )   (2)

    Equation numbers are ours.

Symbols
    s cosine similarity; w_ck proxy k of class c (the paper: K = 1, where S is s); c_x the class of x; X' the samples of
    the batch X whose class has a proxy (else L = 0); λ scale (`scale`); m margin (`margin`).
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.

Settings
    λ = 64, m = 0.35, K = 1 (faces), as commonly used.

Departures
    The paper has one proxy per class; at `per_class` > 1 a class is as near as its nearest proxy, as in `arcface`.

Relations
    At m = 0 `norm_softmax` with T = 1/λ; `arcface` has the margin on the angle; `soft_triple` a soft maximum in Eq. 1.
"""

from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import by_class, class_weights, cross_entropy, of_own_class
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, weighted


def cosface(q: Relation, *, scale: float, margin: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 2, with one column per class."""
    S, weight = of_own_class(q, weights)
    with_margin = weighted(scale * (S - margin), weight)
    return cross_entropy(with_margin, weighted(scale * q.s, weights), q)  # Eq. 2


class CosFace(Loss):
    """CosFace with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.35,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("cosface", scale=scale)
        zero_or_more("cosface", margin=margin)
        self.scale, self.margin = scale, margin
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        q = by_class(r, similarity="max")  # Eq. 1
        return cosface(q, scale=self.scale, margin=self.margin, weights=class_weights(r, weights))
