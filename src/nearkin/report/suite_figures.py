"""A sorted suite at a glance: a line for each row, a dot for each seed, and how far all of it is from the baseline."""
# MERGED: The figure of a suite: our means and their standard errors along its axis, the paper's numbers hollow beside them; of

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.benchmark.runner import Board
from nearkin.benchmark.suite import Axes, Part, Row
from nearkin.benchmark.tables import finished, mark, row_tests, suite_tables
from nearkin.console import markdown
from nearkin.evaluation.statistics import Summary, summary
from nearkin.files import whole_file
from nearkin.report.charts import INK, PALETTE, STYLE, look, rendered
from nearkin.training.run_folder import CHOSEN


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


class Point(NamedTuple):
    """A row in the figure; `x` is None where it is a horizontal line."""

    name: str
    x: float | None
    ours: Summary
    paper: float | None
    network: str  # the paper's


class Curves(NamedTuple):
    """What is drawn of one data set."""

    series: dict[str, list[Point]]  # by x
    lines: list[Point]
    caption: str

    @property
    def anything(self) -> bool:
        """Whether there is a number to draw."""
        points = [*self.lines, *(point for series in self.series.values() for point in series)]
        return any(point.ours.n or point.paper is not None for point in points)


def write_suite(board: Board, out: Path) -> list[Path]:
    """The table as SUITE.md below `out`, and the figures; nothing where no run of the suite is finished."""
    if not any(cell.id in board.results for cell in board.sheet.cells):
        return []
    table = out / f"{board.sheet.suite.name}.md"
    with whole_file(table) as temporary:
        temporary.write_text(markdown(suite_tables(board), level=1), encoding="utf-8")
    return [table, *write_figures(board, out)]


def write_figures(board: Board, out: Path) -> list[Path]:
    """A PNG and an SVG a data set of which there are numbers, as SUITE-DATA.png below `out`.

    None of a suite with neither [figure] nor sort.
    """
    written = []
    for part in board.sheet.suite.parts.values():
        figure = _figure(board, part)
        for form in ("png", "svg") if figure else ():
            path = out / f"{board.sheet.suite.name}-{part.name}.{form}"
            with whole_file(path) as temporary:
                temporary.write_bytes(rendered(figure, form))
            written.append(path)
    return written


def _figure(board: Board, part: Part) -> Any:
    suite = board.sheet.suite
    title = f"{suite.title} ({part.name})"
    if suite.figure is not None:
        found = curves(board, part, suite.figure)
        return _draw(found, suite.figure, title) if found.anything else None
    if suite.sort not in part.metrics:
        return None
    ranked = ranking(board, part)
    return draw_ranking(ranked, metric=suite.sort, title=title) if len(ranked.rows) > 1 else None


def curves(board: Board, part: Part, axes: Axes) -> Curves:
    """The numbers of one data set: curves by series, horizontal lines, and what one has to know of them."""
    rows = [row for row in board.sheet.suite.rows.values() if part.name in row.methods or part.name in row.paper]
    points = [_point(board, row, part, axes.metric) for row in rows]
    series: dict[str, list[Point]] = {}
    for row, point in zip(rows, points, strict=True):
        if point.x is not None:
            series.setdefault(row.series or "ours", []).append(point)
    for curve in series.values():
        curve.sort(key=lambda point: point.x or 0.0)
    runs = [run for row in rows for run in finished(board, row, part).runs.values()]
    return Curves(series, [point for point in points if point.x is None], _caption(points, runs))


def _point(board: Board, row: Row, part: Part, metric: str) -> Point:
    ours = summary(list(finished(board, row, part).values(metric).values()))
    paper = row.paper.get(part.name, {}).get(metric)
    return Point(row.name, row.x, ours, None if paper is None else paper.value, row.backbone)


def _caption(points: Sequence[Point], runs: Sequence[Any]) -> str:
    networks = ", ".join(sorted({point.network for point in points if point.paper is not None}))
    hollow = f"Hollow: the paper's numbers ({networks})." if networks else ""
    if not runs:
        return hollow
    counts = sorted({point.ours.n for point in points if point.ours.n})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = f"mean over {seeds} seeds" if counts[-1] > 1 else "one seed"
    bars = ", bars are the standard error" if counts[-1] > 1 else ""
    ours = ", ".join(sorted({run["settings"]["backbone"] for run in runs}))
    chosen = ", ".join(dict.fromkeys(CHOSEN[run["select"]] for run in runs))
    return f"Ours ({ours}): {what}{bars}; epoch: {chosen}. {hollow}".strip()


def _draw(found: Curves, axes: Axes, title: str) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        plot = figure.subplots()
        for number, (name, points) in enumerate(found.series.items()):
            _curve(plot, name, points, look(number))
        for number, point in enumerate(found.lines):
            _line(plot, point, ("--", "-.", ":")[number % 3])
        plot.set_xscale(axes.scale)
        places = sorted({point.x for points in found.series.values() for point in points if point.x is not None})
        if len(places) <= 12:  # more would write over each other
            plot.set_xticks(places, [f"{x:g}" for x in places])
            plot.minorticks_off()
        plot.set_xlabel(axes.x)
        plot.set_ylabel(f"{axes.metric}, percent")
        plot.set_title(title, fontsize=9, loc="left", wrap=True)
        plot.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")  # lines may run behind it
        figure.supxlabel(found.caption, fontsize=7, color=INK, wrap=True)
    return figure


def _curve(plot: Any, name: str, points: Sequence[Point], style: dict[str, str]) -> None:
    ours = [point for point in points if point.ours.n]
    if ours:
        errors = [point.ours.error if point.ours.n > 1 else 0.0 for point in ours]
        places, means = [point.x for point in ours], [point.ours.mean for point in ours]
        plot.errorbar(places, means, errors, label=name, capsize=3, markersize=5, linewidth=1.4, **style)
    paper = [point for point in points if point.paper is not None]
    if paper:
        places, values = [point.x for point in paper], [point.paper for point in paper]
        label = f"{name}, paper" if name != "ours" else "paper"
        plot.plot(places, values, ":", label=label, markersize=5, linewidth=1, markerfacecolor="none", **style)


def _line(plot: Any, point: Point, dashes: str) -> None:
    if point.ours.n:
        plot.axhline(point.ours.mean, linestyle=dashes, linewidth=1.2, color=INK, label=point.name)
        if point.ours.n > 1:
            low, high = point.ours.mean - point.ours.error, point.ours.mean + point.ours.error
            plot.axhspan(low, high, color=INK, alpha=0.1, linewidth=0)
    if point.paper is not None:
        plot.axhline(point.paper, linestyle=dashes, linewidth=0.7, color="#999999", label=f"{point.name}, paper")
