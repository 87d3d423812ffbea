"""The table of a suite: the paper's numbers beside ours, with notes on everything needed to compare them.

Ours are means over seeds with their standard error. ↑ and ↓ mark rows that differ from their baseline, the suite's or
their own, by a paired t-test over common seeds, with Holm's correction over the rows compared; no row is ever marked
against a paper. If a row has only one seed in common with its baseline, the two models are compared over the test
classes, without a mark.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nearkin.benchmark.planned_runs import NEUTRAL
from nearkin.benchmark.results import query_file, read_queries
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import Published, Row, Suite, SuiteData
from nearkin.console import NOTHING, PrintedTable, duration
from nearkin.evaluation.statistics import Comparison, against, holm, mean_words, p_words, paired_bootstrap, summary
from nearkin.files import Json, short_commit
from nearkin.training.run_folder import CHOSEN
from nearkin.training.run_metric import RunMetric

LEVEL = 0.05


class RowRuns(NamedTuple):
    """A row's finished runs, by seed."""

    runs: Mapping[int, Json]
    which: str  # "scores", or "before" for those before training

    def values(self, metric: str) -> dict[int, float]:
        """Seed → score."""
        return {seed: run[self.which][metric] for seed, run in self.runs.items() if metric in run[self.which]}


def below_start(row: RowRuns, metric: str) -> bool:
    """Whether the mean score of a row is lower after training than before."""
    runs = [run for run in row.runs.values() if metric in run["scores"] and metric in run["before"]]
    gain: float = sum(run["scores"][metric] - run["before"][metric] for run in runs)
    return gain < 0


def suite_tables(results: SuiteResults) -> list[PrintedTable]:
    """One table per data set of the suite."""
    return [_table(results, dataset) for dataset in results.planned.suite.data.values()]


def _table(results: SuiteResults, dataset: SuiteData) -> PrintedTable:
    suite = results.planned.suite
    ours = {row.name: row_runs(results, row, dataset) for row in suite.rows.values()}
    rows = [row for row in _sorted(results, ours) if dataset.name in row.methods or dataset.name in row.paper]
    tests = {metric: row_tests(suite, ours, metric) for metric in dataset.metrics}
    published = list(dict.fromkeys(m for row in rows for m in row.paper.get(dataset.name, {})))
    main = _main_metric(suite.sort, dataset)
    models = _model_tests(results, ours, tests[main], main)
    shown = [m for m in dataset.metrics if RunMetric.parse(m).view is None or any(r.values(m) for r in ours.values())]
    columns: list[tuple[str, Callable[[Row], str]]] = [("", lambda row: row.name)]
    if published:
        columns.append(("paper's network", lambda row: _network(row) if dataset.name in row.paper else ""))
    for metric in dict.fromkeys([*shown, *published]):
        if metric in published:
            columns.append((f"{metric} paper", _paper_cell(dataset, metric, _decimals(rows, dataset))))
        if metric in dataset.metrics:
            columns.append((f"{metric} ours" if published else metric, _our_cell(ours, metric, tests[metric])))
    if any(run.runs for run in ours.values()):
        columns += [("seeds", lambda row: str(len(ours[row.name].runs) or "")), ("time", _time_cell(ours))]
        columns.append(("images/s", _speed_cell(ours)))
        if any(run["settings"].get("patience") for each in ours.values() for run in each.runs.values()):
            columns.append(("steps", _steps_cell(ours)))
        if tests[main]:
            if len(set(suite.baselines.values())) > 1:
                columns.append(("baseline", lambda row: suite.baselines.get(row.name, "")))
            columns.append((f"{main} less {_baseline_words(suite)}", _difference_cell(tests[main], models)))
            columns.append(("95 %", _interval_cell(tests[main], models)))
    cells = [[cell(row) for _, cell in columns] for row in rows]
    notes = _notes(results, dataset, {row.name: ours[row.name] for row in rows}, tests, models)
    return PrintedTable(f"{suite.title} ({dataset.name})", [name for name, _ in columns], cells, notes)


def row_runs(results: SuiteResults, row: Row, dataset: SuiteData) -> RowRuns:
    """The finished runs of a row on a data set."""
    planned = [run for run in results.planned.runs if (run.row, run.data) == (row.name, dataset.name)]
    runs = {run.seed: results.runs[run.id] for run in planned if run.id in results.runs}
    return RowRuns(runs, "before" if row.scores == "before" else "scores")


def _sorted(results: SuiteResults, ours: Mapping[str, RowRuns]) -> list[Row]:
    """Rows in the suite's order, or by our mean of its sorting metric; rows without one come last."""
    suite = results.planned.suite

    def sort_key(row: Row) -> float:
        mean = summary(list(ours[row.name].values(suite.sort).values())).mean
        return math.inf if math.isnan(mean) else -mean

    return sorted(suite.rows.values(), key=sort_key) if suite.sort else list(suite.rows.values())


def _main_metric(sort: str, dataset: SuiteData) -> str:
    return next((m for m in (sort, "MAP@R") if m in dataset.metrics), dataset.metrics[0])


