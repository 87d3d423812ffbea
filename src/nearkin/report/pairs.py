"""Similarities of pairs of test images: kin and strangers, all of them or a sample that is the same every time."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluation.positive_ranks import BY_DISTANCE
from nearkin.evaluation.statistics import Floats
from nearkin.report.measured_runs import Study
from nearkin.space import Space

PAIRS = 100_000  # of each kind, at most


class PairSimilarities(NamedTuple):
    """Similarities of pairs of one class and of two."""

    kin: Floats
    strangers: Floats
    all_kin: bool  # every pair there is, not a sample
    separation: float  # the chance that a random kin pair is more similar than a random pair of strangers; ties half


def pair_similarities(study: Study, *, limit: int = PAIRS, seed: int = 0) -> PairSimilarities:
    """Similarities between queries and gallery, an image never with itself."""
    rng = torch.Generator().manual_seed(seed)
    labels, query, gallery = study.images.labels, study.query, study.gallery
    q, g, whole = kin_pairs(labels, query, gallery, limit=limit, rng=rng)
    kin = _similarities(study.points, q, g, study.space)
    a, b = _strangers(labels, query, gallery, limit=limit, rng=rng)
    strangers = _similarities(study.points, a, b, study.space)
    return PairSimilarities(kin, strangers, whole, separation(kin, strangers))


def kin_pairs(
    labels: Tensor, query: Tensor, gallery: Tensor, *, limit: int, rng: torch.Generator
) -> tuple[Tensor, Tensor, bool]:
    """Rows of queries and of gallery images of the same class, and whether these are all such pairs."""
    order = gallery[labels[gallery].argsort(stable=True)]
    counts = torch.bincount(labels[order], minlength=int(labels.max()) + 1)
    first = counts.cumsum(0) - counts
    among = torch.isin(query, gallery)
    own = counts[labels[query]] - among.long()  # how many kin a query has, itself not counted
    last = own.cumsum(0)
    total = int(last[-1])
    whole = total <= limit
    pair = torch.arange(total) if whole else torch.randint(total, (limit,), generator=rng).sort().values
    place = torch.searchsorted(last, pair, right=True)
    c = labels[query[place]]
    found = order[first[c] + pair - (last - own)[place]]
    # The query's own place is taken by the last of its class, which the count above has left out.
    found = torch.where(found == query[place], order[first[c] + counts[c] - 1], found)
    return query[place], found, whole


def _strangers(
    labels: Tensor, query: Tensor, gallery: Tensor, *, limit: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of random pairs of different classes; all of them where they are few."""
    if len(query) * len(gallery) <= 4 * limit:
        a, b = query.repeat_interleave(len(gallery)), gallery.repeat(len(query))
    else:
        a = query[torch.randint(len(query), (limit,), generator=rng)]
        b = gallery[torch.randint(len(gallery), (limit,), generator=rng)]
    apart = labels[a] != labels[b]
    return a[apart], b[apart]


def _similarities(points: Tensor, a: Tensor, b: Tensor, space: Space) -> Floats:
    blocks = zip(torch.split(a, 8192), torch.split(b, 8192), strict=True)
    found = [_paired(points[i], points[j], space) for i, j in blocks]
    return np.asarray(torch.cat(found).double().numpy() if found else np.empty(0), dtype=np.float64)


def _paired(x: Tensor, v: Tensor, space: Space) -> Tensor:
    """Similarity [B] of projected points, row with row: x·v, or 1 − ‖x − v‖²/2 where distance is what counts."""
    if space in BY_DISTANCE:
        return 1 - (x - v).square().sum(-1) / 2
    return (x * v).sum(-1)


def separation(kin: Floats, strangers: Floats) -> float:
    """The chance that a kin pair is the more similar one, ties counted half; NaN of nothing."""
    if not len(kin) or not len(strangers):
        return float("nan")
    ordered = np.sort(strangers)
    below = np.searchsorted(ordered, kin, side="left")
    upto = np.searchsorted(ordered, kin, side="right")
    return float((below + upto).mean() / (2 * len(ordered)))
