"""The ranks of each query's relevant items: all that a retrieval metric needs.

Blocks of similarities (some queries × the whole gallery) are streamed. In each block the items of other classes that
score at least as high as each relevant item are counted. Only the few items that matter are sorted, and no queries ×
gallery matrix is ever held.

The tie rule: an item of another class that scores exactly as high as a relevant item is ranked BEFORE it. So ranks do
not depend on the order of the gallery, and identical embeddings score 0, not 100. Matrix products may round equal
columns differently, so gallery items with equal vectors are given equal scores.

Where each item searches all others, a score counts for both of its items: a block holds only the items from its own
first on, and items of other classes are counted along its columns, too.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nearkin import ranks
from nearkin.evaluation.copies import find_copies
from nearkin.evaluation.counting import BEYOND, above_in_columns, above_in_rows, above_on_gpu
from nearkin.evaluation.labels import LabelSets
from nearkin.space import Space

DIMENSIONS_PER_ITEM = 10
"""With so many dimensions per item of a class, counting along columns is cheaper than the products it saves."""


Out = TypeVar("Out")


class Sides(NamedTuple):
    """Queries and the gallery they search, on one device, in one dtype (float32 or float64)."""

    queries: Tensor  # [Q, D]
    query_labels: Any  # [Q] int64; or LabelSets, several labels per item
    gallery: Tensor  # [G, D]
    gallery_labels: Any  # [G] of the same kind
    self_row: Tensor  # [Q] int64: the query's own row in the gallery, -1 if it is not there


class Depth(NamedTuple):
    """How far down a ranking matters: to rank k, and with `r` to rank R, the number of the query's relevant items."""

    k: int
    r: bool

    def of(self, relevant: Tensor) -> Tensor:
        """The last rank that matters, per query."""
        return relevant.clamp_min(self.k) if self.r else torch.full_like(relevant, self.k)


class Ranks(NamedTuple):
    """The ranks of the relevant items of B queries."""

    rank: Tensor  # [B, M ≥ min(R, depth)] int64, ascending, 1 the nearest; exact to the depth, below it just larger
    relevant: Tensor  # [B] int64: R, the number of relevant items


class _Gallery(NamedTuple):
    points: Tensor  # [G, D] sorted by class, so that a query's relevant items are neighbouring columns of a block
    columns: Callable[[Tensor], tuple[Tensor, Tensor]]  # `_columns` of some queries
    self_column: Tensor  # [Q] the query's own column, -1 if it has none
    copies: Tensor  # columns with the same vector as an earlier one
    originals: Tensor  # that earlier one


def count_relevant(sides: Sides) -> Tensor:
    """The number of relevant items each query has in the gallery [Q], not counting itself."""
    if isinstance(sides.query_labels, LabelSets):
        size = sides.query_labels.count_sharing(sides.gallery_labels).to(sides.self_row.device)
    else:
        size = _classes(sides.query_labels, sides.gallery_labels.sort().values)[1]
    return (size - (sides.self_row >= 0).long()).clamp_min(0)  # an item without labels shares none with itself


