"""Samples × references: the record that every objective is written on.

References are the batch itself (pair losses), proxies, a memory or representatives. `relate` turns a batch and its
references into one record, the `Relation`, and objectives are short pure functions of it. They reduce only through the
functions at the end of this file (log-sum-exp, sum, max, min, count; per row or per column), so that several ranks
could each hold a slice of the columns, and so that what objectives compute per pair can exist block by block.
"""

import inspect
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.methods.column_blocks import OWN, By, Columns, Pairs, cut_columns, reduced
from nearkin.space import Space, full_precision, norm

EMPTY = -1
"""The label of an empty reference slot, which is neither positive nor negative for any sample."""


class References(NamedTuple):
    """What a batch is compared with."""

    vectors: Tensor  # [R, D]
    labels: Tensor  # [R] int64; EMPTY for empty slots
    rows: Tensor | None = None  # [R] batch row of each reference, -1 if it is not in the batch
    per_class: int = 0  # K, if the references are proxies grouped by class; else 0
    whole: int = 0  # their number on all ranks, if each has only some of them; else 0


class Relation(NamedTuple):
    """Similarities of samples and references, and which pairs are positive or negative."""

    s: Tensor  # [B, R] similarity; float32, or float64 if the input is
    pos: Tensor  # [B, R] bool: same class, never a sample with itself
    neg: Tensor  # [B, R] bool: other class (not ~pos: self pairs and empty slots are neither)
    rows: Tensor  # [B] labels of the samples
    columns: Tensor  # [R] labels of the references
    x: Tensor  # [B, D] the samples, projected into the space
    vectors: Tensor  # [R, D] the references, projected into the space
    per_class: int  # K, if the references are proxies grouped by class; else 0
    space: Space = Space.COSINE
    by_sample: bool = False  # losses are wanted per sample: see sum_terms
    whole: int = 0  # the number of references on all ranks, if each has only some of them; else 0
    spread_x: Tensor | None = None  # then x for pairs, whose gradient is the sum over ranks

    @property
    def T(self) -> "Relation":  # noqa: N802 (as Tensor.T)
        """The relation with its sides swapped, so that the references are the anchors."""
        sides = (self.columns, self.rows, self.vectors, self.x)
        return Relation(self.s.T, self.pos.T, self.neg.T, *sides, 0, self.space)


class Node(torch.autograd.Function):
    """A node with its own gradient, which torch.vmap computes once per element."""

    def __init_subclass__(cls) -> None:
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # torch asks in every call

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        def element(number: int) -> Any:
            pairs = zip(inputs, in_dims, strict=True)
            return cls.apply(*(v if dim is None else v.select(dim, number) for v, dim in pairs))  # type: ignore[no-untyped-call]

        found = [element(number) for number in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0,) * len(found[0])


def _through_norm(g: Tensor, w: Tensor, length: Tensor, floor: float, out: Tensor | None = None) -> Tensor:
    """∂L/∂w for points v = w/n, n = max(‖w‖, floor), and g = ∂L/∂v / n: g − (g·v) v, or g below the floor.

    Memory for the result may be passed, except where a second gradient is taken.
    """
    products = torch.mul(g, w, out=out)
    along = torch.where(length >= floor, products.sum(-1, keepdim=True) / length.clamp_min(floor).square(), 0)
    return torch.addcmul(g, along, w, value=-1, out=out)


