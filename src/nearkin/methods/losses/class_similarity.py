"""Shared by losses with K proxies per class: class similarities from proxies, and the regulariser of a class's proxies.

Equation numbers as in Saeki, Kawahara, Aman: Multi Proxy Anchor Family Loss for Several Types of Gradients. 2023.

    S(x, c) = Σ_k p_k s(x, w_ck),   p_k = exp(s(x, w_ck)/γ) / Σ_l exp(s(x, w_cl)/γ)                      soft   (1)
    S(x, c) = max_k s(x, w_ck)                                                                           max    (§3.2)
    S(x, c) = 1/K Σ_k s(x, w_ck)                                                                         mean   (§3.2)
    R = 1/(C·K·(K − 1)) Σ_c Σ_{t<s} ‖w_cs − w_ct‖                                                               (3)

On the unit sphere ‖w_cs − w_ct‖ = √(2 − 2 w_cs·w_ct), as Eq. 3 prints it. At K = 1 S is s and R is 0.

At Stanford-Online-Products scale [B, C·K] and [C·K, D] take most of the memory: Eq. 1 keeps only s for its gradient,
Eq. 3 is C blocks of K × K.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin.methods.column_blocks import columnwise
from nearkin.methods.relation import (
    Node,
    Relation,
    at_own_classes,
    column_count,
    exists,
    gram,
    largest,
    log_sum_exp,
    mean_terms,
    over_columns,
    total,
    total_of,
)

Similarity = Literal["soft", "max", "mean"]


class _SoftMaximum(Node):
    """Eq. 1 over the last axis. The gradient p (1 + (s − S)/γ) recomputes p instead of keeping it."""

    @staticmethod
    def forward(s: Tensor, gamma: float) -> Tensor:
        e, total = _exponentials(s, gamma)
        return e.mul_(s).sum(-1) / total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        s, ctx.gamma = inputs
        ctx.save_for_backward(s)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (s,) = ctx.saved_tensors
        e, total = _exponentials(s, ctx.gamma)
        S = (e * s).sum(-1) / total
        return (s - S.unsqueeze(-1)).div_(ctx.gamma).add_(1).mul_(e).mul_((gradient / total).unsqueeze(-1)), None


def _exponentials(s: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """e^{(s − max s)/γ} and its sum over the last axis: torch.softmax takes three times as long on an axis so short."""
    e = (s - s.amax(-1, keepdim=True).detach()).div_(gamma).exp_()
    return e, e.sum(-1)


def by_class(r: Relation, *, similarity: Similarity = "max", gamma: float = 0.1) -> Relation:
    """The relation with one column per class in place of its K proxies; `vectors` stay the proxies."""
    K = r.per_class
    if K <= 1:
        return r
    s = r.s.reshape(len(r.s), -1, K)
    if similarity == "soft":
        S: Tensor = columnwise(lambda s: _SoftMaximum.apply(s, gamma), s, shape=s.shape[:2])  # type: ignore[no-untyped-call]  # Eq. 1
    else:
        S = s.amax(-1) if similarity == "max" else s.mean(-1)
    # The masks are copied: a strided view would keep all of [B, C·K] until the gradient is taken.
    pos, neg = r.pos[:, ::K].contiguous(), r.neg[:, ::K].contiguous()
    return r._replace(s=S, pos=pos, neg=neg, columns=r.columns[::K], per_class=1, whole=r.whole // K)


def class_weights(r: Relation, weights: Tensor | None) -> Tensor | None:
    """Weights [B, C] of classes: the mean of the weights [B, C·K] of their proxies."""
    if weights is None or r.per_class <= 1:
        return weights
    return weights.reshape(len(weights), -1, r.per_class).mean(-1)


def regulariser(r: Relation, *, tau: float) -> Tensor:
    """τ times Eq. 3; zero gradient where two proxies coincide.

    Call it before `by_class`: its gradient is then computed after that of Eq. 1 has freed its memory.
    """
    K = r.per_class
    if K <= 1 or tau == 0:
        return r.x.new_zeros(())
    G = gram(r.vectors.reshape(-1, K, r.vectors.shape[1]))
    n = G.diagonal(dim1=1, dim2=2)
    d = (n[:, :, None] + n[:, None, :] - 2 * G).clamp_min(1e-12).sqrt()
    pairs = torch.ones(K, K, dtype=torch.bool, device=G.device).triu(1)
    return tau * over_columns(r, total_of(d, pairs)) / (column_count(r) * (K - 1))  # Eq. 3


def of_own_class(q: Relation, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """S(x, c_x) [B] and its weight, from one column per class; 0 if c_x has none."""
    own, of_own = at_own_classes(q, weights)
    return total(own.s, own.pos, by="row"), None if of_own is None else total(of_own, own.pos, by="row")


def positive_exponent(z: Tensor, r: Relation) -> Tensor:
    """The largest exponent among the positives of each sample [B]; 0 if it has none."""
    own, of_own = at_own_classes(r, z)
    assert of_own is not None
    if r.per_class == 1:
        return total(of_own, own.pos, by="row")
    top = largest(of_own, own.pos, by="row")
    return torch.where(top == -torch.inf, 0, top)


def cross_entropy(z_positive: Tensor, z: Tensor, r: Relation) -> Tensor:
    """−log(e^z_positive / (e^z_positive + Σ_neg e^z)), averaged over samples with a positive."""
    rest = log_sum_exp(z, r.neg, by="row")
    return mean_terms(r, F.softplus(rest - z_positive, threshold=50), exists(at_own_classes(r, None)[0].pos, by="row"))
