"""Triplet. Schroff, Kalenichenko, Philbin: FaceNet: A Unified Embedding for Face Recognition. CVPR 2015.

A sample should be nearer to its positives than to all negatives, by a margin.

    L = 1/n Σ_{(i,j,k)∈T} (u_ij − u_ik + ε)_+                                                     (PROFS, Eq. 3.2)

    all        T = {(i, j, k) : j ∈ P_i, k ∈ N_i}
    semi_hard  T = {(i, j, k) : j ∈ P_i, k ∈ N_i, u_ij < u_ik < u_ij + ε}
    hard       T pairs, in every row i, the q-th farthest of P_i with the q-th nearest of N_i, q = 1 … min(|P_i|, |N_i|)

    swap       u_ik becomes min(u_ik, u_jk) in the sum                                                  (Balntas et al.)
    smooth     (z)_+ becomes log(1 + exp z)                                                             (Hermans et al.)

Symbols
    P_i, N_i references of the class of sample i and of other classes; u squared Euclidean distance, or with
    `squared=False` distance; ε margin (`margin`); T by `mining`; n the number of non-zero terms
    (`over="nonzero"`) or |T| (`over="all"`), at least 1. Rows without positives or without negatives have no triplet.
    u_jk is between the positive j and the negative k (`swap`); triplets are chosen before the swap.
    Weights multiply u, before triplets are chosen; u_jk has the weight of u_ik.

Settings
    ε = 0.2, semi-hard, squared, on the unit sphere (FaceNet).
    CCP: all triplets, unsquared, over the non-zero ones, in the ball: ε = CUB .0961, Cars .1190, SOP and In-Shop .0451.
    PROFS: one negative per positive, semi-hard or the hardest, squared.
    Balntas, Riba, Ponsa, Mikolajczyk (Learning Local Feature Descriptors with Triplets and Shallow Convolutional Neural
    Networks, BMVC 2016): swap, unsquared. Hermans, Beyer, Leibe (In Defense of the Triplet Loss for Person
    Re-Identification, 2017): smooth, ε = 0, unsquared.

Departures
    PROFS takes one semi-hard negative per positive without saying which; here all of them count.
    "As many hardest negatives as positives" (PROFS, §5.3) does not say how they are paired: here hardest with hardest.
    Triplets are never listed. A positive is in k_j active triplets and a negative in m_k, which sorting the row gives;
    the sum is Σ k_j (u_ij + ε) − Σ m_k u_ik, and so are its gradients: O(B R log R) for all B·P·N triplets.
    With swap or smooth the terms do not add up like this: R of them are computed for each positive pair, in blocks.

Relations
    `margin` splits the comparison in two by a boundary; `lifted` takes the soft maximum over the negatives of a pair.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nearkin.errors import zero_or_more
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, count, listed, squared_distance, sum_terms, total_of, weighted
from nearkin.methods.relation import distance as euclidean
from nearkin.space import full_precision

Mining = Literal["all", "semi_hard", "hard"]
Over = Literal["nonzero", "all"]

TERMS = 2**24
"""Terms that are held at once where they are listed; of larger batches they are computed again in the backward pass."""


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
    return sum_terms(r, (k - m) * u) + margin * sum_terms(r, k), active


def hard_sum(r: Relation, u: Tensor, *, margin: float) -> tuple[Tensor, Tensor]:
    """The sum of Eq. 3.2 with hardest positives paired with hardest negatives, and the number of non-zero terms."""
    farthest = torch.where(r.pos, u, -torch.inf).sort(1, descending=True).values
    nearest = torch.where(r.neg, u, torch.inf).sort(1).values
    terms = (farthest - nearest + margin).clamp_min(0)  # −∞ becomes 0 where either side has run out
    return sum_terms(r, terms), total_of(terms > 0)


def place_in_row(u: Tensor, mask: Tensor) -> Tensor:
    """The place of each entry among those of the mask in its row, 0 the smallest [B, R]; the others come last."""
    order = torch.where(mask, u, torch.inf).argsort(dim=1, stable=True)
    places = torch.arange(u.shape[1], device=u.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def listed_sum(
    r: Relation,
    u: Tensor,
    *,
    margin: float,
    squared: bool,
    mining: Mining,
    over: Over,
    swap: bool,
    smooth: bool,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The sum of Eq. 3.2 with swap or smooth, over triplets one by one, and the number n of terms."""
    across = between_references(r, squared=squared) if swap else None  # u_jk
    from_farthest, from_nearest = (place_in_row(-u, r.pos), place_in_row(u, r.neg)) if mining == "hard" else (u, u)
    i, j = listed(r.pos)

    def part(pairs: slice) -> tuple[Tensor, Tensor]:
        """The sum over k for some pairs of i and j, and the number of terms."""
        rows, columns = i[pairs], j[pairs]
        own, other = u[rows, columns, None], u.index_select(0, rows)
        triplets = r.neg[rows] & r.pos[rows, columns, None]
        if mining == "semi_hard":
            triplets = triplets & (own < other) & (other < own + margin)
        elif mining == "hard":
            triplets = triplets & (from_farthest[rows, columns, None] == from_nearest[rows])
        if across is not None:
            swapped = across.index_select(0, columns)
            other = torch.minimum(other, weighted(swapped, None if weights is None else weights[rows]))
        z = own - other + margin
        terms = F.softplus(z) if smooth else z.clamp_min(0)
        counted = triplets & (terms > 0) if over == "nonzero" else triplets
        return torch.where(triplets, terms, 0).sum(1), total_of(counted)

    step = max(1, TERMS // u.shape[1])
    parts = [slice(start, start + step) for start in range(0, max(len(i), 1), step)]
    if len(parts) == 1:
        sums = [part(parts[0])]
    else:
        sums = [checkpoint(part, pairs, use_reentrant=False, preserve_rng_state=False) for pairs in parts]
    by_row = u.new_zeros(len(u)).index_add(0, i, torch.cat([value for value, _ in sums]))
    return sum_terms(r, by_row), torch.stack([n for _, n in sums]).sum()


def between_references(r: Relation, *, squared: bool) -> Tensor:
    """The distances among the references [R, R]."""
    with full_precision(r.vectors):
        among = r._replace(s=r.space.pairwise(r.vectors, r.vectors), x=r.vectors)
    return squared_distance(among) if squared else euclidean(among)


def triplet(
    r: Relation,
    *,
    margin: float,
    squared: bool,
    mining: Mining,
    over: Over,
    swap: bool = False,
    smooth: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """Eq. 3.2."""
    u = weighted(squared_distance(r) if squared else euclidean(r), weights)
    if swap or smooth:
        value, n = listed_sum(
            r, u, margin=margin, squared=squared, mining=mining, over=over, swap=swap, smooth=smooth, weights=weights
        )
        return value / n.clamp_min(1)  # Eq. 3.2
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
    lists_triplets = True
    later_options = ("swap", "smooth")

    def __init__(
        self,
        *,
        margin: float = 0.2,
        squared: bool = True,
        mining: Mining = "all",
        over: Over = "nonzero",
        swap: bool = False,
        smooth: bool = False,
    ) -> None:
        super().__init__()
        zero_or_more("triplet", margin=margin)
        self.margin, self.squared = margin, squared
        self.mining: Mining = mining
        self.over: Over = over
        self.swap, self.smooth = swap, smooth

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return triplet(
            r,
            margin=self.margin,
            squared=self.squared,
            mining=self.mining,
            over=self.over,
            swap=self.swap,
            smooth=self.smooth,
            weights=weights,
        )
