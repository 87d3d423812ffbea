"""The table of a suite: the paper's numbers beside ours, and everything one has to know to compare them.

Ours are means over seeds with their standard error. ↑ and ↓ mark rows that differ from their baseline, the suite's or
their own, by a paired t-test over the seeds both have, corrected by Holm over the rows compared; nothing is ever marked
against a paper. Where a row has but one seed in common with its baseline, the two models are compared over the test
classes, and not marked.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nearkin.benchmark.planned_runs import NEUTRAL
from nearkin.benchmark.results import query_file, read_queries
from nearkin.benchmark.runner import Board
from nearkin.benchmark.suite import Part, Published, Row, Suite
from nearkin.console import NOTHING, PrintedTable, duration
from nearkin.evaluation.statistics import Comparison, against, holm, mean_words, p_words, paired_bootstrap, summary
from nearkin.files import Json, short_commit
from nearkin.training.run_folder import CHOSEN

LEVEL = 0.05


class Finished(NamedTuple):
    """A row's finished runs, by seed."""

    runs: Mapping[int, Json]
    which: str  # the scores that count: "scores", or "before" training

    def values(self, metric: str) -> dict[int, float]:
        """Seed → score."""
        return {seed: run[self.which][metric] for seed, run in self.runs.items() if metric in run[self.which]}


def below_start(own: Finished, metric: str) -> bool:
    """Whether training left the mean of a row below that of the network as it began."""
    runs = [run for run in own.runs.values() if metric in run["scores"] and metric in run["before"]]
    gain: float = sum(run["scores"][metric] - run["before"][metric] for run in runs)
    return gain < 0


def suite_tables(board: Board) -> list[PrintedTable]:
    """One table a data set of the suite."""
    return [_table(board, part) for part in board.sheet.suite.parts.values()]


def _table(board: Board, part: Part) -> PrintedTable:
    suite = board.sheet.suite
    ours = {row.name: finished(board, row, part) for row in suite.rows.values()}
    rows = [row for row in _sorted(board, ours) if part.name in row.methods or part.name in row.paper]
    tests = {metric: row_tests(suite, ours, metric) for metric in part.metrics}
    published = list(dict.fromkeys(m for row in rows for m in row.paper.get(part.name, {})))
    main = _main_metric(suite.sort, part)
    models = _model_tests(board, ours, tests[main], main)
    columns: list[tuple[str, Callable[[Row], str]]] = [("", lambda row: row.name)]
    if published:
        columns.append(("paper's network", lambda row: _network(row) if part.name in row.paper else ""))
    for metric in dict.fromkeys([*part.metrics, *published]):
        if metric in published:
            columns.append((f"{metric} paper", _paper_cell(part, metric, _decimals(rows, part))))
        if metric in part.metrics:
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
    notes = _notes(board, part, {row.name: ours[row.name] for row in rows}, tests, models)
    return PrintedTable(f"{suite.title} ({part.name})", [name for name, _ in columns], cells, notes)


def finished(board: Board, row: Row, part: Part) -> Finished:
    """The runs of a row on a data set that are there."""
    cells = [cell for cell in board.sheet.cells if (cell.row, cell.data) == (row.name, part.name)]
    runs = {cell.seed: board.results[cell.id] for cell in cells if cell.id in board.results}
    return Finished(runs, "before" if row.scores == "before" else "scores")


def _sorted(board: Board, ours: Mapping[str, Finished]) -> list[Row]:
    """The suite's order, or by our mean of one metric, rows without it last."""
    suite = board.sheet.suite

    def place(row: Row) -> float:
        mean = summary(list(ours[row.name].values(suite.sort).values())).mean
        return math.inf if math.isnan(mean) else -mean

    return sorted(suite.rows.values(), key=place) if suite.sort else list(suite.rows.values())


def _main_metric(sort: str, part: Part) -> str:
    return next((m for m in (sort, "MAP@R") if m in part.metrics), part.metrics[0])


def row_tests(suite: Suite, ours: Mapping[str, Finished], metric: str) -> dict[str, Comparison]:
    """Every measured row against its baseline, over the seeds both have; nothing where the baseline is not measured."""
    scores = {name: run.values(metric) for name, run in ours.items() if run.values(metric)}
    return against(scores, suite.baselines)


