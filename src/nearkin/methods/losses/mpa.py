"""MPA, MPA-DW, MPA-AP. Saeki, Kawahara, Aman: Multi Proxy Anchor Family Loss for Several Types of Gradients. 2023.

Proxy-Anchor with K proxies per class: `mpa` sums over classes, `mpa_dw` and `mpa_ap` over samples.

    S(x, c) = Σ_k p_k s(x, w_ck),   p_k = exp(s(x, w_ck)/γ) / Σ_l exp(s(x, w_cl)/γ)                                  (1)
    R = 1/(C·K·(K − 1)) Σ_c Σ_{t<s} ‖w_cs − w_ct‖,   on the unit sphere √(2 − 2 w_cs·w_ct)                           (3)
    L = L_Sim + τ R                                                                                         (7, 13, 17)

    mpa     L_Sim = 1/|C⁺| Σ_{c∈C⁺} log(1 + Σ_{x∈X_c⁺} exp(−α(S(x, c) − δ)))
                  + 1/|C⁻| Σ_{c∈C⁻} log(1 + Σ_{x∈X_c⁻} exp( α(S(x, c) + δ)))                                         (6)
    ∂L_Sim/∂S(x, c) = −α/|C⁺| · l⁺(x, c)/(1 + Σ_{x'∈X_c⁺} l⁺(x', c)),   x ∈ X_c⁺, l⁺ = exp(−α(S − δ))
                       α/|C⁻| · l⁻(x, c)/(1 + Σ_{x'∈X_c⁻} l⁻(x', c)),   x ∈ X_c⁻, l⁻ = exp( α(S + δ))                (8)

    mpa_dw  L_Sim = 1/N Σ_i ( log(1 + exp(−α(S(x_i, c_i) − δ))) + log(1 + Σ_{c≠c_i} exp(α(S(x_i, c) + δ))) )       (12)
    ∂L_Sim/∂S(x_i, c') = −α/N · 1/(1 + exp(α(S(x_i, c_i) − δ))),   c' = c_i
                          α/N · 1/(exp(−α(S(x_i, c') + δ)) + Σ_{c≠c_i} exp(α(S(x_i, c) − S(x_i, c')))),   c' ≠ c_i (14)

    mpa_ap  S'(x_i, c) = δ − S(x_i, c) if c = c_i, else S(x_i, c) + δ                                               (15)
            L_Sim = 1/N Σ_i log(1 + Σ_c exp(α S'(x_i, c)))                                                          (16)
    ∂L_Sim/∂S'(x_i, c') = α/N · 1/(exp(−α S'(x_i, c')) + Σ_c exp(α(S'(x_i, c) − S'(x_i, c'))))                      (18)

Symbols
    s cosine similarity; w_ck proxy k of class c; C classes, K proxies per class (`per_class`); N samples in the batch,
    x_i of class c_i; X_c⁺, X_c⁻ the batch's samples of class c and of other classes; C⁺, C⁻ the classes with a
    positive, and with a negative, in the batch (an empty sum is 0); α scale (`alpha`); δ margin (`delta`); γ smoothness
    (`gamma`); τ weight of the regulariser (`tau`).
    `similarity`: S by Eq. 1 ("soft"), or the maximum ("max") or mean ("mean") over k of s(x, w_ck).
    With weights ω [B, C·K], every exponent is multiplied by ω_xc, the mean over the K entries of class c.
    A sample whose class has no proxy has no positive term in Eq. 12 and 16; it counts in N.

Settings
    γ = 0.1, τ = 0.2, δ = 0.1, K = 10 (CUB, Cars), 2 (SOP), learning rate 1e-2 for proxies, 1e-4 for the trunk (× 100),
    AdamW, halved every 20 epochs, batch 180 (CUB), 64 (Cars), 32 (SOP), 60 epochs (SOP 100), random batches, Inception
    with batch normalisation, GeM pooling with p = 3, 512-d. CUB is trained on classes 101-200 (`halves="swapped"`).

Departures
    α is not stated: 32 as in Proxy-Anchor.
    C⁻ is not defined in the text: here the classes with a negative in the batch, which is all of them unless every
    sample is of one class.
    Errata: for Eq. 14 the paper prints S_DR = S(x_i, c') − S(x_i, c'), which is 0; it is S(x_i, c) − S(x_i, c').
    Eq. 5 is misprinted too: see `soft_triple`. Eq. 18 is right as printed.

Relations
    At K = 1 `mpa` is `proxy_anchor`, except for C⁻; S is that of `soft_triple`, which compares classes only with each
    other, without the 1.
"""

