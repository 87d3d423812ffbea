"""Exact search: compare every query with every item, in blocks that fit the processor's cache.

A block's scores are compared with the k-th best score of each query so far, and only the few better ones are sorted.
The final candidates are scored again in float64, so that a similarity depends neither on the other queries nor on the
block size.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.search.index.base import Floats
from nearkin.space import Space

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

QUERIES = 256  # compared at once; each pass reads all vectors from memory
SCORES = 2**19  # per block: 2 MiB
SPARE = 8  # extra candidates, since float32 products may swap close neighbours
MANY = 4  # times k candidates per query and block: beyond that, partitioning the block is faster than sorting


class Pieces:
    """Vectors [N, D] in several arrays, such as mapped files, as if they were one."""

    def __init__(self, arrays: Sequence[Floats], dim: int) -> None:
        self.arrays, self.dim = [array for array in arrays if len(array)], dim
        self.starts = np.cumsum([0, *map(len, self.arrays)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: Ints) -> Floats:
        """The vectors [*, D] of some rows [*]."""
        found = np.empty((*rows.shape, self.dim), np.float32)
        piece = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(piece).tolist():
            here = piece == number
            found[here] = self.arrays[number][rows[here] - self.starts[number]]
        return found

    def blocks(self, size: int) -> Iterator[tuple[Ints, Floats]]:
        """All rows with their vectors, at most `size` at once."""
        for first, array in zip(self.starts.tolist(), self.arrays, strict=False):
            for start in range(0, len(array), size):
                block = array[start : start + size]
                yield np.arange(first + start, first + start + len(block)), block

    def blocks_of(self, rows: Ints, size: int) -> Iterator[tuple[Ints, Floats]]:
        """The same for some rows."""
        for start in range(0, len(rows), size):
            yield rows[start : start + size], self.take(rows[start : start + size])


class _Best(NamedTuple):
    """The best items of each query so far, unordered."""

    scores: Floats  # [Q, k]
    rows: Ints  # [Q, k]; -1: none yet


def search_exact(
    vectors: Floats | Pieces, queries: Floats, k: int, *, space: Space, wanted: Mask | None = None
) -> tuple[Ints, Floats]:
    """Rows and similarities [Q, k] of the nearest wanted vectors, best first; fewer columns if there are fewer."""
    pieces = vectors if isinstance(vectors, Pieces) else Pieces([vectors], vectors.shape[1])
    rows = None if wanted is None else np.flatnonzero(wanted)
    count = len(pieces) if rows is None else len(rows)
    candidates = np.empty((len(queries), min(k + SPARE, count)), np.int64)
    for start in range(0, len(queries), QUERIES):
        block = queries[start : start + QUERIES]
        size = max(1, SCORES // len(block))
        blocks = pieces.blocks(size) if rows is None else pieces.blocks_of(rows, size)
        candidates[start : start + QUERIES] = nearest(blocks, block, candidates.shape[1], space)
    found, s = rescore(pieces, queries, candidates, space=space)
    return found[:, :k], s[:, :k]


def nearest(blocks: Iterable[tuple[Ints, Floats]], queries: Floats, k: int, space: Space) -> Ints:
    """The rows [Q, k] of the nearest vectors in blocks of rows and vectors, unordered; -1 if there are fewer."""
    best = _Best(np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1))
    for rows, block in blocks:
        scores = block @ queries.T  # a quarter faster than queries @ block.T
        if space.by_distance:  # 1 − ‖x − v‖²/2 differs from x·v − ‖v‖²/2 by a constant of the query
            scores -= np.einsum("nd,nd->n", block, block)[:, None] / 2
        place, query = _better(scores, best)
        if len(query):
            best = _merged(best, query, scores[place, query], rows[place])
    return best.rows


def _better(scores: Floats, best: _Best) -> tuple[Ints, Ints]:
    """Rows and columns of scores [N, Q] that may be among the k best of their query."""
    count, k = best.scores.shape
    above = np.flatnonzero(scores > best.scores.min(1))
    if len(above) > MANY * count * k and k < len(scores):
        place = np.argpartition(scores.T, -k, axis=1)[:, -k:]
        return np.sort(place, axis=1).ravel(), np.repeat(np.arange(count), k)
    return np.divmod(above, count)


def _merged(best: _Best, query: Ints, scores: Floats, rows: Ints) -> _Best:
    """The best of the known and the new candidates; ties go to the earlier row."""
    count, k = best.scores.shape
    query = np.concatenate([np.repeat(np.arange(count), k), query])
    scores, rows = np.concatenate([best.scores.ravel(), scores]), np.concatenate([best.rows.ravel(), rows])
    order = np.lexsort((-scores, query))  # stable: known candidates win ties
    first = np.searchsorted(query[order], np.arange(count))
    top = order[first[:, None] + np.arange(k)]
    return _Best(scores[top], rows[top])


def rescore(vectors: Pieces, queries: Floats, found: Ints, *, space: Space) -> tuple[Ints, Floats]:
    """Sort candidate rows [Q, k] by similarity, best first, ties by row; rows of -1 come last with −inf."""
    s = np.empty(found.shape, np.float32)
    for start in range(0, len(queries), QUERIES):
        block = slice(start, start + QUERIES)
        s[block] = similarity(queries[block, None], vectors.take(np.maximum(found[block], 0)), space)
    s[found < 0] = -np.inf
    order = np.lexsort((found, -s))
    return np.take_along_axis(found, order, 1), np.take_along_axis(s, order, 1)


def similarity(x: Floats, v: Floats, space: Space) -> NDArray[np.float64]:
    """Similarities of points along their last dimension, as `Space.rowwise` does, in float64."""
    a, b = x.astype(np.float64), v.astype(np.float64)
    s: NDArray[np.float64] = 1 - np.square(a - b).sum(-1) / 2 if space.by_distance else (a * b).sum(-1)
    return s