def _model_tests(
    board: Board, ours: Mapping[str, Finished], tests: Mapping[str, Comparison], metric: str
) -> dict[str, Comparison]:
    """Rows that share one seed with their baseline: the two models over the test classes, where queries are kept."""
    found = {}
    for name, test in tests.items():
        base = ours[board.sheet.suite.baselines[name]]
        shared = sorted(ours[name].runs.keys() & base.runs.keys())
        if test.n == 1 and board.out is not None and base.which == ours[name].which == "scores":
            files = [query_file(board.out, own.runs[shared[0]]["id"]) for own in (ours[name], base)]
            if all(file.exists() for file in files):
                a, b = (read_queries(file) for file in files)
                if metric in a.values and metric in b.values:
                    found[name] = paired_bootstrap(a.values[metric], b.values[metric], groups=a.labels)
    adjusted = holm([test.p for test in found.values()])
    return {name: test._replace(p=float(p)) for (name, test), p in zip(found.items(), adjusted, strict=True)}


# Cells.


def _network(row: Row) -> str:
    return row.backbone if row.dim is None else f"{row.backbone}, {row.dim}-d"


def _decimals(rows: Iterable[Row], part: Part) -> int:
    """As many as the paper prints."""
    numbers = [n.value for row in rows for n in row.paper.get(part.name, {}).values()]
    return max((len(repr(value).partition(".")[2]) for value in numbers), default=1)


