"""Triplet. Schroff, Kalenichenko, Philbin: FaceNet: A Unified Embedding for Face Recognition. CVPR 2015.

A sample should be nearer to its positives than to all negatives, by a margin.

    L = 1/n Σ_{(i,j,k)∈T} (u_ij − u_ik + ε)_+                                                     (PROFS, Eq. 3.2)

    all        T = {(i, j, k) : j ∈ P_i, k ∈ N_i}
    semi_hard  T = {(i, j, k) : j ∈ P_i, k ∈ N_i, u_ij < u_ik < u_ij + ε}
    hard       T pairs, in every row i, the q-th farthest of P_i with the q-th nearest of N_i, q = 1 … min(|P_i|, |N_i|)

Symbols
    P_i, N_i references of the class of sample i and of other classes; u squared Euclidean distance, or with
    `squared=False` distance; ε margin (`margin`); T by `mining`; n the number of non-zero terms
    (`over="nonzero"`) or |T| (`over="all"`), at least 1. Rows without positives or without negatives have no triplet.
    Weights multiply u, before triplets are chosen.

Settings
    ε = 0.2, semi-hard, squared, on the unit sphere (FaceNet).
    CCP: all triplets, unsquared, over the non-zero ones, in the ball: ε = CUB .0961, Cars .1190, SOP and In-Shop .0451.
    PROFS: one negative per positive, semi-hard or the hardest, squared.

Departures
    PROFS takes one semi-hard negative per positive without saying which; here all of them count.
    "As many hardest negatives as positives" (PROFS, §5.3) does not say how they are paired: here hardest with hardest.
    Triplets are never listed. A positive is in k_j active triplets and a negative in m_k, which sorting the row gives;
    the sum is Σ k_j (u_ij + ε) − Σ m_k u_ik, and so are its gradients: O(B R log R) for all B·P·N triplets.

Relations
    `margin` splits the comparison in two by a boundary; `lifted` takes the soft maximum over the negatives of a pair.
"""

from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, squared_distance, total_of, weighted
from nearkin.methods.relation import distance as euclidean

Mining = Literal["all", "semi_hard", "hard"]
Over = Literal["nonzero", "all"]


def memberships(r: Relation, u: Tensor, *, margin: float, semi_hard: bool) -> tuple[Tensor, Tensor]:
    """The number of non-zero triplets of each positive and of each negative, [B, R] each; 0 for other pairs."""
    u = u.detach().contiguous()  # for searchsorted, also if the sides of the relation are swapped
    positives = torch.where(r.pos, u, torch.inf).sort(1).values.contiguous()
    negatives = torch.where(r.neg, u, torch.inf).sort(1).values.contiguous()
    k = torch.searchsorted(negatives, u + margin)  # u_ik < u_ij + ε
    m = count(r.pos, by="row")[:, None] - torch.searchsorted(positives + margin, u, right=True)
    if semi_hard:  # without those with u_ik ≤ u_ij
        k = k - torch.searchsorted(negatives, u, right=True)
        m = torch.searchsorted(positives, u) - torch.searchsorted(positives + margin, u, right=True)
    return torch.where(r.pos, k.to(u.dtype), 0), torch.where(r.neg, m.to(u.dtype), 0)


def triplet_sum(r: Relation, u: Tensor, *, margin: float, semi_hard: bool) -> tuple[Tensor, Tensor]:
    """The sum of Eq. 3.2 over all or the semi-hard triplets, and the number of non-zero terms."""
    k, m = memberships(r, u, margin=margin, semi_hard=semi_hard)
    active = total_of(k)
    return total_of((k - m) * u) + margin * active, active


def hard_sum(r: Relation, u: Tensor, *, margin: float) -> tuple[Tensor, Tensor]:
    """The sum of Eq. 3.2 with hardest positives paired with hardest negatives, and the number of non-zero terms."""
    farthest = torch.where(r.pos, u, -torch.inf).sort(1, descending=True).values
    nearest = torch.where(r.neg, u, torch.inf).sort(1).values
    terms = (farthest - nearest + margin).clamp_min(0)  # −∞ becomes 0 where either side has run out
    return total_of(terms), total_of(terms > 0)


def triplet(
    r: Relation, *, margin: float, squared: bool, mining: Mining, over: Over, weights: Tensor | None = None
) -> Tensor:
    """Eq. 3.2."""
    u = weighted(squared_distance(r) if squared else euclidean(r), weights)
    if mining == "hard":
        value, active = hard_sum(r, u, margin=margin)
    else:
        value, active = triplet_sum(r, u, margin=margin, semi_hard=mining == "semi_hard")
    n = active
    if over == "all" and mining != "semi_hard":  # semi-hard triplets are never zero
        P, N = count(r.pos, by="row"), count(r.neg, by="row")
        n = total_of(torch.minimum(P, N) if mining == "hard" else P * N)
    return value / n.clamp_min(1)  # Eq. 3.2


class Triplet(Loss):
    """The triplet loss over all, semi-hard or hard triplets."""

    images_per_class = 4

    def __init__(
        self, *, margin: float = 0.2, squared: bool = True, mining: Mining = "all", over: Over = "nonzero"
    ) -> None:
        super().__init__()
        zero_or_more("triplet", margin=margin)
        self.margin, self.squared = margin, squared
        self.mining: Mining = mining
        self.over: Over = over

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return triplet(r, margin=self.margin, squared=self.squared, mining=self.mining, over=self.over, weights=weights)