class _Project(Node):
    """Points v = w/n of vectors w [B, D], n = max(‖w‖, floor)."""

    @staticmethod
    def forward(w: Tensor, floor: float) -> Tensor:
        return w / norm(w).clamp_min(floor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        w, ctx.floor = inputs
        ctx.save_for_backward(w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        length = norm(w)
        out = None if torch.is_grad_enabled() else torch.empty_like(w)
        return _through_norm(gradient / length.clamp_min(ctx.floor), w, length, ctx.floor, out=out), None


COMPARE_BLOCK, GPU_COMPARE_BLOCK = 2**21, 2**23
"""Numbers per block: small compared with the references of a large data set, but on a GPU enough to hide launches."""


class _Compare(Node):
    """`_Project` of the references [R, D] and products x·v [B, R], as one node.

    Autograd would hold five copies of the references at once; here the gradient is computed block by block from w.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        v = w / norm(w).clamp_min(floor)
        return x @ v.T, v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: object) -> None:  # noqa: ARG004
        x, w, ctx.floor = inputs
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)  # most objectives use only the products

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dv: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        if ds is None:
            ds = x.new_zeros(len(x), len(w))
        dx: Tensor | None = None
        dw = torch.empty_like(w) if ctx.needs_input_grad[1] else None
        size = max(1, (GPU_COMPARE_BLOCK if x.is_cuda else COMPARE_BLOCK) // max(1, *x.shape))
        with full_precision(x):
            for block in (slice(start, start + size) for start in range(0, len(w), size)):
                length = norm(w[block])
                n = length.clamp_min(ctx.floor)
                q = ds[:, block] / n.T
                if ctx.needs_input_grad[0]:
                    dx = q @ w[block] if dx is None else torch.addmm(dx, q, w[block])
                if dw is not None:
                    g = q.T @ x if dv is None else torch.addcdiv(q.T @ x, dv[block], n)
                    if torch.is_grad_enabled():
                        dw[block] = _through_norm(g, w[block], length, ctx.floor)
                    else:
                        _through_norm(g, w[block], length, ctx.floor, out=dw[block])
        return dx, dw, None


class _Gram(Node):
    """Inner products [..., K, K] of vectors [..., K, D] with each other; one product in the gradient, not two."""

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        with full_precision(w):
            return w @ w.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        with full_precision(w):
            product: Tensor = (gradient + gradient.mT) @ w
        return product


def gram(w: Tensor) -> Tensor:
    """Inner products [..., K, K] of vectors [..., K, D] with each other."""
    out: Tensor = _Gram.apply(w)  # type: ignore[no-untyped-call]
    return out


def _compare(x: Tensor, refs: References, dtype: torch.dtype, space: Space) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The samples and the references as points of the space, and their inner products; last x for use in pairs."""
    a, floor = raise_precision(x, dtype, space), space.norm_floor
    if floor is not None:
        a = _Project.apply(a, floor)  # type: ignore[no-untyped-call]
    if refs.vectors is x:
        return a, a, gram(a), a
    w = raise_precision(refs.vectors, dtype, space)
    in_pairs = ranks.spread(a) if refs.whole else a
    if floor is None:
        return a, w, in_pairs @ w.T, in_pairs
    products, v = _Compare.apply(in_pairs, w, floor)  # type: ignore[no-untyped-call]
    return a, v, products, in_pairs


FLOAT16_NORM = 0.01
"""Norm below which the gradient of a float16 vector grows no further: at 1e-6, as in float32, it would overflow."""


def raise_precision(v: Tensor, dtype: torch.dtype, space: Space) -> Tensor:
    """Vectors in a higher precision, with a gradient that float16 can hold if they are float16 and nearly zero."""
    out, floor = v.to(dtype), space.norm_floor
    if v.dtype == torch.float16 and out.requires_grad and floor is not None:
        factor = (norm(out.detach()).clamp_min(floor) / FLOAT16_NORM).clamp_max(1)
        out.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return out


def relate(x: Tensor, y: Tensor, refs: References, space: Space) -> Relation:
    """Compare embeddings x [B, D] of classes y [B] with the references."""
    with full_precision(x):
        dtype = torch.float64 if torch.float64 in (x.dtype, refs.vectors.dtype) else torch.float32
        a, v, products, in_pairs = _compare(x, refs, dtype, space)
        s = space.similarity(products, in_pairs, v)
    y, columns = y.long(), refs.labels.long()  # uint8 has no −1 for empty slots, narrow types cannot index
    blocks = cut_columns(len(y), len(columns), refs.per_class)
    if refs.whole:
        classes = len(columns) // refs.per_class
        blocks = (blocks or Columns(classes, classes))._replace(cut=True)
    if blocks is not None:
        r = Relation(s, s, s, y, columns, a, v, refs.per_class, space)
        return _in_blocks(r._replace(whole=refs.whole, spread_x=in_pairs) if refs.whole else r, blocks)
    pos = y[:, None] == columns
    neg = ~pos
    if not refs.per_class:  # proxies are never EMPTY
        filled = columns != EMPTY
        neg.logical_and_(filled)
        pos.logical_and_(filled)
    if refs.rows is not None:
        pos.logical_and_(refs.rows != torch.arange(len(y), device=y.device)[:, None])
    return Relation(s, pos, neg, y, columns, a, v, refs.per_class, space)


def _in_blocks(r: Relation, blocks: Columns) -> Relation:
    """The relation to very many proxies, none of them EMPTY, with pairs computed one block of columns at a time."""

    y, columns = r.rows[:, None], r.columns  # the blocks keep these, and not the vectors
    if len(blocks.numbers) > 1:
        labels = columns[:: len(columns) // blocks.classes].contiguous()  # ascending
        blocks = blocks._replace(own=torch.searchsorted(labels, r.rows).clamp_max(len(labels) - 1))

    def same(number: int) -> Tensor:
        return y == blocks.narrow(columns, 0, number)

    parts = same, lambda number: ~same(number)
    s, pos, neg = Pairs.of(r.s, blocks), *(Pairs(part, blocks, r.s.shape) for part in parts)
    return r._replace(s=cast("Tensor", s), pos=cast("Tensor", pos), neg=cast("Tensor", neg))


def at_own_classes(r: Relation, weights: Tensor | None) -> tuple[Relation, Tensor | None]:
    """For sums over positives among very many proxies: the columns of the batch's classes, and their weights.

    A sample after the first of its class has columns without positives. Any other relation is returned as it is.
    """
    if not isinstance(r.s, Pairs) or r.s.columns.own is None:
        return r, weights
    blocks, shape = r.s.columns, r.s.shape
    columns = blocks.narrow(r.columns, 0, OWN)
    per_class = len(columns) // len(r.rows)
    first = ~(r.rows[:, None] == r.rows).triu(1).any(0) & (columns[::per_class] == r.rows)  # another rank may have it
    first = first.repeat_interleave(per_class)
    s, pos, neg = (blocks.block(t, OWN, shape) for t in (r.s, r.pos, r.neg))
    pos, neg, weights = pos & first, neg & first, blocks.block(weights, OWN, shape)
    if blocks.cut:  # sums over rows go over all ranks
        one = Columns(len(r.rows), len(r.rows), cut=True)
        s, pos, neg, weights = (None if t is None else cast("Tensor", Pairs.of(t, one)) for t in (s, pos, neg, weights))
    return r._replace(s=s, pos=pos, neg=neg, columns=columns), weights


def batch_references(x: Tensor, y: Tensor) -> References:
    """The batch as its own references: column j is batch row j."""
    return References(x, y, torch.arange(len(y), device=y.device))


def squared_distance(r: Relation) -> Tensor:
    """Squared Euclidean distance [B, R], never negative: 2 − 2s, or from norms if s is an inner product."""
    if r.space.is_monotone_in_distance:
        return torch.rsub(r.s, 2, alpha=2).clamp_min(0)
    x = r.x if r.spread_x is None else r.spread_x
    norms = x.square().sum(-1)[:, None] + r.vectors.square().sum(-1)
    return (norms - 2 * r.s).clamp_min(0)


def minus_squared_distance(r: Relation, weights: Tensor | None) -> Tensor:
    """An exponent −d + 2(ω − 1)s: of d = const − 2s, weights multiply the part that depends on the pair."""
    z = -squared_distance(r)
    return z if weights is None else z + 2 * (weights - 1) * r.s


def distance(r: Relation) -> Tensor:
    """Euclidean distance [B, R]; for coinciding points it is tiny with zero gradient."""
    return squared_distance(r).clamp_min(1e-12).sqrt()


def weighted(z: Tensor, weights: Tensor | None) -> Tensor:
    """An exponent or the inside of a hinge, times the weights if a strategy provides any."""
    return z if weights is None else weights * z


NOTHING = -1e30
"""The logarithm of an empty sum."""

# Reductions over the mask. `by="row"` gives one value per sample [B], `by="column"` one per reference [R].


def _axis(by: By) -> int:
    return 1 if by == "row" else 0


def _bytes(mask: Tensor) -> Tensor:
    """The same memory as numbers, which torch reduces several times faster than booleans on a CPU."""
    return mask.view(torch.uint8)


def exists(mask: Tensor, by: By) -> Tensor:
    """Whether there is a pair in the mask."""
    found = reduced(lambda mask: _bytes(mask).any(_axis(by)), mask, by=by, join=lambda parts: parts.any(0))
    return found.bool()


def count(mask: Tensor, by: By) -> Tensor:
    """Number of pairs in the mask, as float32."""
    return reduced(lambda mask: _bytes(mask).sum(_axis(by), dtype=torch.float32), mask, by=by)


def total(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Sum over the mask; 0 if it is empty."""
    return reduced(lambda z, mask: torch.where(mask, z, 0).sum(_axis(by)), z, mask, by=by)


def total_of(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over the mask, or over all pairs, as a scalar."""
    return reduced(torch.sum, z if mask is None else torch.where(mask, z, 0), by="row")


def largest(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Maximum over the mask; −inf if it is empty."""
    masked = torch.where(mask, z, -torch.inf)
    return reduced(lambda z: z.amax(_axis(by)), masked, by=by, join=lambda parts: parts.amax(0))


def smallest(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """Minimum over the mask; +inf if it is empty."""
    masked = torch.where(mask, z, torch.inf)
    return reduced(lambda z: z.amin(_axis(by)), masked, by=by, join=lambda parts: parts.amin(0))


def top_of_row(z: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Mask of the k [B] largest per row within the mask, or all if there are fewer; ties by column number."""
    order = torch.where(mask, z, -torch.inf).argsort(dim=1, descending=True, stable=True)
    place = torch.arange(z.shape[1], device=z.device).expand_as(order)
    return mask & (torch.empty_like(order).scatter_(1, order, place) < k[:, None])


class _LogSumExp(Node):
    """log Σ exp z over a mask, and p = exp z / Σ exp z, which is its gradient; an output, so that it has one itself."""

    @staticmethod
    def forward(z: Tensor, mask: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        z = torch.where(mask, z, NOTHING)  # −∞ would make the gradient of an empty sum NaN
        top = z.amax(dim)
        p = torch.softmax(z, dim, out=z)  # in place
        return top - p.amax(dim).log(), p  # the largest p is exp(top − top) / Σ exp(z − top)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.dim = inputs[2]
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> tuple[Tensor, None, None]:
        value, p = ctx.saved_tensors
        out = torch.zeros_like(p) if g is None else p * torch.where(value > NOTHING / 2, g, 0).unsqueeze(ctx.dim)
        if h is not None:
            out = out + p * (h - (p * h).sum(ctx.dim, keepdim=True))
        return out, None, None


def log_sum_exp(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """log Σ exp z over the mask, without overflow; about −1e30, with zero gradient, if it is empty."""

    def value(z: Tensor, mask: Tensor, dim: int) -> Tensor:
        out: tuple[Tensor, Tensor] = _LogSumExp.apply(z, mask, dim)  # type: ignore[no-untyped-call]
        return out[0]

    return reduced(
        lambda z, mask: value(z, mask, _axis(by)),
        z,
        mask,
        by=by,
        join=lambda parts: value(parts, parts > NOTHING / 2, 0),
    )


def log1p_sum_exp(z: Tensor, mask: Tensor, by: By) -> Tensor:
    """log(1 + Σ exp z) over the mask, without overflow; 0 if it is empty."""
    return F.softplus(log_sum_exp(z, mask, by), threshold=50)  # above 50 the 1 is below float64's precision


def reading_waits(t: Tensor) -> bool:
    """Whether a shape that depends on values would make the host wait for a GPU, or break a compiled graph."""
    return t.is_cuda or torch.compiler.is_compiling()


def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column numbers of the pairs in a mask [B, K]; of all its B·K entries where reading it would wait."""
    if reading_waits(mask):
        rows = torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1])
        return rows, torch.arange(mask.shape[1], device=mask.device).repeat(len(mask))
    rows, columns = mask.nonzero(as_tuple=True)
    return rows, columns


def mean_where(values: Tensor, present: Tensor) -> Tensor:
    """Mean of the entries that are present; 0, with zero gradient, if there are none."""
    return total_of(values, present) / total_of(present).clamp_min(1)


# The last reduction of an objective: its terms are one or several per sample.


def sum_terms(r: Relation, z: Tensor, mask: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """Sum of the terms of a loss over the mask, a scalar; or [B] if the relation asks for losses per sample.

    A sample's loss is B times its share of the sum, so that the mean over samples is the loss. Terms are [B], [B, …],
    or [N] with the number of the sample of each, `rows`.
    """
    if not r.by_sample:
        return total_of(z, mask)
    z, B = z if mask is None else torch.where(mask, z, 0), len(r.rows)
    return B * (z.flatten(1).sum(1) if z.ndim > 1 else z if rows is None else z.new_zeros(B).index_add(0, rows, z))


def mean_terms(r: Relation, values: Tensor, present: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean of the terms of a loss that are present, 0 if there are none; see sum_terms."""
    if not r.by_sample:
        return mean_where(values, present)
    return sum_terms(r, values, present, rows) / present.sum().clamp_min(1)


def over_columns(r: Relation, sums: Tensor) -> Tensor:
    """What was summed over the references of this rank, as a sum over all of them."""
    return ranks.total(sums) if r.whole else sums


def column_count(r: Relation) -> int:
    """The number of references, those of other ranks included."""
    return r.whole or len(r.columns)


def mean_of_columns(r: Relation, values: Tensor, present: Tensor | None = None) -> Tensor:
    """Mean of values of references [R], or of those that are present; 0 if none is."""
    if not r.whole:
        return values.mean() if present is None else mean_where(values, present)
    count = column_count(r) if present is None else over_columns(r, total_of(present)).clamp_min(1)
    return over_columns(r, total_of(values, present)) / count


def sum_of_columns(r: Relation, z: Tensor) -> Tensor:
    """Sum of terms that belong to references [R], and not to samples."""
    if r.by_sample:
        raise NearkinError(
            "This loss is a mean over proxies, not over samples, so it has no losses or weights of samples: leave out "
            "reduction, sample_weights and class_weights, or use mpa_dw, which sums over samples."
        )
    return over_columns(r, z.sum())
