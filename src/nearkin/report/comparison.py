"""Runs on one test set compared: scores with intervals, tests of differences, rankings, and the tables of all these."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from nearkin.benchmark.tables import LEVEL
from nearkin.console import NOTHING, PrintedTable, duration
from nearkin.data.images import counted, listed
from nearkin.evaluation import by_class
from nearkin.evaluation.statistics import (
    AverageRanks,
    Comparison,
    Floats,
    Interval,
    average_ranks,
    bootstrap,
    holm,
    mean_words,
    p_words,
    paired_bootstrap,
    paired_t,
    summary,
)
from nearkin.files import Json, short_commit
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun, by_method
from nearkin.training.chosen_view import describe_view
from nearkin.training.expected import describe_expected
from nearkin.training.run_folder import CHOSEN

DRAWS = 4e7  # random numbers per bootstrap, at most: a second or two
FEWEST_CLASSES = 10  # with fewer, Nemenyi's approximation is poor


class PairTest(NamedTuple):
    """Two methods and the test of their difference; p is Holm-corrected over all pairs of the same table."""

    a: str
    b: str
    test: Comparison
    p_queries: float  # of the bootstrap over queries, also corrected; NaN for a test over seeds

    @property
    def verdict(self) -> str:
        """The result in words; a method is called better only if the test is significant."""
        if np.isnan(self.test.p):
            return "cannot be tested"
        if self.test.p >= LEVEL:
            return "no significant difference"
        return f"{self.a if self.test.difference > 0 else self.b} is better"


class Intervals(NamedTuple):
    """Intervals of a score over queries and over classes."""

    queries: Interval
    classes: Interval


def intervals(run: MeasuredRun, metric: str) -> Intervals:
    """Percentile bootstrap intervals of a score at 95 %."""
    values, labels = run.values[metric].numpy(), run.labels.numpy()
    return Intervals(
        bootstrap(values, resamples=resamples(len(values))),
        bootstrap(values, groups=labels, resamples=resamples(run.images.classes)),
    )


def resamples(units: int) -> int:
    """Number of bootstrap resamples of `units` units, bounded by `DRAWS`."""
    return int(min(10_000, max(1_000, DRAWS / max(units, 1))))


def seed_tests(runs: Sequence[MeasuredRun], metric: str) -> list[PairTest]:
    """Paired t-tests over seeds, for methods that share at least two: they compare the methods."""
    pairs = []
    for (a, first), (b, second) in combinations(by_method(runs).items(), 2):
        ours, theirs = ({run.seed: run.score(metric) for run in group} for group in (first, second))
        shared = sorted(ours.keys() & theirs.keys())
        if len(shared) > 1:
            pairs.append(PairTest(a, b, paired_t([ours[s] for s in shared], [theirs[s] for s in shared]), np.nan))
    return _corrected(pairs)


def model_tests(runs: Sequence[MeasuredRun], metric: str) -> list[PairTest]:
    """Paired bootstraps over classes and over queries for all other pairs: they compare one model of each method."""
    tested = {(pair.a, pair.b) for pair in seed_tests(runs, metric)}
    pairs = []
    for (a, first), (b, second) in combinations(by_method(runs).items(), 2):
        if (a, b) not in tested:
            one, other = first[0], second[0]
            values = one.values[metric].numpy(), other.values[metric].numpy()
            labels = one.labels.numpy()
            over_classes = paired_bootstrap(*values, groups=labels, resamples=resamples(one.images.classes))
            over_queries = paired_bootstrap(*values, resamples=resamples(len(labels)))
            pairs.append(PairTest(a, b, over_classes, over_queries.p))
    return _corrected(pairs)


def _corrected(pairs: Sequence[PairTest]) -> list[PairTest]:
    by_classes, by_queries = holm([pair.test.p for pair in pairs]), holm([pair.p_queries for pair in pairs])
    return [
        pair._replace(test=pair.test._replace(p=float(p)), p_queries=float(q))
        for pair, p, q in zip(pairs, by_classes, by_queries, strict=True)
    ]


class Ranking(NamedTuple):
    """Methods ranked class by class."""

    names: list[str]
    ranks: AverageRanks
    why_not: str  # why no diagram is drawn; empty if one is

    @property
    def differ(self) -> bool:
        """Whether Friedman's test is significant; only then are pairs compared."""
        return self.ranks.p < LEVEL

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of methods without a significant difference."""
        return self.ranks.groups if self.differ else (tuple(int(i) for i in np.argsort(self.ranks.ranks)),)


def class_ranking(runs: Sequence[MeasuredRun], metric: str) -> Ranking:
    """Friedman and Nemenyi tests with the test classes as blocks; a method's score is the mean over its runs."""
    groups = by_method(runs)
    table = np.stack([class_means(group, metric) for group in groups.values()], axis=1)
    ranks = average_ranks(table, level=LEVEL)
    why = ""
    if len(groups) < 3:
        why = "It needs at least three methods: for two, see the paired test."
    elif ranks.blocks < FEWEST_CLASSES:
        why = f"It needs at least {FEWEST_CLASSES} test classes with a score; there are {ranks.blocks}."
    return Ranking(list(groups), ranks, why)


