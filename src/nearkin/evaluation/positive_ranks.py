"""Where a query's relevant items stand in its ranking: all that a retrieval metric needs to know.

Blocks of similarities (some queries × the whole gallery) are streamed; in each, one counts how many items of other
classes score at least as high as each relevant item. Nothing is sorted but the few items that matter, and nothing of
the size queries × gallery is ever held.

The tie rule: an item of another class that scores exactly as high as a relevant item stands BEFORE it. So ranks depend
neither on the order of the gallery nor on luck, and embeddings that are all alike score 0, not 100. Matrix products
may round equal columns differently, so gallery items with equal vectors are made to score equal.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.space import Space

"""Where an inner product alone does not order a gallery."""

BEYOND = 2**40
"""Added to the rank of an item that lies beyond the depth asked for: larger than any gallery."""

FEW = 8
"""Up to so many relevant items it is cheaper on a CPU to count for each than to find the top of the row first."""


class Sides(NamedTuple):
    """Who is searched for where. Both sides lie on one device, in one dtype, float32 or float64."""

    queries: Tensor  # [Q, D]
    query_labels: Tensor  # [Q] int64
    gallery: Tensor  # [G, D]
    gallery_labels: Tensor  # [G] int64
    own: Tensor  # [Q] int64: where the query itself stands in the gallery, -1 where it does not


class Depth(NamedTuple):
    """How far down a ranking matters: to place k, and with `r` to place R, the number of the query's relevant items."""

    k: int
    r: bool

    def of(self, relevant: Tensor) -> Tensor:
        """The last place that matters, per query."""
        return relevant.clamp_min(self.k) if self.r else torch.full_like(relevant, self.k)


class Ranks(NamedTuple):
    """The places of the relevant items of B queries."""

    rank: Tensor  # [B, M ≥ min(R, depth)] int64, ascending, 1 the nearest; exact to the depth, below it just larger
    relevant: Tensor  # [B] int64: R, how many relevant items there are


class _Gallery(NamedTuple):
    points: Tensor  # [G, D] sorted by class, so that a query's relevant items are neighbouring columns of a block
    first: Tensor  # [Q] the column where the query's class begins
    size: Tensor  # [Q] how many columns it has
    own: Tensor  # [Q] the query's own column, -1 where it has none
    copies: Tensor  # columns with the same vector as an earlier one
    originals: Tensor  # that earlier one


def count_relevant(sides: Sides) -> Tensor:
    """How many relevant items each query has in the gallery [Q], itself not counted."""
    _, size = _classes(sides.query_labels, sides.gallery_labels.sort().values)
    return size - (sides.own >= 0).long()


def stream_ranks(sides: Sides, *, space: Space, depth: Depth) -> Iterator[tuple[slice, Ranks]]:
    """For one block of queries after another: which queries, and the ranks of their relevant items."""
    gallery = _arrange(sides, space)
    relevant = gallery.size - (gallery.own >= 0).long()
    bound = depth.of(relevant).clamp_max(len(gallery.points))
    widest, deepest = int(gallery.size.max()), int(bound.max())

    def ranks(part: slice, block: Tensor) -> Ranks:
        _product(_points(sides.queries[part], space, query=True), gallery.points, out=block)
        if len(gallery.copies):
            block[:, gallery.copies] = block[:, gallery.originals]
        scores = _take_relevant(block, gallery, part, widest)[:, :deepest]
        above = _above_on_gpu(block, scores, deepest) if block.is_cuda else _above(block, scores, bound[part])
        place = torch.arange(1, scores.shape[1] + 1, device=block.device)
        missing = place > relevant[part, None]
        return Ranks((above + place).masked_fill_(missing, BEYOND), relevant[part])

    workers, rows = _split_work(gallery.points, widest, len(relevant))
    parts = [slice(i, min(i + rows, len(relevant))) for i in range(0, len(relevant), rows)]
    yield from zip(parts, _run(ranks, parts, gallery.points, workers), strict=True)


def _run(work: Callable[[slice, Tensor], Ranks], parts: list[slice], points: Tensor, workers: int) -> Iterator[Ranks]:
    """The work on each part, in order. Each worker has a block of its own and, if there are several, one core."""
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
    """The gallery as points of the space, sorted by class; chunk by chunk, so that one copy of it is all it takes."""
    labels, order = sides.gallery_labels.sort()
    width = sides.gallery.shape[1] + space.by_distance
    points = sides.gallery.new_empty(len(order), width)
    for start in range(0, len(order), chunk):
        part = slice(start, start + chunk)
        points[part] = _points(sides.gallery[order[part]], space, query=False)
    column = torch.empty_like(order)
    column[order] = torch.arange(len(order), device=order.device)
    own = torch.where(sides.own >= 0, column[sides.own.clamp_min(0)], -1)
    return _Gallery(points, *_classes(sides.query_labels, labels), own, *_copies(points))


