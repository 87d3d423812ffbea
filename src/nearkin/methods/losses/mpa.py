"""MPA. Saeki, Kawahara, Aman: Multi Proxy Anchor Family Loss for Several Types of Gradients. 2023.

Proxy-Anchor with K proxies a class: each class is an anchor, near a sample where one of its proxies is.

    S(x, c) = Σ_k p_k s(x, w_ck),   p_k = exp(s(x, w_ck)/γ) / Σ_l exp(s(x, w_cl)/γ)                                  (1)
    R = 1/(C·K·(K − 1)) Σ_c Σ_{t<s} ‖w_cs − w_ct‖,   on the unit sphere √(2 − 2 w_cs·w_ct)                           (3)
    L_Sim = 1/|C⁺| Σ_{c∈C⁺} log(1 + Σ_{x∈X_c⁺} exp(−α(S(x, c) − δ)))
          + 1/|C⁻| Σ_{c∈C⁻} log(1 + Σ_{x∈X_c⁻} exp( α(S(x, c) + δ)))                                                 (6)
    L = L_Sim + τ R                                                                                                  (7)
    ∂L_Sim/∂S(x, c) = −α/|C⁺| · l⁺(x, c)/(1 + Σ_{x'∈X_c⁺} l⁺(x', c)),   x ∈ X_c⁺, l⁺ = exp(−α(S − δ))
                       α/|C⁻| · l⁻(x, c)/(1 + Σ_{x'∈X_c⁻} l⁻(x', c)),   x ∈ X_c⁻, l⁻ = exp( α(S + δ))                (8)

Symbols
    s cosine similarity; w_ck proxy k of class c; C classes, K proxies a class (`per_class`); X_c⁺, X_c⁻ the batch's
    samples of class c and of others; C⁺, C⁻ the classes with a positive, and with a negative, in the batch (a sum over
    none is 0); α scale (`alpha`); δ margin (`delta`); γ smoothness (`gamma`); τ weight of the regulariser (`tau`).
    `similarity`: S by Eq. 1 ("soft"), the maximum ("max") or the mean ("mean") over k of s(x, w_ck).
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.

Settings
    γ = 0.1, τ = 0.2, δ = 0.1, K = 10 (CUB, Cars), 2 (SOP), proxies' learning rate 1e-2, trunk 1e-4 (× 100), AdamW,
    halved every 20 epochs, batch 180 (CUB), 64 (Cars), 32 (SOP), 60 epochs (SOP 100), drawn at random, Inception with
    batch normalisation, GeM pooling with p = 3, 512-d. CUB is trained on classes 101-200 (`halves="swapped"`).

Departures
    α is not stated: 32 as in Proxy-Anchor.
    C⁻ is not defined in the text: the classes with a negative in the batch, which is all of them unless every sample is
    of one class.
    Errata of the paper: Eq. 5 (see `soft_triple`) and Eq. 14 (see `mpa_dw`).

Relations
    At K = 1 `proxy_anchor`, but for C⁻; with S the same as `soft_triple`. `mpa_dw` and `mpa_ap` sum by samples.
"""

from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import Similarity, by_class, class_weights, regulariser
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, count, log1p_sum_exp, total_of, weighted


def mpa(q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 6, with a column for each class."""
    pull = log1p_sum_exp(weighted(-alpha * (q.s - delta), weights), q.pos, by="column")
    push = log1p_sum_exp(weighted(alpha * (q.s + delta), weights), q.neg, by="column")
    with_positive = total_of(count(q.pos, by="column") > 0)
    with_negative = total_of(count(q.neg, by="column") > 0)
    return total_of(pull) / with_positive.clamp_min(1) + total_of(push) / with_negative.clamp_min(1)  # Eq. 6


class MPA(Loss):
    """MPA with `per_class` proxies a class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        alpha: float = 32.0,
        delta: float = 0.1,
        gamma: float = 0.1,
        tau: float = 0.2,
        similarity: Similarity = "soft",
        per_class: int = 10,
        speed: float = 100.0,
        initial: Initial = "normal",
    ) -> None:
        super().__init__()
        above_zero("mpa", alpha=alpha, gamma=gamma)
        zero_or_more("mpa", tau=tau)
        self.alpha, self.delta, self.gamma, self.tau = alpha, delta, gamma, tau
        self.similarity: Similarity = similarity
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        pull = regulariser(r, tau=self.tau)  # Eq. 3
        q = by_class(r, similarity=self.similarity, gamma=self.gamma)  # Eq. 1
        weights = class_weights(r, weights)
        return mpa(q, alpha=self.alpha, delta=self.delta, weights=weights) + pull  # Eq. 7