def row_tests(suite: Suite, ours: Mapping[str, RowRuns], metric: str) -> dict[str, Comparison]:
    """Each measured row against its baseline, over common seeds; rows without a measured baseline are left out."""
    scores = {name: run.values(metric) for name, run in ours.items() if run.values(metric)}
    return against(scores, suite.baselines)


def _model_tests(
    results: SuiteResults, ours: Mapping[str, RowRuns], tests: Mapping[str, Comparison], metric: str
) -> dict[str, Comparison]:
    """For rows with one seed in common with their baseline: compare the two models over the test classes."""
    found = {}
    for name, test in tests.items():
        base = ours[results.planned.suite.baselines[name]]
        shared = sorted(ours[name].runs.keys() & base.runs.keys())
        if test.n == 1 and results.out is not None and base.which == ours[name].which == "scores":
            files = [query_file(results.out, row.runs[shared[0]]["id"]) for row in (ours[name], base)]
            if all(file.exists() for file in files):
                a, b = (read_queries(file) for file in files)
                if metric in a.values and metric in b.values:
                    found[name] = paired_bootstrap(a.values[metric], b.values[metric], groups=a.labels)
    adjusted = holm([test.p for test in found.values()])
    return {name: test._replace(p=float(p)) for (name, test), p in zip(found.items(), adjusted, strict=True)}


# Cells.


def _network(row: Row) -> str:
    return row.backbone if row.dim is None else f"{row.backbone}, {row.dim}-d"


def _decimals(rows: Iterable[Row], dataset: SuiteData) -> int:
    """The number of decimals that the paper prints."""
    numbers = [n.value for row in rows for n in row.paper.get(dataset.name, {}).values()]
    return max((len(repr(value).partition(".")[2]) for value in numbers), default=1)


