"""How much of the truth an approximate index finds."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from nearkin.index.base import Floats, Hit, Index

QUERIES = 200
TARGET = 0.95
EFFORTS = (64, 128, 256, 512, 1000)  # more: PostgreSQL allows no more than 1000
SLACK = 1e-5  # stores round similarities differently, and equals may change places


class Truth(NamedTuple):
    """Items of the index as queries, and what an exact search finds for them, themselves left out."""

    queries: "Floats"
    ids: list[str]
    hits: "list[list[Hit]]"


def find_truth(index: "Index", *, k: int = 10, queries: int = QUERIES) -> Truth:
    """An exact search for some of the index's own items, always the same ones."""
    known = index.items().ids
    chosen = np.sort(np.random.default_rng(0).permutation(len(known))[:queries])
    ids = [known[row] for row in chosen.tolist()]
    vectors = index.embeddings(ids)
    found = index.search(vectors, k + 1, exact=True)
    return Truth(vectors, ids, [_others(hits, own, k) for hits, own in zip(found, ids, strict=True)])


def recall(index: "Index", truth: Truth) -> float:
    """The part of the true neighbours, or of items just as near, that the index finds."""
    k = len(truth.hits[0])
    found = index.search(truth.queries, k + 1)
    shares = [
        sum(hit.similarity >= true[-1].similarity - SLACK for hit in _others(hits, own, k)) / len(true)
        for hits, own, true in zip(found, truth.ids, truth.hits, strict=True)
    ]
    return float(np.mean(shares))


def _others(hits: "list[Hit]", own: str, k: int) -> "list[Hit]":
    return [hit for hit in hits if hit.id != own][:k]
