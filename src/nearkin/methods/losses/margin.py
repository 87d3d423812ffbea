"""Margin. Wu, Manmatha, Smola, Krähenbühl: Sampling Matters in Deep Embedding Learning. ICCV 2017.

Positives should be nearer than a boundary, negatives farther, by a margin; negatives are sampled evenly by distance.

    L = 1/n ( Σ_i Σ_{j∈P_i} (d_ij − β + α)_+ + Σ_i Σ_{j∈N_i} t_ij (β + α − d_ij)_+ + ν Σ_i |P_i| β )   (PROFS, Eq. 3.3)

    all       t_ij = 1
    hard      t_ij = 1 for the |P_i| nearest of N_i (all if there are fewer), else 0                   (PROFS, §5.3)
    distance  t_ij = |P_i| p_ij,  p_ij = ω_ij / Σ_{k∈N_i} ω_ik                                          (expected)
              or how often j is drawn in |P_i| independent draws from p_i                               (`drawn=True`)
              log ω_ij = −(D−2) log δ_ij − (D−3)/2 log(1 − δ_ij²/4),  δ_ij = max(d_ij, `cutoff`)
              (1 − δ²/4 at least 1e-6)
              ω_ij = 0 where d_ij ≥ `upper`; if that leaves nothing in a row, ω_ij = 1 for all of N_i

Symbols
    P_i, N_i references of the class of sample i and of other classes; d Euclidean distance; α margin (`margin`);
    β boundary (`boundary`); with `learn` it is a parameter β_c per class, that of sample i in row i, with `speed` times
    the network's learning rate; ν its weight (`nu`);
    t_ij how often a negative counts (`sampling`); ω the inverse density of distances on the D-dimensional sphere.
    n = the number of non-zero hinges, negatives counted t_ij times (`over="nonzero"`), or Σ_i |P_i| + Σ_ij t_ij
    (`over="all"`); if it is 0, n = 1. t is a constant of the gradient. Weights multiply the inside of each (·)_+.

Settings
    α = 0.2, β = 1.2 at the start, ν = 0, cutoff 0.5, upper 1.4 = α + β, 5 images per class; β learnt per class, in
    public code with rate 5e-4 and 1e-5 for the network.
    PROFS: `sampling="hard"`, β learnt.

Departures
    The paper draws one negative per positive; by default we take the expectation over those draws: the same sums on
    average, without noise. `drawn=True` draws with replacement; a draw depends only on the row, the column, a seed and
    the number of steps so far (buffers), so a resumed run has the same draws. The paper also adds one β for all
    classes and one per image; we have only the one per class.

Relations
    `contrastive(form="c2", reduce="sum")` is this with m⁺ = β − α, m⁻ = β + α, undivided (PROFS, Eq. 4.6).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from nearkin.errors import above_zero, zero_or_more
from nearkin.methods.base import Loss, Step
from nearkin.methods.relation import (
    Relation,
    count,
    distance,
    largest,
    log_sum_exp,
    sum_terms,
    top_of_row,
    total_of,
    weighted,
)
from nearkin.methods.state import scrambled

Sampling = Literal["distance", "all", "hard"]
Over = Literal["nonzero", "all"]


def probabilities(r: Relation, d: Tensor, *, cutoff: float, upper: float) -> Tensor:
    """p_ij [B, R]: inversely proportional to the density of distances on the sphere."""
    D = r.x.shape[1]
    delta = d.clamp(cutoff, upper)
    log_omega = -(D - 2) * delta.log() - (D - 3) / 2 * (1 - delta.square() / 4).clamp_min(1e-6).log()
    near = r.neg & (d < upper)
    none = largest(log_omega, near, by="row").isneginf()[:, None]
    among = torch.where(none, r.neg, near)
    log_omega = torch.where(none, 0, log_omega)
    return torch.where(among, (log_omega - log_sum_exp(log_omega, among, by="row")[:, None]).exp(), 0)


def uniform(step: Tensor, seed: Tensor, like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend only on the step, the seed and their position."""
    z = (scrambled(step, like.numel()) ^ scrambled(seed, 1)).view(like.shape)
    return (z >> 40 & 0xFFFFFF).to(like.dtype) / 2**24


