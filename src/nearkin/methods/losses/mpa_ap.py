"""MPA-AP. Saeki, Kawahara, Aman: Multi Proxy Anchor Family Loss for Several Types of Gradients. 2023.

MPA-DW with the sample's own class and all others in one sum, so that they are weighed against one another.

    S(x, c) = Σ_k p_k s(x, w_ck),   p_k = exp(s(x, w_ck)/γ) / Σ_l exp(s(x, w_cl)/γ)                                  (1)
    R = 1/(C·K·(K − 1)) Σ_c Σ_{t<s} ‖w_cs − w_ct‖,   on the unit sphere √(2 − 2 w_cs·w_ct)                           (3)
    S'(x_i, c) = δ − S(x_i, c) if c = c_i, else S(x_i, c) + δ                                                       (15)
    L_Sim = 1/N Σ_i log(1 + Σ_c exp(α S'(x_i, c)))                                                                  (16)
    L = L_Sim + τ R                                                                                                 (17)
    ∂L_Sim/∂S'(x_i, c') = α/N · 1/(exp(−α S'(x_i, c')) + Σ_c exp(α(S'(x_i, c) − S'(x_i, c'))))                      (18)

Symbols
    s cosine similarity; w_ck proxy k of class c; C classes, K proxies a class (`per_class`); N samples in the batch,
    x_i of class c_i; α scale (`alpha`); δ margin (`delta`); γ smoothness (`gamma`); τ the regulariser's weight (`tau`).
    `similarity`: S by Eq. 1 ("soft"), the maximum ("max") or the mean ("mean") over k of s(x, w_ck).
    With weights ω [B, C·K], ω_xc the mean over the class's K entries: every exponent is multiplied by ω_xc.
    A sample whose class has no proxy has only the others in its sum; it counts in N.

Settings
    As `mpa`: γ = 0.1, τ = 0.2, δ = 0.1, K = 10 (CUB, Cars), 2 (SOP), proxies' learning rate × 100, GeM pooling.

Departures
    α is not stated: 32 as in Proxy-Anchor.
    Errata of the paper: Eq. 5 (see `soft_triple`) and Eq. 14 (see `mpa_dw`); Eq. 18 is right as printed.

Relations
    `mpa_dw` has a sum for either side; `soft_triple` compares classes only with one another, without the 1.
"""

import torch
from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import Similarity, by_class, class_weights, regulariser
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, log1p_sum_exp, total_of, weighted


def mpa_ap(q: Relation, *, alpha: float, delta: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 16, with a column for each class."""
    S = torch.where(q.pos, delta - q.s, q.s + delta)  # Eq. 15
    return total_of(log1p_sum_exp(weighted(alpha * S, weights), q.pos | q.neg, by="row")) / len(q.rows)  # Eq. 16


class MPAAP(Loss):
    """MPA-AP with `per_class` proxies a class."""

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
        above_zero("mpa_ap", alpha=alpha, gamma=gamma)
        zero_or_more("mpa_ap", tau=tau)
        self.alpha, self.delta, self.gamma, self.tau = alpha, delta, gamma, tau
        self.similarity: Similarity = similarity
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        pull = regulariser(r, tau=self.tau)  # Eq. 3
        q = by_class(r, similarity=self.similarity, gamma=self.gamma)  # Eq. 1
        weights = class_weights(r, weights)
        return mpa_ap(q, alpha=self.alpha, delta=self.delta, weights=weights) + pull  # Eq. 17