def class_means(runs: Sequence[MeasuredRun], metric: str) -> Floats:
    """Mean score of each test class [C] over some runs; NaN for a class without a scored query."""
    table = np.full((len(runs), runs[0].images.classes), np.nan)
    for number, run in enumerate(runs):
        classes, means = by_class(run.values[metric], run.labels)
        table[number, classes.numpy()] = means.numpy()
    return np.asarray(table.mean(axis=0), dtype=np.float64)


# Tables.

OVER_SEEDS = (
    "Paired t-test over the seeds that both methods have: it compares the methods. p is Holm-corrected over the pairs "
    f"of this table, the interval is not; a method is called better if p < {LEVEL}. d: Cohen's d_z."
)
OVER_MODELS = (
    "Paired bootstrap of one trained model against another on the same queries: it compares these models. Comparing "
    "the methods takes several seeds. Classes are resampled, because queries of a class succeed and fail together; the "
    "p over queries is given for comparison. Both p are Holm-corrected over the pairs of this table, the interval is "
    f"not; a model is called better if the p over classes is below {LEVEL}."
)


def run_tables(runs: Sequence[MeasuredRun]) -> list[PrintedTable]:
    """All tables of a report, for Markdown and LaTeX."""
    if len(runs) > 1:
        return [facts_table(runs), score_table(runs), *comparison_tables(runs)]
    facts = PrintedTable("Run", ["", runs[0].label.run], [list(pair) for pair in run_facts(runs[0])], [])
    return [facts, score_table(runs)]


def score_table(runs: Sequence[MeasuredRun]) -> PrintedTable:
    """For one run a row per metric with intervals; for several a row per method with the mean over seeds."""
    return _one_run(runs[0]) if len(runs) == 1 else _several_runs(runs)


def _one_run(run: MeasuredRun) -> PrintedTable:
    header = ["", "score", "95 % over queries", "95 % over classes", "before training"]
    cells = []
    for metric in run.metrics:
        before = run.result["before"].get(metric)
        row = [metric, f"{run.score(metric):.2f}"]
        if metric in run.values:
            row += [_interval(found) for found in intervals(run, metric)]
        else:
            row += [NOTHING, NOTHING]
        cells.append([*row, NOTHING if before is None else f"{before:.2f}"])
    queries, classes = len(run.query), run.images.classes
    notes = [
        f"Percent, on {counted(classes, 'test class', 'test classes')}, {run.tested}. Intervals: percentile "
        f"bootstrap, {resamples(queries):,} resamples of queries and {resamples(classes):,} of classes. Queries of a "
        "class succeed and fail together, so trust the interval over classes if a class has many queries. Neither "
        "interval covers the variation between seeds.",
        *differing_scores([run]),
    ]
    return PrintedTable("Scores", header, cells, notes)


def _several_runs(runs: Sequence[MeasuredRun]) -> PrintedTable:
    groups = by_method(runs)
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    seeds = any(len(group) > 1 for group in groups.values())
    cells = []
    for name, group in groups.items():
        row = [name, str(len(group))] if seeds else [name]
        for metric in metrics:
            found = summary([run.score(metric) for run in group])
            row.append(mean_words(found) if found.n else NOTHING)
        if not seeds:
            row.append(_interval(intervals(group[0], MAIN_METRICS[0]).classes))
        cells.append(row)
    header = ["", "seeds", *metrics] if seeds else ["", *metrics, f"{MAIN_METRICS[0]}: 95 % over classes"]
    first = runs[0]
    notes = [
        f"Percent, on {counted(first.images.classes, 'test class', 'test classes')}, {first.tested}; "
        f"{len(first.query):,} queries."
        + (" ± is the standard error over seeds." if seeds else " One run each: a difference may be due to the seed."),
        *differing_scores(runs),
    ]
    return PrintedTable("Scores", header, cells, notes)


def _interval(found: Interval) -> str:
    return NOTHING if math.isnan(found.low) else f"{found.low:.2f} to {found.high:.2f}"


def differing_scores(runs: Sequence[MeasuredRun]) -> list[str]:
    """Sentences about runs whose stored score differs from the one measured now: other hardware, data, or folds."""
    sentences, differing = [], []
    for run in runs:
        stored = {metric: run.result["scores"][metric] for metric in run.values if metric in run.result["scores"]}
        if parts := run.config.get("parts"):
            means = ", ".join(f"{metric} {score:.2f}" for metric, score in stored.items())
            sentences.append(
                f"{run.label.run} is {len(parts)} models with their embeddings concatenated. The mean of their "
                f"separate scores: {means}."
            )
        else:
            other = {metric: score for metric, score in stored.items() if abs(score - run.score(metric)) > 0.1}
            differing += [f"{run.label.run} ({metric} {score:.2f})" for metric, score in other.items()]
    if differing:
        sentences.append(f"Scores were measured again for this report; the stored ones differ for {listed(differing)}.")
    return sentences