def draw(p: Tensor, each: Tensor, u: Tensor) -> Tensor:
    """How often each column is drawn if every pair of the mask `each` draws one from p of its row, by u in [0, 1)."""
    cumulative = p.contiguous().cumsum(1)
    end = cumulative[:, -1:]
    column = torch.searchsorted(cumulative, u * end, right=True).clamp_max(p.shape[1] - 1)
    times = torch.zeros_like(p).scatter_add_(1, column, (each & (end > 0)).to(p.dtype))
    return torch.where(p > 0, times, 0)  # u may round up to the end, to a column of probability 0


def margin_loss(
    r: Relation, d: Tensor, t: Tensor, beta: Tensor, *, margin: float, nu: float, over: Over, weights: Tensor | None
) -> Tensor:
    """Eq. 3.3 with one boundary per row, beta [B], and negatives that count t [B, R] times."""
    pull = weighted(d - beta[:, None] + margin, weights).clamp_min(0)
    push = weighted(beta[:, None] + margin - d, weights).clamp_min(0)
    value = sum_terms(r, pull, r.pos) + sum_terms(r, t * push) + nu * sum_terms(r, count(r.pos, by="row") * beta)
    n = total_of(r.pos & ((pull > 0) | (over == "all"))) + total_of(t, (push > 0) | (t > 0) & (over == "all"))
    return value / torch.where(n > 0, n, 1)  # Eq. 3.3


class Margin(Loss):
    """The margin loss with distance-weighted, all or hard negatives."""

    images_per_class = 5
    steps: Tensor
    seed: Tensor

    def __init__(
        self,
        *,
        classes: int,
        margin: float = 0.2,
        boundary: float = 1.2,
        learn: bool = False,
        speed: float = 50.0,
        nu: float = 0.0,
        sampling: Sampling = "distance",
        drawn: bool = False,
        cutoff: float = 0.5,
        upper: float = 1.4,
        over: Over = "nonzero",
    ) -> None:
        super().__init__()
        above_zero("margin", boundary=boundary, cutoff=cutoff, upper=upper)
        zero_or_more("margin", margin=margin, nu=nu, speed=speed)
        self.margin, self.nu, self.cutoff, self.upper, self.drawn = margin, nu, cutoff, upper, drawn
        self.sampling: Sampling = sampling
        self.over: Over = over
        self.fixed, self.speed = float(boundary), speed
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if drawn:
            self.register_buffer("seed", torch.randint(2**31, ()))
        self.updates_state = drawn
        self.boundary = nn.Parameter(torch.full((classes,), self.fixed)) if learn else None

    def times(self, r: Relation, d: Tensor) -> Tensor:
        """How often each negative counts, [B, R]; 0 for pairs that are not negative."""
        if self.sampling == "all":
            return r.neg.to(d.dtype)
        each = count(r.pos, by="row")
        if self.sampling == "hard":
            return top_of_row(-d, r.neg, each).to(d.dtype)
        p = probabilities(r, d, cutoff=self.cutoff, upper=self.upper)
        return draw(p, r.pos, uniform(self.steps, self.seed, p)) if self.drawn else each[:, None] * p

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        d = distance(r)
        beta = d.new_full((len(r.rows),), self.fixed) if self.boundary is None else self.boundary[r.rows]
        t = self.times(r, d.detach())
        return margin_loss(r, d, t, beta, margin=self.margin, nu=self.nu, over=self.over, weights=weights)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if self.training and self.drawn:
            self.steps += 1

    @property
    def known_classes(self) -> int | None:
        return None if self.boundary is None else len(self.boundary)