def _paper_cell(part: Part, metric: str, decimals: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        number: Published | None = row.paper.get(part.name, {}).get(metric)
        if number is None:
            return NOTHING if row.paper else ""
        spread = "" if number.spread is None else f" ± {number.spread:g}"
        return f"{number.value:.{decimals}f}{spread}"

    return cell


def _our_cell(ours: Mapping[str, Finished], metric: str, tests: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """Our mean of a metric with its mark."""

    def cell(row: Row) -> str:
        if not row.methods:
            return ""
        found = summary(list(ours[row.name].values(metric).values()))
        return f"{mean_words(found)}{mark(tests.get(row.name))}" if found.n else NOTHING

    return cell


def mark(test: Comparison | None) -> str:
    """↑ or ↓ behind a row that differs from its baseline, nothing behind another."""
    if test is None or not test.p < LEVEL:  # NaN is not below
        return ""
    return " ↑" if test.difference > 0 else " ↓"


def _difference_cell(tests: Mapping[str, Comparison], models: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """How far a row lies from its baseline, with its test: over seeds, or else of the two models."""

    def cell(row: Row) -> str:
        test, model = tests.get(row.name), models.get(row.name)
        if test is not None and not math.isnan(test.p):
            return f"{test.difference:+.2f} (p {p_words(test.p)}, d {test.effect:.1f})".replace("-", "−")
        if model is not None:
            return f"{model.difference:+.2f} (models: p {p_words(model.p)})".replace("-", "−")
        return NOTHING

    return cell


def _interval_cell(tests: Mapping[str, Comparison], models: Mapping[str, Comparison]) -> Callable[[Row], str]:
    """Where that difference may lie, by the pair alone."""

    def cell(row: Row) -> str:
        found = [each[row.name] for each in (tests, models) if row.name in each and not math.isnan(each[row.name].p)]
        return f"{found[0].low:+.2f} to {found[0].high:+.2f}".replace("-", "−") if found else NOTHING

    return cell


def _time_cell(ours: Mapping[str, Finished]) -> Callable[[Row], str]:
    """How long a run took: the median, since the first run of a sitting also compiles and reads the images."""

    def cell(row: Row) -> str:
        if row.scores == "before":  # the time of the training that follows
            return ""
        times = [run.get("wall") or run["seconds"] for run in ours[row.name].runs.values()]
        return duration(statistics.median(times)) if times else ""

    return cell


def _steps_cell(ours: Mapping[str, Finished]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        steps = [run["steps"] for run in ours[row.name].runs.values()]
        return f"{sum(steps) / len(steps):,.0f}" if steps else ""

    return cell


def _speed_cell(ours: Mapping[str, Finished]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row.scores == "before":
            return ""
        speeds = [run["images_per_second"] for run in ours[row.name].runs.values() if run.get("images_per_second")]
        return f"{sum(speeds) / len(speeds):,.0f}" if speeds else ""

    return cell


# Notes.


def _notes(
    board: Board,
    part: Part,
    ours: Mapping[str, Finished],
    tests: Mapping[str, Mapping[str, Comparison]],
    models: Mapping[str, Comparison],
) -> list[str]:
    suite = board.sheet.suite
    rows = [suite.rows[name] for name in ours]
    numbers = [number for row in rows for number in row.paper.get(part.name, {}).values()]
    runs = [run for own in ours.values() for run in own.runs.values()]
    notes = [f"Source: {suite.source}."]
    if suite.paper_select:
        notes.append(f"What chose the paper's epoch: {suite.paper_select}.")
    if any(number.spread is not None for number in numbers):
        notes.append(f"± of the paper: {suite.spread}.")
    notes += _about_ours(runs, board.sheet.overrides)
    theirs = {row.backbone for row in rows if row.methods and part.name in row.paper}
    others = sorted({run["settings"]["backbone"] for run in runs} - theirs)
    if others and theirs:
        notes.append(
            f"Our network ({', '.join(others)}) is not the paper's ({', '.join(sorted(theirs))}): compare rows with "
            "rows, not our column with theirs."
        )
    if any(not math.isnan(test.p) for each in tests.values() for test in each.values()):
        notes.append(
            f"↑ ↓: better or worse than {_baseline_words(suite)} by a paired t-test over shared seeds, with Holm's "
            f"correction over the rows compared, metric by metric, p < {LEVEL}; what is not marked is not shown to "
            f"differ. p is so corrected, the 95 % interval that of the pair alone; d: Cohen's d_z, which few seeds "
            f"make large. {NOTHING}: fewer than two shared seeds, or nothing to tell apart."
        )
    if models:
        notes.append(
            f"Models: one seed in common with {_baseline_words(suite)}, so the two models are compared by a paired "
            "bootstrap over the test classes, with Holm's correction. It speaks about these models, not about the "
            "methods, and marks nothing. Queries were embedded once more for it: the last digits may differ."
        )
    unmeasured = [base for base in dict.fromkeys(suite.baselines.values()) if base in ours and not ours[base].runs]
    if runs and unmeasured:
        notes.append(f"Not measured, so that no row is tested against it: {', '.join(unmeasured)}.")
    notes += _gaps(board, part)
    notes += [f"{row.name}: {row.note}." for row in rows if row.note]
    return [*notes, f"{suite.note[0].upper()}{suite.note[1:]}."] if suite.note else notes


def _baseline_words(suite: Suite) -> str:
    """What rows are compared with: its name, where it is the same for all."""
    bases = set(suite.baselines.values())
    return bases.pop() if len(bases) == 1 else "its baseline"


def _about_ours(runs: Sequence[Json], overrides: Mapping[str, Any]) -> list[str]:
    """What one has to know of our runs: network, seeds, what chose the epoch, changed settings, commit, hardware."""
    if not runs:
        return ["Ours: no run is finished."]

    def each(what: Callable[[Json], Any]) -> str:
        return ", ".join(dict.fromkeys(str(what(run)) for run in runs))

    networks = each(lambda r: f"{r['settings']['backbone']} ({r['settings']['weights']} weights)")
    sizes, dims = each(lambda r: f"{r['settings']['size']} px"), each(lambda r: f"{r['settings']['dim']}-d")
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


def _gaps(board: Board, part: Part) -> list[str]:
    sheet, notes = board.sheet, []
    missing = {row: name for row, name in sheet.missing.items() if part.name in sheet.suite.rows[row].methods}
    if missing:
        names = ", ".join(f"{row} ({name})" if name != row else row for row, name in missing.items())
        notes.append(f"Methods that are not there yet: {names}.")
    cells = [cell for cell in sheet.cells if cell.data == part.name]
    failed = {cell.row: board.failed[cell.id] for cell in cells if cell.id in board.failed}
    notes += [f"{row} failed: {sentence}" for row, sentence in failed.items()]
    left = len({cell.id for cell in cells} - set(board.results) - set(board.failed))
    if left:
        why = (
            f"give {part.name}:PATH" if part.name in board.without_data else board.stopped or "go on with nearkin bench"
        )
        notes.append(f"{left} of {len({cell.id for cell in cells})} runs are not finished: {why}.")
    return notes
