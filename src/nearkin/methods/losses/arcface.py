"""ArcFace. Deng, Guo, Xue, Zafeiriou: ArcFace: Additive Angular Margin Loss for Deep Face Recognition. CVPR 2019;
with sub-centres, Deng, Guo, Liu, Gong, Zafeiriou: Sub-center ArcFace. ECCV 2020.

A softmax over cosines that adds a margin to the angle between a sample and its own class.

    S(x, c) = max_k s(x, w_ck)                                                                           (1)
    φ(S) = cos(arccos S + m) if S ≥ −cos m, else S − m sin m                                             (2)
    L(X) = 1/|X'| Σ_{x∈X'} −log( e^{λ φ(S(x, c_x))} / (e^{λ φ(S(x, c_x))} + Σ_{c≠c_x} e^{λ S(x, c)}) )   (3)

    Equation numbers are ours.

Symbols
    s cosine similarity; w_ck sub-centre (proxy) k of class c, K of them (`per_class`); c_x the class of x; X' the
    samples of the batch X whose class has a proxy (else L = 0); λ scale (`scale`); m margin in radians (`margin`).
    S ≥ −cos m is arccos S + m ≤ π: beyond that φ is linear, so that it never rises again.
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.

Settings
    λ = 64, m = 0.5, K = 1; with sub-centres K = 3 (faces), as commonly used.

Departures
    cos(arccos S + m) is S cos m − √(1 − S²) sin m with 1 − S² floored at 1e-12, for a finite gradient at S = ±1.
    φ beyond π is from the authors' code; the paper does not define it. S is a cosine only in the space `cosine`.
    The second paper's dropping of outliers and non-dominant sub-centres half-way through training is left out.

Relations
    `cosface` subtracts the margin from the cosine; at m = 0 both are `norm_softmax` with T = 1/λ.
"""

import math

import torch
from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import by_class, class_weights, cross_entropy, of_own_class
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, weighted


def widen_angle(S: Tensor, m: float) -> Tensor:
    """The cosine of the angle plus m: Eq. 2."""
    sine = (1 - S.square()).clamp_min(1e-12).sqrt()
    return torch.where(S + math.cos(m) >= 0, S * math.cos(m) - sine * math.sin(m), S - m * math.sin(m))


def arcface(q: Relation, *, scale: float, margin: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 3, with one column per class."""
    S, weight = of_own_class(q, weights)
    with_margin = weighted(scale * widen_angle(S, margin), weight)  # Eq. 2
    return cross_entropy(with_margin, weighted(scale * q.s, weights), q)  # Eq. 3


class ArcFace(Loss):
    """ArcFace with `per_class` sub-centres per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("arcface", scale=scale)
        zero_or_more("arcface", margin=margin)
        self.scale, self.margin = scale, margin
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        q = by_class(r, similarity="max")  # Eq. 1
        return arcface(q, scale=self.scale, margin=self.margin, weights=class_weights(r, weights))
