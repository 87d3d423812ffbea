"""The ranks of each query's relevant items: all that a retrieval metric needs.

Blocks of similarities (some queries × the whole gallery) are streamed. In each block the items of other classes that
score at least as high as each relevant item are counted. Only the few items that matter are sorted, and no queries ×
gallery matrix is ever held.

The tie rule: an item of another class that scores exactly as high as a relevant item is ranked BEFORE it. So ranks do
not depend on the order of the gallery, and identical embeddings score 0, not 100. Matrix products may round equal
columns differently, so gallery items with equal vectors are given equal scores.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.evaluation.labels import LabelSets
from nearkin.space import Space

BEYOND = 2**40
"""Added to the rank of an item below the requested depth: larger than any gallery."""

FEW = 4
"""Up to this many further relevant items, counting for each is cheaper on a CPU than finding the top of the row."""

FOLDS = 64
"""A row is folded into at most this many layers to find a low bound of its top."""


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
    columns: Callable[[slice], tuple[Tensor, Tensor]]  # `_columns` of a slice of queries
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


def stream_ranks(sides: Sides, *, space: Space, depth: Depth) -> Iterator[tuple[slice, Ranks]]:
    """Yield, block by block, the slice of queries and the ranks of their relevant items."""
    gallery = _arrange(sides, space)
    relevant = count_relevant(sides)
    bound = depth.of(relevant).clamp_max(len(gallery.points))
    widest, deepest = int(relevant.max()) + 1, int(bound.max())

    def ranks(part: slice, block: Tensor) -> Ranks:
        _product(_points(sides.queries[part], space, query=True), gallery.points, out=block)
        if len(gallery.copies):
            block[:, gallery.copies] = block[:, gallery.originals]
        scores = _take_relevant(block, gallery, part)[:, :deepest]
        above = _above_on_gpu(block, scores, deepest) if block.is_cuda else _above(block, scores, bound[part])
        place = torch.arange(1, scores.shape[1] + 1, device=block.device)
        missing = place > relevant[part, None]
        return Ranks((above + place).masked_fill_(missing, BEYOND), relevant[part])

    workers, rows = _split_work(gallery.points, widest, len(relevant))
    parts = [slice(i, min(i + rows, len(relevant))) for i in range(0, len(relevant), rows)]
    yield from zip(parts, _run(ranks, parts, gallery.points, workers), strict=True)


def _run(work: Callable[[slice, Tensor], Ranks], parts: list[slice], points: Tensor, workers: int) -> Iterator[Ranks]:
    """Yield the result of each slice, in order. Each worker has its own block and, if there are several, one core."""
    mine = threading.local()

    def task(part: slice) -> Ranks:
        if not hasattr(mine, "block"):
            mine.block = points.new_empty(parts[0].stop, len(points))
        return work(part, mine.block[: part.stop - part.start])

    if points.is_cuda:
        yield from map(task, parts)
        return
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    blas = torch.get_num_threads() if workers == 1 else 1
    with threadpool_limits(blas, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        yield from pool.map(task, parts)


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
    return _Gallery(points, columns, self_column, *_copies(points))


def _columns(sides: Sides) -> tuple[Tensor, Callable[[slice], tuple[Tensor, Tensor]]]:
    """The order in which the gallery is held, and the columns of each query's relevant items.

    These are, for a slice of B queries, columns [B, W] that may include the query's own, and which of them count
    [B, W]; those that do not repeat one that does.
    """
    device = sides.gallery.device
    if isinstance(sides.query_labels, LabelSets):
        queries, gallery = sides.query_labels, sides.gallery_labels.transposed()

        def of_sets(part: slice) -> tuple[Tensor, Tensor]:
            columns, counts = queries.sharing(gallery, part)
            return columns.to(device), counts.to(device)

        return torch.arange(len(sides.gallery), device=device), of_sets
    labels, order = sides.gallery_labels.sort()
    first, size = _classes(sides.query_labels, labels)
    step = torch.arange(int(size.max()), device=device)

    def of_classes(part: slice) -> tuple[Tensor, Tensor]:
        counts = step < size[part, None]
        return (first[part, None] + torch.where(counts, step, 0)).clamp_max(len(labels) - 1), counts

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


def _fingerprint(points: Tensor) -> Tensor:
    """A 64-bit hash of each row's bits [G], from integer sums, so independent of device and order of summation."""
    points = points + 0.0  # -0.0 becomes 0.0
    if points.dtype == torch.float64:
        bits = points.view(torch.int64)
        bits = bits ^ (bits >> 32)  # mix the high half into the low one, as sign extension does for int32
    else:
        bits = points.view(torch.int32).long()
    salt = torch.arange(1, points.shape[1] + 1, device=points.device) * 0x2545F4914F6CDD1D
    mixed = (bits ^ salt) * 0x369DEA0F31A53F85
    return ((mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D).sum(1)


def _copies(points: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that repeat an earlier row, and the row that each repeats."""
    rough = _fingerprint(points[:, :4])  # most vectors already differ in their first numbers
    _, number, times = torch.unique(rough, return_inverse=True, return_counts=True)
    suspects = (times[number] > 1).nonzero().flatten()
    keys = torch.cat([_fingerprint(points[part]) for part in torch.split(suspects, 4096)])
    sorted_keys, order = keys.sort(stable=True)
    first = torch.searchsorted(sorted_keys, sorted_keys)  # of each run of equal keys
    again = first != torch.arange(len(keys), device=keys.device)
    return suspects[order[again]], suspects[order[first[again]]]


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


def _take_relevant(block: Tensor, gallery: _Gallery, part: slice) -> Tensor:
    """The scores of each query's relevant items [B, W], best first, padded with −inf.

    They and the query itself are removed from the block (set to −inf), which leaves the items of other classes.
    """
    columns, counts = gallery.columns(part)
    relevant = counts & (columns != gallery.self_column[part, None])
    scores = torch.where(relevant, block.gather(1, columns), -torch.inf)
    block.scatter_(1, columns, -torch.inf)
    if scores.is_cuda:
        return scores.sort(dim=1, descending=True).values
    scores.numpy().sort(axis=1)  # an order of magnitude faster than torch's
    return scores.flip(1)


def _above_on_gpu(block: Tensor, scores: Tensor, deepest: int) -> Tensor:
    """The number of items in the block that score at least as high as each score, at most `deepest`."""
    top = block.topk(deepest, dim=1).values
    return torch.searchsorted(-top, -scores, right=True)


def _above(block: Tensor, scores: Tensor, bound: Tensor) -> Tensor:
    """The same on a CPU by NumPy, which counts several times faster than torch; BEYOND below the bound."""
    above = torch.full(scores.shape, BEYOND)
    rows = zip(block.numpy(), scores.numpy(), bound.tolist(), above.numpy(), strict=True)
    for row, wanted, last, result in rows:
        wanted = wanted[wanted > -np.inf][:last]
        for place, score in enumerate(wanted):
            if place == 1 and len(wanted) > 1 + FEW:
                top = _top(row, last)
                result[1 : len(wanted)] = len(top) - np.searchsorted(top, wanted[1:])
                break
            result[place] = np.count_nonzero(row >= score)
            if result[place] + place >= last:  # it is below the bound, and so are the rest
                break
    return above


def _top(row: NDArray[Any], count: int) -> NDArray[Any]:
    """The `count` highest scores of a row in ascending order, and perhaps some more.

    A long row is folded into layers. The count-th highest of the maxima across them is at most that of the row, and
    only what reaches it is sorted. That takes two passes over the row, and a partition many.
    """
    layers = min(FOLDS, len(row) // (8 * count))
    if layers < 2:
        top = np.partition(row, -count)[-count:]
    else:
        width = len(row) // layers
        highest = row[: layers * width].reshape(layers, width).max(axis=0)
        top = row[row >= np.partition(highest, -count)[-count]]
    top.sort()
    return top