def comparison_tables(runs: Sequence[MeasuredRun]) -> list[PrintedTable]:
    """The tests between methods, by each of the main metrics."""
    tables = []
    for metric in MAIN_METRICS:
        over_seeds, of_models = seed_tests(runs, metric), model_tests(runs, metric)
        if over_seeds:
            header = ["", "seeds", "difference", "95 %", "p", "d", ""]
            cells = [_seed_cells(pair) for pair in over_seeds]
            tables.append(PrintedTable(f"{metric}: methods over seeds", header, cells, [OVER_SEEDS]))
        if of_models:
            header = ["", "classes", "difference", "95 % over classes", "p over classes", "p over queries", ""]
            cells = [_model_cells(pair) for pair in of_models]
            tables.append(PrintedTable(f"{metric}: model against model", header, cells, [OVER_MODELS]))
    return tables


def _seed_cells(pair: PairTest) -> list[str]:
    effect = NOTHING if math.isnan(pair.test.effect) else _signed(pair.test.effect, 1)
    return [*_pair_cells(pair), p_words(pair.test.p), effect, pair.verdict]


def _model_cells(pair: PairTest) -> list[str]:
    return [*_pair_cells(pair), p_words(pair.test.p), p_words(pair.p_queries), pair.verdict]


def _pair_cells(pair: PairTest) -> list[str]:
    test = pair.test
    bounds = NOTHING if math.isnan(test.low) else f"{_signed(test.low, 2)} to {_signed(test.high, 2)}"
    return [f"{pair.a} − {pair.b}", str(test.n), _signed(test.difference, 2), bounds]


def _signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f}".replace("-", "−")


def run_facts(run: MeasuredRun) -> list[tuple[str, str]]:
    """What a reader must know to compare a run with another."""
    plan, result = run.config["plan"], run.result
    resolved = run.config.get("resolved", {})
    speed = f", {result['images_per_second']:,.0f} images/s" if result["images_per_second"] else ""
    trained = (
        f"{resolved['training_images']:,} images of {resolved['training_classes']:,} classes, "
        if "training_images" in resolved
        else ""
    )
    left_out = f", {result['left_out']:,} without a same-class image left out" if result["left_out"] else ""
    unreadable = len(result.get("unreadable", []))
    return [
        ("method", run.config["method"]),
        ("data", plan["data"]),
        ("test set", f"{len(run.images):,} images of {run.images.classes:,} classes, {run.tested}"),
        ("queries", f"{result['queries'] or len(run.query):,}{left_out}"),
        ("epoch chosen by", f"{CHOSEN[result['select']]} (epoch {result['kept_epoch']:g} of {plan['epochs']})"),
        ("seed", str(result["seed"])),
        ("backbone", f"{plan['backbone']}, {_weights(run.config)}"),
        ("test images", describe_view(chosen) if (chosen := result.get("test_view")) else f"{run.size} px"),
        ("embedding", f"{run.points.shape[1]} dimensions, {run.space} space"),
        ("training", f"{trained}batch {plan['batch']}, {plan['optimiser']} at {plan['lr']:g}"),
        ("time", f"{duration(result['seconds'])}{speed}"),
        ("hardware", f"{result['hardware']}, {plan['precision']}"),
        ("commit", short_commit(result["commit"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("date", result["date"]),
        *([("expected scores", _expected(result["expected"]))] if "expected" in result else []),
        *([("unreadable images", str(unreadable))] if unreadable else []),
    ]


def _weights(config: Json) -> str:
    start = config.get("start")
    return f"started from the run {start['run']}" if start else f"{config['plan']['weights']} weights"


def _expected(expected: Json) -> str:
    scores = ", ".join(f"{name} {value:.1f}" for name, value in expected["scores"].items())
    return f"{scores}. {describe_expected(expected)}"


def facts_table(runs: Sequence[MeasuredRun]) -> PrintedTable:
    """The facts of several runs side by side; those that all runs share stand once in a note."""
    runs = [run for group in by_method(runs).values() for run in group]
    facts = [dict(run_facts(run)) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    differing = [name for name in names if name != "date" and len({each.get(name, "") for each in facts}) > 1]
    cells = [
        [run.label.run, *(each.get(name, "") for name in differing)] for run, each in zip(runs, facts, strict=True)
    ]
    same = [f"{name}: {facts[0][name]}" for name in names if name not in (*differing, "date")]
    return PrintedTable("Runs", ["", *differing], cells, [f"The same for all: {'; '.join(same)}."] if same else [])
