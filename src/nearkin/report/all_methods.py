"""One table over suites: every row measured on one data set with one network, sorted by one metric.

Rows of different suites were trained in different settings, which stand beside them; a mark compares a row with its
baseline in its own suite, never with another suite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nearkin.bench import Board
from nearkin.evaluate.statistics import Comparison, summary
from nearkin.losses import LOSSES
from nearkin.report.benchmarks import (
    CHOSEN,
    LEVEL,
    Finished,
    about_ours,
    difference_cell,
    finished,
    our_cell,
    row_tests,
    time_cell,
)
from nearkin.report.formats import NOTHING, PrintedTable
from nearkin.runs import Json
from nearkin.spec import parse
from nearkin.strategies import STRATEGIES
from nearkin.suites import Row, Suite

FEWEST = 3
"""Seeds below which a row is pointed out."""


class Entry(NamedTuple):
    """A measured row of a suite with all that its cells are made of."""

    suite: Suite
    row: Row
    ours: Mapping[str, Finished]  # of all rows of the suite
    tests: Mapping[str, Mapping[str, Comparison]]  # by metric

    @property
    def runs(self) -> list[Json]:
        """Its runs."""
        return list(self.ours[self.row.name].runs.values())


def all_methods(
    boards: Sequence[Board], *, data: str, backbone: str, metrics: Sequence[str], sort: str
) -> PrintedTable | None:
    """The table, or nothing where nothing was measured."""
    entries = _entries(boards, data, backbone, metrics)
    if not entries:
        return None
    entries.sort(key=lambda entry: _place(entry, sort))
    header = ["", "suite", "setting", *metrics, "seeds", "time", "baseline", f"{sort} less its baseline", "epoch"]
    cells = [_cells(entry, metrics, sort) for entry in entries]
    return PrintedTable(f"Every method on {data} with {backbone}", header, cells, _notes(entries))


def _entries(boards: Sequence[Board], data: str, backbone: str, metrics: Sequence[str]) -> list[Entry]:
    entries: list[Entry] = []
    seen: set[tuple[str, ...]] = set()
    for board in boards:
        suite = board.sheet.suite
        if data not in suite.parts:
            continue
        ours = {row.name: finished(board, row, suite.parts[data]) for row in suite.rows.values()}
        tests = {metric: row_tests(suite, ours, metric) for metric in metrics}
        for row in suite.rows.values():
            entry = Entry(suite, row, ours, tests)
            key = tuple(run["id"] for run in entry.runs)
            wanted = row.scores == "after" and any(run["settings"]["backbone"] == backbone for run in entry.runs)
            if wanted and key not in seen:  # suites share runs
                seen.add(key)
                entries.append(entry)
    return entries


def _place(entry: Entry, sort: str) -> float:
    mean = summary(list(entry.ours[entry.row.name].values(sort).values())).mean
    return math.inf if math.isnan(mean) else -mean


def _cells(entry: Entry, metrics: Sequence[str], sort: str) -> list[str]:
    row, runs = entry.row, entry.runs
    settings = runs[0]["settings"]
    folds = f", {settings['folds']} folds" if settings.get("folds") else ""
    cells = [row.name, entry.suite.name]
    cells.append(f"{settings['dim']}-d, batch {settings['batch']}, {settings['epochs']} epochs{folds}")
    cells += [our_cell(entry.ours, metric, entry.tests[metric])(row) for metric in metrics]
    cells += [str(len(runs)), time_cell(entry.ours)(row)]
    cells += [entry.suite.baselines.get(row.name, NOTHING), difference_cell(entry.tests[sort], {})(row)]
    return [*cells, ", ".join(dict.fromkeys(CHOSEN[run["select"]] for run in runs))]


def _notes(entries: Sequence[Entry]) -> list[str]:
    notes = [
        "Rows of different suites were trained in different settings: compare within a suite.",
        *about_ours([run for entry in entries for run in entry.runs], {}),
        "↑ ↓: better or worse than its baseline in its own suite by a paired t-test over shared seeds, with Holm's "
        f"correction over the rows of the suite, p < {LEVEL}; what is not marked is not shown to differ. d: Cohen's "
        f"d_z. {NOTHING}: not measured, fewer than two shared seeds, or nothing to tell apart.",
    ]
    few = [f"{entry.row.name} ({entry.suite.name})" for entry in entries if len(entry.runs) < FEWEST]
    if few:
        notes.append(f"Fewer than {FEWEST} seeds so far: {'; '.join(few)}.")
    there = {parse(run["settings"]["method"]).name for entry in entries for run in entry.runs}
    missing = [name for name in sorted({**LOSSES, **STRATEGIES}) if name not in there]
    if missing:
        notes.append(f"Not measured yet: {', '.join(missing)}.")
    return notes