from typing import Protocol

import torch
from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import Similarity, by_class, class_weights, regulariser
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import (
    Relation,
    at_own_classes,
    exists,
    log1p_sum_exp,
    over_columns,
    sum_of_columns,
    sum_terms,
    total_of,
    weighted,
)


def mpa(q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 6, with one column per class."""
    own, of_own = at_own_classes(q, weights)
    pull = log1p_sum_exp(weighted(-alpha * (own.s - delta), of_own), own.pos, by="column")
    push = log1p_sum_exp(weighted(alpha * (q.s + delta), weights), q.neg, by="column")
    with_positive = over_columns(q, total_of(exists(own.pos, by="column")))
    with_negative = over_columns(q, total_of(exists(q.neg, by="column")))
    pull = sum_of_columns(q, pull) / with_positive.clamp_min(1)
    return pull + sum_of_columns(q, push) / with_negative.clamp_min(1)  # Eq. 6


def mpa_dw(q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 12, with one column per class."""
    own, of_own = at_own_classes(q, weights)
    pull = log1p_sum_exp(weighted(-alpha * (own.s - delta), of_own), own.pos, by="row")
    push = log1p_sum_exp(weighted(alpha * (q.s + delta), weights), q.neg, by="row")
    return sum_terms(q, pull + push) / len(q.rows)  # Eq. 12


def mpa_ap(q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 16, with one column per class."""
    S = torch.where(q.pos, delta - q.s, q.s + delta)  # Eq. 15
    return sum_terms(q, log1p_sum_exp(weighted(alpha * S, weights), q.pos | q.neg, by="row")) / len(q.rows)  # Eq. 16


class Similarities(Protocol):
    """L_Sim of one member of the family."""

    __name__: str

    def __call__(self, q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor: ...


def member(class_name: str, l_sim: Similarities, sentence: str) -> type[Loss]:
    """The loss class of a member of the family. Members differ in L_Sim alone."""

    class Member(Loss):
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
            sample_rate: float = 1.0,
        ) -> None:
            super().__init__()
            above_zero(l_sim.__name__, alpha=alpha, gamma=gamma)
            zero_or_more(l_sim.__name__, tau=tau)
            self.alpha, self.delta, self.gamma, self.tau = alpha, delta, gamma, tau
            self.similarity: Similarity = similarity
            self.proxies = Proxies(
                classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate
            )

        def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
            pull = regulariser(r, tau=self.tau)  # Eq. 3
            q = by_class(r, similarity=self.similarity, gamma=self.gamma)  # Eq. 1
            weights = class_weights(r, weights)
            return l_sim(q, alpha=self.alpha, delta=self.delta, weights=weights) + pull  # Eq. 7, 13, 17

    Member.__name__ = Member.__qualname__ = class_name
    Member.__doc__ = sentence
    return Member


MPA = member("MPA", mpa, "Proxy-Anchor with K proxies per class; a sample is near a class if it is near one of them.")
MPADW = member(
    "MPADW", mpa_dw, "MPA summed over samples instead of classes: a sample's gradient depends on no other sample."
)
MPAAP = member("MPAAP", mpa_ap, "MPA-DW with positive and negatives in one sum, so that they are weighed together.")
