"""The pivot: every objective compares a batch of samples with some references.

References are the batch itself (pair losses), proxies, a memory or representatives. `relate` turns a batch and its
references into one record, the `Relation`, and objectives are short pure functions of it. They reduce only through the
functions at the end of this file (log-sum-exp, sum, max, min, count; by row or by column), which is what would let many
ranks hold a slice of the columns each.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import NearkinError
from nearkin.spec import nearest

Space = Literal["cosine", "ball", "inner"]
SPACES: tuple[Space, ...] = get_args(Space)
By = Literal["row", "column"]

EMPTY = -1
"""The label of a reference slot that holds nothing: neither positive nor negative to any sample."""


class References(NamedTuple):
    """What a batch is compared with."""

    vectors: Tensor  # [R, D]
    labels: Tensor  # [R] int64; EMPTY where a slot holds nothing
    rows: Tensor | None = None  # [R] the batch row a reference is, -1 where it is none
    per_class: int = 0  # K, where references are proxies grouped by class; else 0


class Relation(NamedTuple):
    """Samples × references: similarities and who is kin."""

    s: Tensor  # [B, R] similarity; float32, or float64 where the input is
    pos: Tensor  # [B, R] bool: same class, never a sample with itself
    neg: Tensor  # [B, R] bool: other class (not ~pos: self pairs and empty slots are neither)
    rows: Tensor  # [B] labels of the samples
    columns: Tensor  # [R] labels of the references
    x: Tensor  # [B, D] the samples, projected into the space
    vectors: Tensor  # [R, D] the references, projected into the space
    per_class: int  # K, where references are proxies grouped by class; else 0

    @property
    def T(self) -> "Relation":  # noqa: N802 (as Tensor.T)
        """The sides swapped: where the references are the anchors."""
        return Relation(self.s.T, self.pos.T, self.neg.T, self.columns, self.rows, self.vectors, self.x, 0)


def check_space(space: str) -> Space:
    """The space's name, or a sentence that lists the three."""
    for known in SPACES:
        if space == known:
            return known
    raise NearkinError(f"There is no space {space!r}.{nearest(space, SPACES)} There are: {', '.join(SPACES)}.")


def at_least_float32(v: Tensor) -> Tensor:
    """Lower precision is raised to float32, float64 stays: similarities and state are never below float32."""
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def never_lower(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a module's `.half()` or `.bfloat16()` applies to its state, with the precision left: the device follows."""

    def keep(t: Tensor) -> Tensor:
        out = fn(t)
        low = out.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
        return t.to(out.device) if low else out

    return keep


def project(v: Tensor, space: Space) -> Tensor:
    """The vectors as points of the space: unit vectors (cosine), v if ‖v‖ ≤ 1 else v/‖v‖ (ball), or v (inner)."""
    v = at_least_float32(v)
    if space == "inner":
        return v
    if space == "cosine":
        return F.normalize(v, dim=-1, eps=1e-6)  # a zero vector stays zero, with a bounded gradient
    norm: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v / norm.clamp_min(1.0)


def pairwise(x: Tensor, v: Tensor, space: Space) -> Tensor:
    """Similarity [B, R] of projected points: x·v; in the ball 1 − ‖x − v‖²/2, so that d² = 2 − 2s as on the sphere."""
    s = x @ v.T
    if space == "ball":
        s = s + (1 - (x.square().sum(-1)[:, None] + v.square().sum(-1)) / 2)
    return s


def relate(x: Tensor, y: Tensor, refs: References, space: Space) -> Relation:
    """Compare embeddings x [B, D] of classes y [B] with the references."""
    with torch.autocast(x.device.type, enabled=False):  # inside a user's autocast, too, s is float32
        dtype = torch.float64 if torch.float64 in (x.dtype, refs.vectors.dtype) else torch.float32
        a, v = project(x.to(dtype), space), project(refs.vectors.to(dtype), space)
        s = pairwise(a, v, space)
    same, filled = y[:, None] == refs.labels, refs.labels != EMPTY
    pos, neg = same & filled, ~same & filled
    if refs.rows is not None:
        pos = pos & (refs.rows != torch.arange(len(y), device=y.device)[:, None])
    return Relation(s, pos, neg, y, refs.labels, a, v, refs.per_class)


def batch_references(x: Tensor, y: Tensor) -> References:
    """The batch as its own references: each column is the batch row of the same number."""
    return References(x, y, torch.arange(len(y), device=y.device))


def squared_distance(r: Relation) -> Tensor:
    """Squared Euclidean distance [B, R], never negative: 2 − 2s on the sphere, and the same by norms in every space."""
    norms = r.x.square().sum(-1)[:, None] + r.vectors.square().sum(-1)
    return (norms - 2 * (r.x @ r.vectors.T)).clamp_min(0)


def distance(r: Relation) -> Tensor:
    """Euclidean distance [B, R]; where two points coincide it is tiny and its gradient zero."""
    return squared_distance(r).clamp_min(1e-12).sqrt()


def weighted(z: Tensor, weights: Tensor | None) -> Tensor:
    """What stands in an exponent or a hinge, times the weights where a strategy gives any."""
    return z if weights is None else weights * z


# Reductions. `by="row"` gives one value a sample [B], `by="column"` one a reference [R]; only where the mask is set.


def _axis(by: By) -> int:
    return 1 if by == "row" else 0


def count(mask: Tensor, by: By) -> Tensor:
    """How many pairs of the mask, as float32."""
    return mask.sum(_axis(by), dtype=torch.float32)


def total(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Sum over the mask; 0 where it is empty."""
    return torch.where(mask, z, 0).sum(_axis(by))


def total_of(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of everything, or of everything in the mask, as a scalar."""
    return (z if mask is None else torch.where(mask, z, 0)).sum()


def largest(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Maximum over the mask; −inf where it is empty."""
    return z.masked_fill(~mask, -torch.inf).amax(_axis(by))


def smallest(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Minimum over the mask; +inf where it is empty."""
    return z.masked_fill(~mask, torch.inf).amin(_axis(by))


def log1p_sum_exp(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """log(1 + Σ exp z) over the mask, without overflow; 0 where it is empty."""
    dim = _axis(by)
    z = z.masked_fill(~mask, -torch.inf)
    top = z.detach().amax(dim).clamp_min(0)
    return top + torch.log(torch.exp(-top) + torch.exp(z - top.unsqueeze(dim)).sum(dim))


def log_sum_exp(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """log Σ exp z over the mask, without overflow; very negative but finite, with zero gradient, where it is empty."""
    dim = _axis(by)
    z = z.masked_fill(~mask, -torch.inf)
    top = z.detach().amax(dim)
    top = torch.where(torch.isfinite(top), top, 0)
    summed = torch.exp(z - top.unsqueeze(dim)).sum(dim)
    return top + torch.log(summed.clamp_min(torch.finfo(z.dtype).tiny))


def mean_where(values: Tensor, present: Tensor) -> Tensor:
    """Mean of the entries that are present; 0, with zero gradient, where none is."""
    return torch.where(present, values, 0).sum() / present.sum().clamp_min(1)
