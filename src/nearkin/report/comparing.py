"""Runs against runs on one test set: which differences are more than chance, and what each test speaks about."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from nearkin.benchmark.tables import LEVEL
from nearkin.evaluation import by_class
from nearkin.evaluation.statistics import (
    AverageRanks,
    Comparison,
    Floats,
    Interval,
    average_ranks,
    bootstrap,
    holm,
    paired_bootstrap,
    paired_t,
)
from nearkin.report.measured_runs import Study, by_method

DRAWS = 4e7  # numbers drawn for one bootstrap, at most: a second or two
FEWEST_CLASSES = 10  # below, Nemenyi's approximation says nothing


class Pair(NamedTuple):
    """Two methods and the test of their difference; p is Holm's over all pairs of the same table."""

    a: str
    b: str
    test: Comparison
    p_queries: float  # of the bootstrap over queries, likewise corrected; NaN of a test over seeds

    @property
    def verdict(self) -> str:
        """In words; nothing is called better that the test does not tell apart."""
        if np.isnan(self.test.p):
            return "cannot be tested"
        if self.test.p >= LEVEL:
            return "not told apart"
        return f"{self.a if self.test.difference > 0 else self.b} is better"


class Intervals(NamedTuple):
    """A score with its interval over queries and over classes."""

    queries: Interval
    classes: Interval


def intervals(study: Study, metric: str) -> Intervals:
    """Percentile bootstrap intervals of a score at 95 %."""
    values, labels = study.values[metric].numpy(), study.labels.numpy()
    return Intervals(
        bootstrap(values, resamples=resamples(len(values))),
        bootstrap(values, groups=labels, resamples=resamples(study.images.classes)),
    )


def resamples(units: int) -> int:
    """How often to resample so many units in bearable time."""
    return int(min(10_000, max(1_000, DRAWS / max(units, 1))))


def seed_tests(studies: Sequence[Study], metric: str) -> list[Pair]:
    """Methods that share two seeds or more, by a paired t-test over them: it speaks about the methods."""
    pairs = []
    for (a, first), (b, second) in combinations(by_method(studies).items(), 2):
        ours, theirs = ({run.seed: run.score(metric) for run in runs} for runs in (first, second))
        shared = sorted(ours.keys() & theirs.keys())
        if len(shared) > 1:
            pairs.append(Pair(a, b, paired_t([ours[s] for s in shared], [theirs[s] for s in shared]), np.nan))
    return _corrected(pairs)


def model_tests(studies: Sequence[Study], metric: str) -> list[Pair]:
    """The other methods, one model each, by a paired bootstrap over classes and over queries: these models only."""
    tested = {(pair.a, pair.b) for pair in seed_tests(studies, metric)}
    pairs = []
    for (a, first), (b, second) in combinations(by_method(studies).items(), 2):
        if (a, b) not in tested:
            one, other = first[0], second[0]
            values = one.values[metric].numpy(), other.values[metric].numpy()
            labels = one.labels.numpy()
            over_classes = paired_bootstrap(*values, groups=labels, resamples=resamples(one.images.classes))
            over_queries = paired_bootstrap(*values, resamples=resamples(len(labels)))
            pairs.append(Pair(a, b, over_classes, over_queries.p))
    return _corrected(pairs)


def _corrected(pairs: Sequence[Pair]) -> list[Pair]:
    by_classes, by_queries = holm([pair.test.p for pair in pairs]), holm([pair.p_queries for pair in pairs])
    return [
        pair._replace(test=pair.test._replace(p=float(p)), p_queries=float(q))
        for pair, p, q in zip(pairs, by_classes, by_queries, strict=True)
    ]


class Ranking(NamedTuple):
    """Methods ranked class by class."""

    names: list[str]
    ranks: AverageRanks
    why_not: str  # why nothing is drawn; empty: it can be

    @property
    def differ(self) -> bool:
        """Whether Friedman's test tells the methods apart at all; only then are pairs compared."""
        return self.ranks.p < LEVEL

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Methods that are not told apart from one another."""
        return self.ranks.groups if self.differ else (tuple(int(i) for i in np.argsort(self.ranks.ranks)),)


def class_ranking(studies: Sequence[Study], metric: str) -> Ranking:
    """Friedman and Nemenyi with the test classes as blocks, each method's score being the mean over its runs."""
    groups = by_method(studies)
    table = np.stack([class_means(runs, metric) for runs in groups.values()], axis=1)
    ranks = average_ranks(table, level=LEVEL)
    why = ""
    if len(groups) < 3:
        why = "It needs three methods or more: with two, see the paired test."
    elif ranks.blocks < FEWEST_CLASSES:
        why = f"It needs at least {FEWEST_CLASSES} test classes with a score; there are {ranks.blocks}."
    return Ranking(list(groups), ranks, why)


def class_means(runs: Sequence[Study], metric: str) -> Floats:
    """The mean score of each test class [C] over some runs; NaN where a class has no query that counts."""
    each = [by_class(run.values[metric], run.labels) for run in runs]
    table = np.full((len(runs), runs[0].images.classes), np.nan)
    for number, (classes, means) in enumerate(each):
        table[number, classes.numpy()] = means.numpy()
    return np.asarray(table.mean(axis=0), dtype=np.float64)


def means(groups: Mapping[str, Sequence[Study]], metric: str) -> dict[str, list[float]]:
    """Method → the scores of its runs."""
    return {name: [run.score(metric) for run in runs] for name, runs in groups.items()}