def _paper_cell(dataset: SuiteData, metric: str, decimals: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        number: Published | None = row.paper.get(dataset.name, {}).get(metric)
        if number is None:
            return NOTHING if row.paper else ""
        spread = "" if number.spread is None else f" ± {number.spread:g}"
        return f"{number.value:.{decimals}f}{spread}"

    return cell


def _our_cell(ours: Mapping[str, RowRuns], metric: str, tests: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """Our mean of a metric with its mark."""

    def cell(row: Row) -> str:
        if not row.methods:
            return ""
        found = summary(list(ours[row.name].values(metric).values()))
        return f"{mean_words(found)}{mark(tests.get(row.name))}" if found.n else NOTHING

    return cell


def mark(test: Comparison | None) -> str:
    """↑ or ↓ for a row that differs significantly from its baseline, else an empty text."""
    if test is None or not test.p < LEVEL:  # also if p is NaN
        return ""
    return " ↑" if test.difference > 0 else " ↓"


def _difference_cell(tests: Mapping[str, Comparison], models: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """The difference from the baseline with its test, over seeds or else of the two models."""

    def cell(row: Row) -> str:
        test, model = tests.get(row.name), models.get(row.name)
        if test is not None and not math.isnan(test.p):
            return f"{test.difference:+.2f} (p {p_words(test.p)}, d {test.effect:.1f})".replace("-", "−")
        if model is not None:
            return f"{model.difference:+.2f} (models: p {p_words(model.p)})".replace("-", "−")
        return NOTHING

    return cell


def _interval_cell(tests: Mapping[str, Comparison], models: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """The confidence interval of that difference, uncorrected."""

    def cell(row: Row) -> str:
        found = [each[row.name] for each in (tests, models) if row.name in each and not math.isnan(each[row.name].p)]
        return f"{found[0].low:+.2f} to {found[0].high:+.2f}".replace("-", "−") if found else NOTHING

    return cell


def _time_cell(ours: Mapping[str, RowRuns]) -> Callable[[Row], str]:
    """The median time of a run; the first run of a process also compiles and reads the images."""

    def cell(row: Row) -> str:
        if row.scores == "before":  # its time is that of the training that follows
            return ""
        times = [run.get("wall") or run["seconds"] for run in ours[row.name].runs.values()]
        return duration(statistics.median(times)) if times else ""

    return cell


def _steps_cell(ours: Mapping[str, RowRuns]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        steps = [run["steps"] for run in ours[row.name].runs.values()]
        return f"{sum(steps) / len(steps):,.0f}" if steps else ""

    return cell


def _speed_cell(ours: Mapping[str, RowRuns]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row.scores == "before":
            return ""
        speeds = [run["images_per_second"] for run in ours[row.name].runs.values() if run.get("images_per_second")]
        return f"{sum(speeds) / len(speeds):,.0f}" if speeds else ""

    return cell


# Notes.


def _notes(
    results: SuiteResults,
    dataset: SuiteData,
    ours: Mapping[str, RowRuns],
    tests: Mapping[str, Mapping[str, Comparison]],
    models: Mapping[str, Comparison],
) -> list[str]:
    suite = results.planned.suite
    rows = [suite.rows[name] for name in ours]
    numbers = [number for row in rows for number in row.paper.get(dataset.name, {}).values()]
    runs = [run for row in ours.values() for run in row.runs.values()]
    notes = [f"Source: {suite.source}."]
    if suite.paper_select:
        notes.append(f"What chose the paper's epoch: {suite.paper_select}.")
    if any(number.spread is not None for number in numbers):
        notes.append(f"± of the paper: {suite.spread}.")
    notes += _about_ours(runs, results.planned.overrides)
    theirs = {row.backbone for row in rows if row.methods and dataset.name in row.paper}
    others = sorted({run["settings"]["backbone"] for run in runs} - theirs)
    if others and theirs:
        notes.append(
            f"Our network ({', '.join(others)}) is not the paper's ({', '.join(sorted(theirs))}): compare rows with "
            "rows, not our column with theirs."
        )
    if any(not math.isnan(test.p) for each in tests.values() for test in each.values()):
        notes.append(
            f"↑ ↓: better or worse than {_baseline_words(suite)} by a paired t-test over shared seeds, with Holm's "
            f"correction over the rows compared, per metric, p < {LEVEL}; no mark means no significant difference. p "
            f"is corrected, the 95 % interval is not; d is Cohen's d_z, which is large with few seeds. {NOTHING}: "
            "fewer than two shared seeds, or no variation."
        )
    if models:
        notes.append(
            f"Models: one seed in common with {_baseline_words(suite)}, so the two models are compared by a paired "
            "bootstrap over the test classes, with Holm's correction. It tells about these models, not about the "
            "methods, and sets no marks. Queries were embedded again for it: the last digits may differ."
        )
    unmeasured = [base for base in dict.fromkeys(suite.baselines.values()) if base in ours and not ours[base].runs]
    if runs and unmeasured:
        notes.append(f"Not measured, so no row is tested against it: {', '.join(unmeasured)}.")
    notes += _gaps(results, dataset)
    notes += [f"{row.name}: {row.note}." for row in rows if row.note]
    return [*notes, f"{suite.note[0].upper()}{suite.note[1:]}."] if suite.note else notes


def _baseline_words(suite: Suite) -> str:
    """The baseline's name if it is the same for all rows."""
    bases = set(suite.baselines.values())
    return bases.pop() if len(bases) == 1 else "its baseline"


def _about_ours(runs: Sequence[Json], overrides: Mapping[str, Any]) -> list[str]:
    """Notes on our runs: network, seeds, what chose the epoch, changed settings, commit, hardware."""
    if not runs:
        return ["Ours: no run is finished."]

    def each(what: Callable[[Json], Any]) -> str:
        return ", ".join(dict.fromkeys(str(what(run)) for run in runs))

    networks = each(lambda r: f"{r['settings']['backbone']} ({r['settings']['weights']} weights)")
    sizes, dims = each(_sizes), each(lambda r: f"{r['settings']['dim']}-d")
    seeds = each(lambda r: r["seed"])
    spread = f"± is the standard error over seeds {seeds}" if "," in seeds else f"one seed: {seeds}"
    notes = [f"Ours: {networks}; {sizes}; {dims}; {spread}."]
    notes.append(f"What chose our epoch: {each(lambda r: CHOSEN[r['select']])}.")
    changed = {k: v for k, v in overrides.items() if k not in NEUTRAL}
    if changed:
        notes.append(f"Changed for all rows: {', '.join(f'{k} = {v}' for k, v in changed.items())}.")
    commits = each(lambda r: short_commit(r["commit"]))
    where = each(lambda r: f"{r['hardware']}, {r['precision']}{', compiled' if r.get('compile') else ''}")
    notes.append(f"Commit {commits}; {where}; torch {each(lambda r: r['versions']['torch'])}.")
    return notes


def _sizes(run: Json) -> str:
    """The size of training crops, and that of test images if it is another or was chosen."""
    settings = run["settings"]
    if chosen := run.get("test_view"):
        shown = f"{chosen['size']} px of {chosen['short_side']}"
        return f"{settings['size']} px, tested at {shown}, chosen on held-out training classes"
    shown = settings.get("test_size") or settings["size"]  # older results have none
    return f"{settings['size']} px" + (f", tested at {shown} px" if shown != settings["size"] else "")


def _gaps(results: SuiteResults, dataset: SuiteData) -> list[str]:
    planned, notes = results.planned, []
    missing = {row: name for row, name in planned.missing.items() if dataset.name in planned.suite.rows[row].methods}
    if missing:
        names = ", ".join(f"{row} ({name})" if name != row else row for row, name in missing.items())
        notes.append(f"Unknown methods: {names}.")
    runs = {run.id: run for run in planned.runs if run.data == dataset.name}
    failed = {run.row: results.failed[run.id] for run in runs.values() if run.id in results.failed}
    notes += [f"{row} failed: {message}" for row, message in failed.items()]
    left = len(runs.keys() - results.runs.keys() - results.failed.keys())
    if left:
        path = f"give {dataset.name}:PATH" if dataset.name in results.without_data else ""
        why = path or results.stopped or "run nearkin bench to continue"
        notes.append(f"{left} of {len(runs)} runs are not finished: {why}.")
    return notes