def _classes(query_labels: Tensor, sorted_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where each query's class begins among the sorted labels, and its size there."""
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
    """A 64-bit hash of each row's bits [G]: integer sums, so the same wherever and in whatever order it is computed."""
    points = points + 0.0  # -0.0 becomes 0.0
    if points.dtype == torch.float64:
        bits = points.view(torch.int64)
        bits = bits ^ (bits >> 32)  # as the sign of an int32 does by itself: into the low half, or it hardly mixes
    else:
        bits = points.view(torch.int32).long()
    salt = torch.arange(1, points.shape[1] + 1, device=points.device) * 0x2545F4914F6CDD1D
    mixed = (bits ^ salt) * 0x369DEA0F31A53F85
    return ((mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D).sum(1)


def _copies(points: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that repeat an earlier one, and for each the row it repeats."""
    rough = _fingerprint(points[:, :4])  # most vectors differ in their first numbers already
    _, number, times = torch.unique(rough, return_inverse=True, return_counts=True)
    suspects = (times[number] > 1).nonzero().flatten()
    keys = torch.cat([_fingerprint(points[part]) for part in torch.split(suspects, 4096)])
    sorted_keys, order = keys.sort(stable=True)
    first = torch.searchsorted(sorted_keys, sorted_keys)  # of each run of equal keys
    again = first != torch.arange(len(keys), device=keys.device)
    return suspects[order[again]], suspects[order[first[again]]]


def _split_work(points: Tensor, widest: int, queries: int) -> tuple[int, int]:
    """How many workers, and how many queries a block: some 256 MB in all (512 MB on a GPU), but at least 64 queries.

    A worker for each core keeps all busy where a product by all cores and counting in turn does not; a gallery too
    large for so many blocks gets one worker, whose product uses all cores.
    """
    bytes_per_row = len(points) * points.element_size() + 32 * widest
    fitting = (2**29 if points.is_cuda else 2**28) // bytes_per_row
    threads = 1 if points.is_cuda else torch.get_num_threads()
    workers = threads if fitting >= 64 * threads else 1
    return workers, min(max(64, fitting // workers // 64 * 64), -(-queries // workers))


def _product(x: Tensor, v: Tensor, *, out: Tensor) -> None:
    """x·vᵀ in full precision. On a CPU by NumPy, whose BLAS was measured up to half as fast again as torch's."""
    if not out.is_cuda:
        np.dot(x.numpy(), v.numpy().T, out=out.numpy())
        return
    with _no_tf32():
        torch.mm(x, v.T, out=out)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Ten bits of mantissa would make ties of what is none. Whichever of torch's two switches was used is put back."""
    matmul = torch.backends.cuda.matmul
    if matmul.fp32_precision != "tf32":
        yield
        return
    name: str = "allow_tf32"
    off: bool | str = False
    try:
        old = getattr(matmul, name)
    except RuntimeError:  # the user set the newer switch, and reading the older one is an error then
        name, old, off = "fp32_precision", "tf32", "ieee"
    setattr(matmul, name, off)
    try:
        yield
    finally:
        setattr(matmul, name, old)


def _take_relevant(block: Tensor, gallery: _Gallery, part: slice, widest: int) -> Tensor:
    """The scores of each query's relevant items [B, widest], best first, −inf where there are fewer.

    They and the query itself are taken out of the block (−inf): what is left there are items of other classes.
    """
    first, size, own = gallery.first[part, None], gallery.size[part, None], gallery.own[part, None]
    step = torch.arange(widest, device=block.device)
    columns = (first + torch.where(step < size, step, 0)).clamp_max(block.shape[1] - 1)
    relevant = (step < size) & (columns != own)
    scores = torch.where(relevant, block.gather(1, columns), -torch.inf)
    block.scatter_(1, columns, -torch.inf)
    return scores.sort(dim=1, descending=True).values


def _above_on_gpu(block: Tensor, scores: Tensor, deepest: int) -> Tensor:
    """How many items of the block score at least as high as each score; `deepest` stands for that many or more."""
    top = block.topk(deepest, dim=1).values
    return torch.searchsorted(-top, -scores, right=True)


def _above(block: Tensor, scores: Tensor, bound: Tensor) -> Tensor:
    """The same on a CPU by NumPy, which counts several times faster than torch; BEYOND below the bound."""
    above = torch.full(scores.shape, BEYOND)
    rows = zip(block.numpy(), scores.numpy(), bound.tolist(), above.numpy(), strict=True)
    for row, wanted, last, result in rows:
        wanted = wanted[wanted > -np.inf][:last]
        if len(wanted) > FEW:
            top = np.partition(row, -last)[-last:]
            top.sort()
            result[: len(wanted)] = last - np.searchsorted(top, wanted)
            continue
        for place, score in enumerate(wanted):
            result[place] = np.count_nonzero(row >= score)
            if result[place] + place >= last:  # it lies below the bound, and so do the rest
                break
    return above
