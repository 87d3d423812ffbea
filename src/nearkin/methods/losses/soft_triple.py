"""SoftTriple. Qian, Shang, Sun, Hu, Li, Jin: SoftTriple Loss: Deep Metric Learning Without Triplet Sampling. ICCV 2019.

A softmax over classes with K centres each, of which the nearest counts most, and a regulariser that merges centres a
class does not need.

    S(x, c) = Σ_k p_k s(x, w_ck),   p_k = exp(s(x, w_ck)/γ) / Σ_l exp(s(x, w_cl)/γ)                                  (1)
    L_Sim(x) = −log( exp(λ(S(x, c_x) − δ)) / (exp(λ(S(x, c_x) − δ)) + Σ_{c≠c_x} exp(λ S(x, c))) )                    (2)
    R = 1/(C·K·(K − 1)) Σ_c Σ_{t<s} ‖w_cs − w_ct‖,   on the unit sphere √(2 − 2 w_cs·w_ct)                           (3)
    L(X) = 1/|X| Σ_{x∈X} L_Sim(x) + τ R                                                                              (4)
    ∂L_Sim(x)/∂S(x, c) = −λ/(1 + 1/Σ_{c'≠c_x} exp(λ(S(x, c') − S(x, c_x) + δ))),   c = c_x
                          λ/(exp(λ(S(x, c_x) − S(x, c) − δ)) + Σ_{c'≠c_x} exp(λ(S(x, c') − S(x, c)))),   c ≠ c_x     (5)

    Numbers as in Saeki et al. (`mpa`), who restate it.

Symbols
    s cosine similarity; w_ck centre (proxy) k of class c; c_x the class of x; C classes, K proxies per class
    (`per_class`); λ scale (`scale`); δ margin (`delta`); γ smoothness (`gamma`); τ weight of the regulariser (`tau`).
    `similarity`: S by Eq. 1 ("soft"), the maximum ("max") or the mean ("mean") over k of s(x, w_ck).
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: λ(S − δ) becomes ω λ(S − δ), λ S becomes ω λ S.

Settings
    λ = 20, δ = 0.01, γ = 0.1, τ = 0.2, K = 10 (CUB, Cars), 2 (SOP), proxies' learning rate × 100 (1e-2; trunk 1e-4),
    Adam with ε = 0.01, weight decay 1e-4, batch 32, 50 epochs, × 0.1 at 20 and 40, Inception with batch normalisation.
    As CCP's baseline (λ, γ, τ, δ): CUB and In-Shop (20, .1, .2, .01), Cars (17.69, 19.18, .0669, .3588),
    SOP (100, 47.9, .2, .3145), batch 32.

Departures
    Eq. 4 as printed by Saeki et al. sums over X; SoftTriple and its code take the mean.
    Errata of Eq. 5 as printed by Saeki et al.: both signs are reversed; for c = c_x the terms
    exp(λ(S(x, c_x) − S(x, c') − δ)) are summed, where 1 over the sum of their inverses belongs; for c ≠ c_x the last
    sum has its arguments swapped. The form above follows from Eq. 2. (Their Eq. 14 is misprinted too: see `mpa`.)
    A sample whose class has no proxy is left out of the mean.
    The authors' code has √(2 + 1e-5 − 2 w·w); here the distance is floored at 1e-6, with zero gradient below.

Relations
    At K = 1 and δ = 0 `norm_softmax` with temperature 1/λ; at K = 1 `cosface`. The `mpa` family puts the same S into
    Proxy-Anchor's form. pytorch-metric-learning's SoftTripleLoss is this without R.
"""

from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import (
    Similarity,
    by_class,
    class_weights,
    cross_entropy,
    of_own_class,
    regulariser,
)
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, weighted


def soft_triple(q: Relation, *, scale: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """The mean of Eq. 2, with one column per class."""
    S, weight = of_own_class(q, weights)
    with_margin = weighted(scale * (S - delta), weight)
    return cross_entropy(with_margin, weighted(scale * q.s, weights), q)  # Eq. 2


class SoftTriple(Loss):
    """SoftTriple with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        scale: float = 20.0,
        delta: float = 0.01,
        gamma: float = 0.1,
        tau: float = 0.2,
        similarity: Similarity = "soft",
        per_class: int = 10,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("soft_triple", scale=scale, gamma=gamma)
        zero_or_more("soft_triple", tau=tau)
        self.scale, self.delta, self.gamma, self.tau = scale, delta, gamma, tau
        self.similarity: Similarity = similarity
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        pull = regulariser(r, tau=self.tau)  # Eq. 3
        q = by_class(r, similarity=self.similarity, gamma=self.gamma)  # Eq. 1
        weights = class_weights(r, weights)
        return soft_triple(q, scale=self.scale, delta=self.delta, weights=weights) + pull  # Eq. 4
