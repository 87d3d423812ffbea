"""Exact search: compare every query with every item, in blocks that fit the processor's cache.

A block's scores are compared with the k-th best score of each query so far, and only the few better ones are sorted.
The final candidates are scored again in float64, so that a similarity depends neither on the other queries nor on the
block size.
"""

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


class _Best(NamedTuple):
    """The best items of each query so far, unordered."""

    scores: Floats  # [Q, k]
    rows: Ints  # [Q, k]; -1: none yet


def search_exact(
    vectors: Floats, queries: Floats, k: int, *, space: Space, wanted: Mask | None = None
) -> tuple[Ints, Floats]:
    """Rows and similarities [Q, k] of the nearest wanted vectors, best first; fewer columns if there are fewer."""
    rows = None if wanted is None else np.flatnonzero(wanted)
    count = len(vectors) if rows is None else len(rows)
    candidates = np.empty((len(queries), min(k + SPARE, count)), np.int64)
    for start in range(0, len(queries), QUERIES):
        block = slice(start, start + QUERIES)
        candidates[block] = _nearest(vectors, queries[block], candidates.shape[1], space, rows)
    found, s = rescore(vectors, queries, candidates, space=space)
    return found[:, :k], s[:, :k]


def _nearest(vectors: Floats, queries: Floats, k: int, space: Space, rows: Ints | None) -> Ints:
    """The rows [Q, k] of the nearest vectors, or of the nearest among `rows`, unordered."""
    best = _Best(np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1))
    size = max(1, SCORES // len(queries))
    for start in range(0, len(vectors) if rows is None else len(rows), size):
        number = None if rows is None else rows[start : start + size]
        block = vectors[start : start + size] if number is None else vectors[number]
        scores = block @ queries.T  # a quarter faster than queries @ block.T
        if space.by_distance:  # 1 − ‖x − v‖²/2 differs from x·v − ‖v‖²/2 by a constant of the query
            scores -= np.einsum("nd,nd->n", block, block)[:, None] / 2
        place, query = _better(scores, best)
        if len(query):
            found = place + start if number is None else number[place]
            best = _merged(best, query, scores[place, query], found)
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


def rescore(vectors: Floats, queries: Floats, found: Ints, *, space: Space) -> tuple[Ints, Floats]:
    """Sort candidate rows [Q, k] by similarity, best first, ties by row; rows of -1 come last with −inf."""
    s = np.empty(found.shape, np.float32)
    for start in range(0, len(queries), QUERIES):
        block = slice(start, start + QUERIES)
        s[block] = similarity(queries[block, None], vectors[found[block]], space)
    s[found < 0] = -np.inf
    order = np.lexsort((found, -s))
    return np.take_along_axis(found, order, 1), np.take_along_axis(s, order, 1)


def similarity(x: Floats, v: Floats, space: Space) -> NDArray[np.float64]:
    """Similarities of points along their last dimension, as `Space.rowwise` does, in float64."""
    a, b = x.astype(np.float64), v.astype(np.float64)
    s: NDArray[np.float64] = 1 - np.square(a - b).sum(-1) / 2 if space.by_distance else (a * b).sum(-1)
    return s
