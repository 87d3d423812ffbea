"""Tables of runs: what they are, their scores with intervals, and the tests between them."""

import math
from collections.abc import Sequence

from nearkin.benchmark.tables import LEVEL
from nearkin.console import NOTHING, PrintedTable, duration
from nearkin.data.images import counted, listed
from nearkin.evaluation.statistics import Interval, mean_words, p_words, summary
from nearkin.files import short_commit
from nearkin.report.comparing import Pair, intervals, means, model_tests, resamples, seed_tests
from nearkin.report.measured_runs import MAIN, Study, by_method
from nearkin.training.run_folder import CHOSEN

OVER_SEEDS = (
    "Paired t-test over the seeds both methods have: it speaks about the methods. p is Holm's over the pairs of this "
    f"table, the interval that of the pair alone; a method is called better where p < {LEVEL}. d: Cohen's d_z."
)
OVER_MODELS = (
    "Paired bootstrap of one trained model against another on the same queries: it speaks about these models, not "
    "about the methods, which takes several seeds. Classes are resampled, since queries of a class succeed and fail "
    "together; the p over queries alone stands beside it. Both are Holm's over the pairs of this table, the interval "
    f"is that of the pair alone; a model is called better where the p over classes is below {LEVEL}."
)


def score_table(studies: Sequence[Study]) -> PrintedTable:
    """One run: a row a metric with its intervals. Several: a row a method with its mean over seeds."""
    return _one_run(studies[0]) if len(studies) == 1 else _several(studies)


def _one_run(study: Study) -> PrintedTable:
    header = ["", "score", "95 % over queries", "95 % over classes", "before training"]
    cells = []
    for metric in study.metrics:
        before = study.result["before"].get(metric)
        row = [metric, f"{study.score(metric):.2f}"]
        if metric in study.values:
            found = intervals(study, metric)
            row += [_interval(found.queries), _interval(found.classes)]
        else:
            row += [NOTHING, NOTHING]
        cells.append([*row, NOTHING if before is None else f"{before:.2f}"])
    queries, classes = len(study.query), study.images.classes
    notes = [
        f"Percent, on {counted(classes, 'test class', 'test classes')}, {_unseen(study)}. Intervals: percentile "
        f"bootstrap, {resamples(queries):,} resamples of queries and {resamples(classes):,} of classes. Queries of a "
        "class succeed and fail together, so the interval over classes is the one to trust where a class has many; "
        "neither says how the score would vary with the seed.",
        *differing_scores([study]),
    ]
    return PrintedTable("Scores", header, cells, notes)


def _several(studies: Sequence[Study]) -> PrintedTable:
    groups = by_method(studies)
    metrics = list(dict.fromkeys(metric for study in studies for metric in study.metrics))
    seeds = any(len(runs) > 1 for runs in groups.values())
    columns = {metric: means(groups, metric) for metric in metrics}
    cells = []
    for name, runs in groups.items():
        row = [name, str(len(runs))] if seeds else [name]
        for metric in metrics:
            found = summary(columns[metric][name])
            row.append(mean_words(found) if found.n else NOTHING)
        if not seeds:
            row.append(_interval(intervals(runs[0], MAIN[0]).classes))
        cells.append(row)
    header = ["", "seeds", *metrics] if seeds else ["", *metrics, f"{MAIN[0]}: 95 % over classes"]
    first = studies[0]
    notes = [
        f"Percent, on {counted(first.images.classes, 'test class', 'test classes')}, {_unseen(first)}; "
        f"{len(first.query):,} queries."
        + (" ± is the standard error over seeds." if seeds else " One run each: a difference may be the seed's."),
        *differing_scores(studies),
    ]
    return PrintedTable("Scores", header, cells, notes)


def _interval(found: Interval) -> str:
    return NOTHING if math.isnan(found.low) else f"{found.low:.2f} to {found.high:.2f}"


def differing_scores(studies: Sequence[Study]) -> list[str]:
    """Sentences where a run wrote down another score than was measured now: other arithmetic, other data, or folds."""
    joined, apart = [], []
    for study in studies:
        written = {
            metric: study.result["scores"][metric] for metric in study.values if metric in study.result["scores"]
        }
        if parts := study.config.get("parts"):
            own = ", ".join(f"{metric} {score:.2f}" for metric, score in written.items())
            joined.append(
                f"{study.label.run} is {len(parts)} models side by side, measured as one; the mean of their own "
                f"scores: {own}."
            )
        else:
            other = {metric: score for metric, score in written.items() if abs(score - study.score(metric)) > 0.1}
            apart += [f"{study.label.run} ({metric} {score:.2f})" for metric, score in other.items()]
    if apart:
        joined.append(f"Measured anew for this report; the run itself had written down otherwise for {listed(apart)}.")
    return joined


