"""Retrieval on the test set in detail: scores by class, confusions between classes, similarities of pairs."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluation.statistics import Floats
from nearkin.report.comparison import class_means
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun
from nearkin.space import Space

PAIRS = 100_000  # of each kind, at most


class Confusion(NamedTuple):
    """Queries of one class whose nearest neighbour is of another class."""

    label: int
    other: int
    times: int
    share: float  # of the queries of the class, in percent
    query: int  # a row: the query whose nearest neighbour is most similar
    found: int  # its nearest neighbour


def find_confusions(run: MeasuredRun) -> list[Confusion]:
    """Pairs of classes, sorted by how often a query of the first has its nearest neighbour in the second."""
    scored = ~run.values[MAIN_METRICS[0]].isnan()
    labels, nearest = run.labels, run.nearest[:, 0]
    others = run.images.labels[nearest]
    wrong = (scored & (others != labels)).nonzero().flatten()
    counts = Counter(zip(labels[wrong].tolist(), others[wrong].tolist(), strict=True))
    size = torch.bincount(labels[scored], minlength=run.images.classes).tolist()
    example: dict[tuple[int, int], int] = {}
    for place in wrong[run.similarity[wrong, 0].argsort(descending=True, stable=True)].tolist():
        example.setdefault((int(labels[place]), int(others[place])), place)
    found = []
    for (a, b), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        place = example[a, b]
        row, other = int(run.query[place]), int(nearest[place])
        found.append(Confusion(a, b, count, 100 * count / size[a], row, other))
    return found


class ClassRow(NamedTuple):
    """A test class with its scores."""

    label: int
    name: str
    queries: int
    scores: list[dict[str, float]]  # per method: metric → percent
    confused_with: str  # the other class that most of its queries have their nearest neighbour in, or ""
    share: float  # of its queries, in percent


def class_rows(methods: Sequence[Sequence[MeasuredRun]]) -> list[ClassRow]:
    """All test classes, lowest mean score first. A method is given by its runs; confusions are of the first run."""
    first = methods[0][0]
    queries = torch.bincount(first.labels, minlength=first.images.classes).tolist()
    scores = [{metric: class_means(runs, metric) for metric in MAIN_METRICS} for runs in methods]
    mean = np.mean([each[MAIN_METRICS[0]] for each in scores], axis=0)
    worst: dict[int, Confusion] = {}
    for found in find_confusions(first):
        worst.setdefault(found.label, found)
    rows = []
    for c in np.argsort(np.where(np.isnan(mean), np.inf, mean), kind="stable").tolist():
        confusion = worst.get(c)
        rows.append(
            ClassRow(
                label=c,
                name=first.images.names[c],
                queries=queries[c],
                scores=[{metric: float(values[c]) for metric, values in each.items()} for each in scores],
                confused_with=first.images.names[confusion.other] if confusion else "",
                share=confusion.share if confusion else 0.0,
            )
        )
    return rows


class PairSimilarities(NamedTuple):
    """Similarities of pairs of the same class and of different classes."""

    positive: Floats
    negative: Floats
    complete: bool  # all positive pairs, not a sample
    separation: float


def pair_similarities(run: MeasuredRun, *, limit: int = PAIRS, seed: int = 0) -> PairSimilarities:
    """Similarities between queries and gallery, never of an image with itself; a fixed sample if there are many."""
    rng = torch.Generator().manual_seed(seed)
    labels, query, gallery = run.images.labels, run.query, run.gallery
    q, g, complete = positive_pairs(labels, query, gallery, limit=limit, rng=rng)
    positive = _similarities(run.points, q, g, run.space)
    a, b = _negative_pairs(labels, query, gallery, limit=limit, rng=rng)
    negative = _similarities(run.points, a, b, run.space)
    return PairSimilarities(positive, negative, complete, separation(positive, negative))


def positive_pairs(
    labels: Tensor, query: Tensor, gallery: Tensor, *, limit: int, rng: torch.Generator
) -> tuple[Tensor, Tensor, bool]:
    """Rows of queries and of gallery images of the same class, and whether these are all such pairs."""
    order = gallery[labels[gallery].argsort(stable=True)]
    counts = torch.bincount(labels[order], minlength=int(labels.max()) + 1)
    first = counts.cumsum(0) - counts
    positives = counts[labels[query]] - torch.isin(query, gallery).long()  # per query, without the query itself
    last = positives.cumsum(0)
    total = int(last[-1])
    complete = total <= limit
    pair = torch.arange(total) if complete else torch.randint(total, (limit,), generator=rng).sort().values
    place = torch.searchsorted(last, pair, right=True)
    c = labels[query[place]]
    found = order[first[c] + pair - (last - positives)[place]]
    # The last image of the class, which the count leaves out, takes the place of the query itself.
    found = torch.where(found == query[place], order[first[c] + counts[c] - 1], found)
    return query[place], found, complete


def _negative_pairs(
    labels: Tensor, query: Tensor, gallery: Tensor, *, limit: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of random pairs of different classes; all of them if there are few."""
    if len(query) * len(gallery) <= 4 * limit:
        a, b = query.repeat_interleave(len(gallery)), gallery.repeat(len(query))
    else:
        a = query[torch.randint(len(query), (limit,), generator=rng)]
        b = gallery[torch.randint(len(gallery), (limit,), generator=rng)]
    differ = labels[a] != labels[b]
    return a[differ], b[differ]


def _similarities(points: Tensor, a: Tensor, b: Tensor, space: Space) -> Floats:
    blocks = zip(torch.split(a, 8192), torch.split(b, 8192), strict=True)
    found = [space.rowwise(points[i], points[j]) for i, j in blocks]
    return np.asarray(torch.cat(found).double().numpy() if found else np.empty(0), dtype=np.float64)


def separation(positive: Floats, negative: Floats) -> float:
    """Probability that a positive pair is more similar than a negative one; ties count half, NaN if either is empty."""
    if not len(positive) or not len(negative):
        return float("nan")
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    upto = np.searchsorted(ordered, positive, side="right")
    return float((below + upto).mean() / (2 * len(ordered)))
