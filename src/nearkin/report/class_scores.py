"""Test classes one by one: how well each is found, which are hardest, and which are taken for which."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nearkin.report.comparing import class_means
from nearkin.report.study import MAIN, Study


class ClassRow(NamedTuple):
    """A test class."""

    label: int
    name: str
    queries: int
    scores: list[dict[str, float]]  # of each method: metric → percent
    taken_for: str  # the class its queries' nearest neighbours belong to most often, where not its own
    share: float  # of its queries, in percent


class Confusion(NamedTuple):
    """Queries of a class whose nearest neighbour is of another class."""

    label: int
    other: int
    times: int
    share: float  # of the queries of the class, in percent
    query: int  # a row: the query whose nearest neighbour is most similar
    found: int  # its nearest neighbour


def class_rows(methods: Sequence[Sequence[Study]]) -> list[ClassRow]:
    """All classes, those with the lowest mean score first; a method is its runs, confusions are the first run's."""
    first = methods[0][0]
    queries = torch.bincount(first.labels, minlength=first.images.classes).tolist()
    scores = [{metric: class_means(runs, metric) for metric in MAIN} for runs in methods]
    mean = np.mean([own[MAIN[0]] for own in scores], axis=0)
    worst: dict[int, Confusion] = {}
    for found in confusions(first):
        worst.setdefault(found.label, found)
    rows = []
    for c in np.argsort(np.where(np.isnan(mean), np.inf, mean), kind="stable").tolist():
        own = worst.get(c)
        rows.append(
            ClassRow(
                label=c,
                name=first.images.names[c],
                queries=queries[c],
                scores=[{metric: float(values[c]) for metric, values in each.items()} for each in scores],
                taken_for=first.images.names[own.other] if own else "",
                share=own.share if own else 0.0,
            )
        )
    return rows


def confusions(study: Study) -> list[Confusion]:
    """Pairs of classes by how often a query of the one has its nearest neighbour in the other, most often first."""
    counted = ~study.values[MAIN[0]].isnan()
    labels, nearest = study.labels, study.near[:, 0]
    others = study.images.labels[nearest]
    wrong = (counted & (others != labels)).nonzero().flatten()
    counts = Counter(zip(labels[wrong].tolist(), others[wrong].tolist(), strict=True))
    size = torch.bincount(labels[counted], minlength=study.images.classes).tolist()
    example: dict[tuple[int, int], int] = {}
    for place in wrong[study.similarity[wrong, 0].argsort(descending=True, stable=True)].tolist():
        example.setdefault((int(labels[place]), int(others[place])), place)
    found = []
    for (a, b), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        place = example[a, b]
        row, other = int(study.query[place]), int(nearest[place])
        found.append(Confusion(a, b, count, 100 * count / size[a], row, other))
    return found
