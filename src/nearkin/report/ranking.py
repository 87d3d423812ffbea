"""A sorted suite at a glance: a line for each row, a dot for each seed, and how far all of it is from the baseline."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nearkin.bench import Board
from nearkin.report.benchmarks import finished, mark, row_tests
from nearkin.report.charts import INK, PALETTE, STYLE
from nearkin.suites import Part


class Ranked(NamedTuple):
    """A measured row: its scores by seed, and the mark it has in the table."""

    name: str
    scores: list[float]
    mark: str

    @property
    def mean(self) -> float:
        """What it is sorted by."""
        return sum(self.scores) / len(self.scores)


class Ranking(NamedTuple):
    """What is drawn of one data set."""

    rows: list[Ranked]  # the best first
    base: float | None  # the mean of the suite's baseline
    untrained: float | None  # the network as it was before training, under the baseline's head


def ranking(board: Board, part: Part) -> Ranking:
    """The rows of a suite that were trained and measured, by the metric that sorts it."""
    suite = board.sheet.suite
    metric = suite.sort
    ours = {row.name: finished(board, row, part) for row in suite.rows.values()}
    tests = row_tests(suite, ours, metric)
    trained = {name: own for name, own in ours.items() if own.which == "scores" and own.values(metric)}
    rows = [Ranked(name, list(own.values(metric).values()), mark(tests.get(name))) for name, own in trained.items()]
    rows.sort(key=lambda row: -row.mean)
    base = next((row.mean for row in rows if row.name == suite.baseline), None)
    before = [run["before"][metric] for run in ours[suite.baseline].runs.values()] if base is not None else []
    return Ranking(rows, base, sum(before) / len(before) if before else None)


def draw_ranking(found: Ranking, *, metric: str, title: str) -> Any:
    """The chart; what lies below the untrained network is written at the left edge, or it would squeeze the rest."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.4 + 0.19 * len(found.rows)), layout="constrained")
        plot = figure.subplots()
        edge = _edge(found)
        for place, row in enumerate(found.rows):
            inside = [score for score in row.scores if score >= edge]
            plot.plot(inside, [place] * len(inside), "o", color=PALETTE[0], markersize=4, alpha=0.6, linewidth=0)
            if row.mean >= edge:
                plot.plot([row.mean], [place], "|", color=INK, markersize=11, markeredgewidth=1.6)
            else:
                plot.text(edge, place, f" ◂ {row.mean:.1f}", va="center", fontsize=8, color=INK)
        lines = ((found.base, "-", "baseline ", "right"), (found.untrained, ":", " not trained", "left"))
        for value, style, words, side in lines:
            if value is not None:
                plot.axvline(value, linestyle=style, color=INK, linewidth=0.9, zorder=0.5)
                plot.text(value, -1.0, words, ha=side, fontsize=7, color=INK)
        plot.set_yticks(range(len(found.rows)), [row.name + row.mark for row in found.rows], fontsize=8)
        plot.set_ylim(len(found.rows) - 0.4, -1.6)
        plot.set_xlim(left=edge)
        plot.grid(visible=False, axis="y")
        plot.set_xlabel(f"{metric}, percent")
        plot.set_title(title, fontsize=9, loc="left", wrap=True)
        words = (
            "A dot for each seed, a bar at their mean; ◂: the mean lies further left. Lines: the suite's baseline, and "
            "the network before training.\n↑ ↓: differs from the baseline by the test of the table."
        )
        figure.supxlabel(words, fontsize=7, color=INK)
    return figure


def _edge(found: Ranking) -> float:
    """Where the chart begins: a little below the untrained network, or below the lowest score."""
    scores: Sequence[float] = [score for row in found.rows for score in row.scores]
    low = min(scores) if found.untrained is None else max(min(scores), min(found.untrained, max(scores)))
    return low - 0.12 * (max(scores) - low) - 0.1
