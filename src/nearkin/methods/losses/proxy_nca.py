"""Proxy-NCA. Movshovitz-Attias, Toshev, Leung, Ioffe, Singh: No Fuss Distance Metric Learning Using Proxies. ICCV 2017.

Pulls each sample to the proxy of its class, relative to how near the proxies of all other classes are.

    L(X) = 1/|X'| Σ_{x∈X'} −log( exp(−σ d(x, p(x))) / Σ_{z∈Z_x} exp(−σ d(x, z)) )                        (1)
    p(x) = argmin_{p∈P_x} d(x, p)                                                                        (2)

    Equation numbers are ours.

Symbols
    d squared Euclidean distance of the projected vectors (unit vectors: 2 − 2 cos); P_x the proxies of x's class;
    Z_x the proxies of all other classes: the positive is left out of the sum, so L can be negative;
    X' the samples of the batch X with a proxy of their class and one of another class (else L = 0);
    σ scale (`scale`). With weights ω [B, R], every exponent −σ d(x, z) becomes −σ d(x, z) + 2σ(ω − 1) s(x, z), which
    is 2σ(ω s(x, z) − 1) for unit vectors, and p(x) is the proxy of the class of x with the largest exponent.

Settings
    One proxy per class, Inception with batch normalisation, RMSprop. As commonly used: 64-d, 227 px crops, batch 32.
    A public re-implementation scales both sides by 3 (σ = 9; CUB, Cars), or only proxies by 8 or 12 (SOP).
    As Proxy-Anchor's baseline: σ = 32, the positive in the sum, proxies' learning rate × 1.

Departures
    The paper has one proxy per class; at `per_class` > 1 the positive is the nearest proxy of the class.
    The paper scales unit vectors by constants; here that is σ, the product of the two norms.
    ω weights the similarity 2σ s and not −σ d, which is the same loss without weights. −σ d is never positive, so that
    a small ω would lift the exponent of an easy negative above those of the hard ones.
    Proxies start from N(0, 2/(C·K)), as everywhere here, with `speed` 1.

Relations
    `proxy_nca_pp` has the positive in the sum and a temperature. pytorch-metric-learning's ProxyNCALoss is that form.
"""

from torch import Tensor

from nearkin.errors import above_zero
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import positive_exponent
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, exists, log_sum_exp, mean_terms, minus_squared_distance


def proxy_nca(r: Relation, *, scale: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 1 with the references as proxies."""
    z = scale * minus_squared_distance(r, weights)
    counted = exists(r.pos, by="row") & exists(r.neg, by="row")
    return mean_terms(r, log_sum_exp(z, r.neg, by="row") - positive_exponent(z, r), counted)  # Eq. 1, 2


class ProxyNCA(Loss):
    """Proxy-NCA as published, with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        scale: float = 1.0,
        per_class: int = 1,
        speed: float = 1.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("proxy_nca", scale=scale)
        self.scale = scale
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return proxy_nca(r, scale=self.scale, weights=weights)
