"""ProxyGML. Zhu, Yang, Deng, Liu: Fewer is More: A Deep Graph Metric Learning Perspective Using Fewer Proxies.
NeurIPS 2020.

Connects each sample to its own proxies and a few nearest others, and classifies it by their votes.

    k = max(⌈r·C·K⌉, K + 1), at most C·K                                                                 (1)
    Ψ_i = the k proxies j with the largest s_ij + 1000·[c_j = c_i]                                       (2)
    Z_ic = Σ_{j∈Ψ_i, c_j=c} s_ij;   M_i = the classes c with a proxy in Ψ_i                              (3)
    L_s = 1/|X'| Σ_{i∈X'} −log( e^{λ Z_i,c_i} / Σ_{c∈M_i} e^{λ Z_ic} )                                   (4)
    Z_jc = Σ_{l: c_l=c} w_j·w_l                                                                          (5)
    L_p = 1/|J| Σ_{j∈J} −log( e^{Z_j,c_j} / Σ_c e^{Z_jc} )                                               (6)
    L = L_s + μ L_p                                                                                      (7)

    Equation numbers are ours.

Symbols
    s_ij cosine similarity of sample i and proxy j; c_i, c_j their classes; w_j proxy j, projected; C classes, K proxies
    per class (`per_class`); X' the samples of the batch whose class has a proxy (else L_s = 0); r fraction of
    the proxies a sample is connected to (`ratio`); λ scale (`scale`); μ weight of the proxies' term (`weight`). Eq. 5
    includes l = j. J the proxies of Eq. 6 (`over`): all ("all"); or the K proxies of the class of each sample, counted
    as often as the class is in the batch ("batch"); "auto": "all" if C·K·C ≤ 2²⁶, else "batch".
    With weights ω [B, C·K], s_ij in Eq. 3 becomes ω_ij s_ij; Eq. 2 takes s_ij.

Settings
    r = 0.05, λ = 1, μ = 0.3, K = 12, proxies' learning rate × 300 (0.03; trunk 1e-4) for CUB and Cars;
    K = 1, μ = 0, × 3,000 for SOP. Adam with ε = 0.01, weight decay 1e-4, batch 32, 50 epochs, × 0.1 at 20 and 40.

Departures
    k is at least K + 1, so that Ψ_i holds all proxies of the sample's class and at least one other, however few
    classes there are; the authors' code takes ⌈r·C·K⌉.
    A class is not in M_i if none of its proxies is in Ψ_i; the authors' code tests Z_ic = 0. Their 1e-8 and 1e-20
    inside the softmax and its logarithm are left out.
    `over` is ours: with very many classes Eq. 6 over all proxies needs C·K × C numbers.
    The scale is in the authors' code, where it is 1.

Relations
    With r = 1, K = 1, μ = 0 this is `norm_softmax` with T = 1/λ.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.losses.class_similarity import cross_entropy, positive_exponent
from nearkin.methods.proxies import Initial, Proxies
from nearkin.methods.relation import Relation, weighted
from nearkin.space import full_precision

Over = Literal["auto", "all", "batch"]


def connected(r: Relation, *, ratio: float) -> Tensor:
    """Mask [B, R] of the proxies each sample is connected to: Ψ of Eq. 2."""
    R = r.s.shape[1]
    k = min(max(math.ceil(ratio * R), max(r.per_class, 1) + 1), R)  # Eq. 1
    known = r.pos | r.neg
    order = torch.where(known, r.s.detach() + 1000 * r.pos, -torch.inf)
    return torch.zeros_like(known).scatter_(1, order.topk(k, dim=1).indices, True) & known  # Eq. 2


def votes(r: Relation, *, ratio: float, weights: Tensor | None = None) -> Relation:
    """The relation with one column per class: Z and M of Eq. 3."""
    K = max(r.per_class, 1)
    psi = connected(r, ratio=ratio)
    Z = torch.where(psi, weighted(r.s, weights), 0).reshape(len(psi), -1, K).sum(-1)
    M = psi.reshape(len(psi), -1, K).any(-1)
    pos, neg = r.pos[:, ::K] & M, r.neg[:, ::K] & M
    return r._replace(s=Z, pos=pos, neg=neg, columns=r.columns[::K], per_class=1)  # Eq. 3


def proxy_term(r: Relation, *, over: Over) -> Tensor:
    """The term of the proxies: Eq. 6."""
    K, v, labels = max(r.per_class, 1), r.vectors, r.columns
    sums, columns = v.reshape(-1, K, v.shape[1]).sum(1), labels[::K]
    if over == "batch" or (over == "auto" and len(v) * len(sums) > 2**26):
        first = r.pos.to(torch.uint8).argmax(1)  # proxies are grouped by class: the first of them, then K − 1 more
        first = first - first % K
        v = v[(first[:, None] + torch.arange(K, device=first.device)).flatten()]
        labels = r.rows.repeat_interleave(K)
    same = labels[:, None] == columns
    with full_precision(v):
        q = Relation(v @ sums.T, same, ~same, labels, columns, v, sums, 1)  # Eq. 5
    return cross_entropy(positive_exponent(q.s, q), q.s, q)  # Eq. 6


class ProxyGML(Loss):
    """ProxyGML with `per_class` proxies per class."""

    proxies: Proxies

    def __init__(
        self,
        *,
        classes: int,
        dim: int,
        ratio: float = 0.05,
        scale: float = 1.0,
        weight: float = 0.3,
        over: Over = "auto",
        per_class: int = 12,
        speed: float = 300.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        above_zero("proxy_gml", ratio=ratio, scale=scale)
        zero_or_more("proxy_gml", weight=weight)
        self.ratio, self.scale, self.weight = ratio, scale, weight
        self.over: Over = over
        self.proxies = Proxies(classes, dim, per_class=per_class, speed=speed, initial=initial, sample_rate=sample_rate)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        q = votes(r, ratio=self.ratio, weights=weights)
        z = self.scale * q.s
        classified = cross_entropy(positive_exponent(z, q), z, q)  # Eq. 4
        return classified + self.weight * proxy_term(r, over=self.over) if self.weight else classified  # Eq. 7