def comparison_tables(studies: Sequence[Study]) -> list[PrintedTable]:
    """The tests between methods, by each of the main metrics."""
    tables = []
    for metric in MAIN:
        over_seeds, of_models = seed_tests(studies, metric), model_tests(studies, metric)
        if over_seeds:
            header = ["", "seeds", "difference", "95 %", "p", "d", ""]
            cells = [_seed_cells(pair) for pair in over_seeds]
            tables.append(PrintedTable(f"{metric}: methods over seeds", header, cells, [OVER_SEEDS]))
        if of_models:
            header = ["", "classes", "difference", "95 % over classes", "p over classes", "p over queries", ""]
            cells = [_model_cells(pair) for pair in of_models]
            tables.append(PrintedTable(f"{metric}: model against model", header, cells, [OVER_MODELS]))
    return tables


def _seed_cells(pair: Pair) -> list[str]:
    effect = NOTHING if math.isnan(pair.test.effect) else _signed(pair.test.effect, 1)
    return [*_pair_cells(pair), p_words(pair.test.p), effect, pair.verdict]


def _model_cells(pair: Pair) -> list[str]:
    return [*_pair_cells(pair), p_words(pair.test.p), p_words(pair.p_queries), pair.verdict]


def _pair_cells(pair: Pair) -> list[str]:
    test = pair.test
    bounds = NOTHING if math.isnan(test.low) else f"{_signed(test.low, 2)} to {_signed(test.high, 2)}"
    return [f"{pair.a} less {pair.b}", str(test.n), _signed(test.difference, 2), bounds]


def _signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f}".replace("-", "−")


def run_facts(study: Study) -> list[tuple[str, str]]:
    """All that one has to know to compare a run with another."""
    plan, result = study.config["plan"], study.result
    resolved = study.config.get("resolved", {})
    speed = f", {result['images_per_second']:,.0f} images/s" if result["images_per_second"] else ""
    trained = (
        f"{resolved['training_images']:,} images of {resolved['training_classes']:,} classes, "
        if "training_images" in resolved
        else ""
    )
    left_out = f", {result['left_out']:,} without kin left out" if result["left_out"] else ""
    unreadable = len(result.get("unreadable", []))
    return [
        ("method", study.config["method"]),
        ("data", plan["data"]),
        ("test set", f"{len(study.images):,} images of {study.images.classes:,} classes, {_unseen(study)}"),
        ("queries", f"{result['queries']:,}{left_out}"),
        ("what chose the epoch", f"{CHOSEN[result['select']]} (epoch {result['kept_epoch']:g} of {plan['epochs']})"),
        ("seed", str(result["seed"])),
        ("backbone", f"{plan['backbone']}, {plan['weights']} weights"),
        ("image size", f"{study.size} px"),
        ("embedding", f"{study.points.shape[1]} dimensions, {study.space} space"),
        ("training", f"{trained}batch {plan['batch']}, {plan['optimiser']} at {plan['lr']:g}"),
        ("time", f"{duration(result['seconds'])}{speed}"),
        ("hardware", f"{result['hardware']}, {plan['precision']}"),
        ("commit", short_commit(result["commit"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("date", result["date"]),
        *([("unreadable images", str(unreadable))] if unreadable else []),
    ]


def _unseen(study: Study) -> str:
    shared = len(study.trained_on & set(study.images.names))
    return f"{shared:,} of them trained on, by their names" if shared else "none of them trained on"


def facts_table(studies: Sequence[Study]) -> PrintedTable:
    """The facts of several runs side by side; what is the same for all is said once below."""
    studies = [study for runs in by_method(studies).values() for study in runs]
    columns = [dict(run_facts(study)) for study in studies]
    names = list(dict.fromkeys(name for own in columns for name in own))
    differing = [name for name in names if name != "date" and len({own.get(name, "") for own in columns}) > 1]
    cells = [
        [study.label.run, *(own.get(name, "") for name in differing)]
        for study, own in zip(studies, columns, strict=True)
    ]
    same = [f"{name}: {columns[0][name]}" for name in names if name not in (*differing, "date")]
    return PrintedTable("Runs", ["", *differing], cells, [f"The same for all: {'; '.join(same)}."] if same else [])


def run_tables(studies: Sequence[Study]) -> list[PrintedTable]:
    """Everything that is a table, for Markdown and LaTeX."""
    if len(studies) > 1:
        return [facts_table(studies), score_table(studies), *comparison_tables(studies)]
    facts = PrintedTable("Run", ["", studies[0].label.run], [list(pair) for pair in run_facts(studies[0])], [])
    return [facts, score_table(studies)]