def stream_ranks(
    sides: Sides, *, space: Space, depth: Depth, over_ranks: bool = False
) -> Iterator[tuple[Tensor, Ranks]]:
    """Yield, block by block, the numbers of some queries and the ranks of their relevant items.

    With `over_ranks` each process computes other blocks, of the same shapes as one process would.
    """
    gallery, relevant = _arrange(sides, space), count_relevant(sides)
    bound = depth.of(relevant).clamp_max(len(gallery.points))
    widest, deepest = int(relevant.max()) + 1, int(bound.max())
    workers, size = _split_work(gallery.points, widest, len(relevant))
    order, best = torch.arange(len(relevant), device=relevant.device), gallery.points[:0]
    parts, once = [slice(i, min(i + size, len(order))) for i in range(0, len(order), size)], 0
    if widest <= size and _worth_halving(sides, space, min(widest, deepest)):
        gallery, parts, once = _arrange_by_size(sides, space, gallery, max(widest, min(size, len(order) // 16)))
        order = gallery.self_column.argsort()
        best = torch.cat([_scores_of_own_class(gallery, order[part], part) for part in parts])[:, :deepest]
    counted = torch.zeros(best.shape, dtype=torch.int64)

    def count(part: slice, block: Tensor) -> tuple[Tensor, Tensor | None]:
        queries, first = order[part], min(part.start, once)
        points = _points(sides.queries[queries], space, query=True)
        block = _scores(points, gallery, first, block)
        scores = _take_relevant(block, gallery, queries, first)[:, :deepest]
        if block.is_cuda:
            return above_on_gpu(block, scores, deepest), None
        above = above_in_rows(block, scores, bound[queries])
        return above, above_in_columns(block[:, len(queries) :], best[part.stop :]) if part.stop <= once else None

    if over_ranks:
        parts = parts[ranks.rank() :: ranks.size()]
    found = _run(count, parts, gallery.points, workers)
    if once and over_ranks:  # blocks of other processes count for the queries of these
        found = iter(blocks := list(found))
        for part, (_, of_later) in zip(parts, blocks, strict=True):
            if of_later is not None:
                counted[part.stop :] += of_later
        counted = ranks.total(counted)
    for part, (above, of_later) in zip(parts, found, strict=True):
        if once:
            above += counted[part]
        if of_later is not None and not over_ranks:
            counted[part.stop :] += of_later
        queries = order[part]
        place = torch.arange(1, above.shape[1] + 1, device=above.device)
        missing = place > relevant[queries, None]
        yield queries, Ranks((above + place).masked_fill_(missing, BEYOND), relevant[queries])


def _run(work: Callable[[slice, Tensor], Out], parts: list[slice], points: Tensor, workers: int) -> Iterator[Out]:
    """Yield the result of each slice, in order. Each worker has its own block and, if there are several, one core."""
    mine, rows = threading.local(), max((part.stop - part.start for part in parts), default=0)

    def task(part: slice) -> Out:
        if not hasattr(mine, "block"):
            mine.block = points.new_empty(rows, len(points))
        return work(part, mine.block)

    if points.is_cuda:
        yield from map(task, parts)
        return
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    blas = torch.get_num_threads() if workers == 1 else 1
    with threadpool_limits(blas, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        yield from pool.map(task, parts)


def _worth_halving(sides: Sides, space: Space, items: int) -> bool:
    """Whether each item searches all others by symmetric scores, and counting along columns is the cheaper way."""
    cheaper = DIMENSIONS_PER_ITEM * items <= sides.gallery.shape[1]
    same = sides.queries is sides.gallery and bool((sides.self_row.diff() == 1).all()) and int(sides.self_row[0]) == 0
    plain = not (space.by_distance or sides.gallery.is_cuda or isinstance(sides.gallery_labels, LabelSets))
    return cheaper and same and plain


def _arrange_by_size(sides: Sides, space: Space, gallery: _Gallery, size: int) -> tuple[_Gallery, list[slice], int]:
    """The gallery with small classes first, slices of at most `size` columns that end where a class does, and a column.

    Scores of columns before that one are computed once. Behind it are the classes of copies, since equal scores are
    certain only within a row of a block.
    """
    _, number, sizes = sides.gallery_labels.unique(return_inverse=True, return_counts=True)
    copied = torch.zeros_like(sizes)
    copied[number[gallery.self_column.argsort()][torch.cat([gallery.copies, gallery.originals])]] = 1
    order = (sizes + copied * len(number)).argsort()
    ends, cuts = sizes[order].cumsum(0), [0]
    while cuts[-1] < len(number):
        cuts.append(int(ends[torch.searchsorted(ends, cuts[-1] + size, right=True) - 1]))
    once = max(cut for cut in cuts if cut <= int(sizes[copied == 0].sum()))
    labels = order.argsort()[number]
    arranged = _arrange(sides._replace(query_labels=labels, gallery_labels=labels), space)
    return arranged, [slice(*both) for both in pairwise(cuts)], once


def _arrange(sides: Sides, space: Space, chunk: int = 8192) -> _Gallery:
    """The gallery as points of the space, sorted by class; in chunks, so that memory holds only one copy of it."""
    order, columns = _columns(sides)
    width = sides.gallery.shape[1] + space.by_distance
    points = sides.gallery.new_empty(len(order), width)
    for start in range(0, len(order), chunk):
        part = slice(start, start + chunk)
        points[part] = _points(sides.gallery[order[part]], space, query=False)
    column = torch.empty_like(order)
    column[order] = torch.arange(len(order), device=order.device)
    self_column = torch.where(sides.self_row >= 0, column[sides.self_row.clamp_min(0)], -1)
    return _Gallery(points, columns, self_column, *find_copies(points))


def _columns(sides: Sides) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """The order in which the gallery is held, and the columns of each query's relevant items.

    These are, for B queries, columns [B, W] that may include the query's own, and which of them count
    [B, W]; those that do not repeat one that does.
    """
    device = sides.gallery.device
    if isinstance(sides.query_labels, LabelSets):
        queries, gallery = sides.query_labels, sides.gallery_labels.transposed(sides.query_labels)

        def of_sets(some: Tensor) -> tuple[Tensor, Tensor]:
            columns, counts = queries.sharing(gallery, some)
            return columns.to(device), counts.to(device)

        return torch.arange(len(sides.gallery), device=device), of_sets
    labels, order = sides.gallery_labels.sort()
    first, size = _classes(sides.query_labels, labels)
    step = torch.arange(int(size.max()), device=device)

    def of_classes(some: Tensor) -> tuple[Tensor, Tensor]:
        counts = step < size[some, None]
        return (first[some, None] + torch.where(counts, step, 0)).clamp_max(len(labels) - 1), counts

    return order, of_classes


def _classes(query_labels: Tensor, sorted_labels: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each query's class in the sorted labels, and its size."""
    first = torch.searchsorted(sorted_labels, query_labels.contiguous())
    return first, torch.searchsorted(sorted_labels, query_labels.contiguous(), right=True) - first


def _points(v: Tensor, space: Space, *, query: bool) -> Tensor:
    """Points whose plain inner product orders a query's gallery as `pairwise` does.

    By distance, 1 − ‖x − v‖²/2 differs from x·v − ‖v‖²/2 by a constant of the query: one more coordinate does it.
    """
    v = space.project(v)
    if not space.by_distance:
        return v
    last = torch.ones_like(v[:, :1]) if query else v.square().sum(1, keepdim=True) / -2
    return torch.cat([v, last], dim=1)


def _split_work(points: Tensor, widest: int, queries: int) -> tuple[int, int]:
    """Number of workers and of queries per block: some 256 MB in all (512 MB on a GPU), but at least 64 queries.

    One worker per core keeps all cores busy, unlike a product by all cores followed by counting on one. A gallery too
    large for that many blocks gets one worker, whose product uses all cores.
    """
    bytes_per_row = len(points) * points.element_size() + 32 * widest
    fitting = (2**29 if points.is_cuda else 2**28) // bytes_per_row
    threads = 1 if points.is_cuda else torch.get_num_threads()
    workers = threads if fitting >= 64 * threads else 1
    return workers, min(max(64, fitting // workers // 64 * 64), -(-queries // workers))


def _product(x: Tensor, v: Tensor, *, out: Tensor) -> None:
    """x·vᵀ in full precision. On a CPU by NumPy, whose BLAS was measured up to 1.5 times as fast as torch's."""
    if not out.is_cuda:
        np.dot(x.numpy(), v.numpy().T, out=out.numpy())
        return
    with _no_tf32():
        torch.mm(x, v.T, out=out)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Switch TF32 off: its ten bits of mantissa would create ties. Restores whichever of torch's switches was set."""
    matmul = torch.backends.cuda.matmul
    if matmul.fp32_precision != "tf32":
        yield
        return
    name: str = "allow_tf32"
    off: bool | str = False
    try:
        old = getattr(matmul, name)
    except RuntimeError:  # the newer switch was set; reading the older one is an error then
        name, old, off = "fp32_precision", "tf32", "ieee"
    setattr(matmul, name, off)
    try:
        yield
    finally:
        setattr(matmul, name, old)


def _scores(points: Tensor, gallery: _Gallery, first: int, memory: Tensor) -> Tensor:
    """The scores of some points with the gallery's columns from `first` on, in a part of this memory."""
    block = memory.view(-1)[: len(points) * (len(gallery.points) - first)].view(len(points), -1)
    _product(points, gallery.points[first:], out=block)
    if len(gallery.copies):
        block[:, gallery.copies - first] = block[:, gallery.originals - first]
    return block


def _scores_of_own_class(gallery: _Gallery, queries: Tensor, part: slice) -> Tensor:
    """The scores [B, W] of the items of each query's class, which are within these columns, best first."""
    points = gallery.points[part]
    block = points.new_empty(len(points), len(points))
    _product(points, points, out=block)
    return _take_relevant(block, gallery, queries, part.start)


def _take_relevant(block: Tensor, gallery: _Gallery, queries: Tensor, first: int) -> Tensor:
    """The scores of each query's relevant items [B, W], best first, padded with −inf.

    They and the query itself are removed from the block (set to −inf), which leaves the items of other classes. The
    block starts with the gallery's column `first`.
    """
    columns, counts = gallery.columns(queries)
    relevant = counts & (columns != gallery.self_column[queries, None])
    columns = columns - first
    scores = torch.where(relevant, block.gather(1, columns), -torch.inf)
    block.scatter_(1, columns, -torch.inf)
    if scores.is_cuda:
        return scores.sort(dim=1, descending=True).values
    scores.numpy().sort(axis=1)  # an order of magnitude faster than torch's
    return scores.flip(1)
