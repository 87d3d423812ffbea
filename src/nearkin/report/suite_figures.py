"""Figures of a suite: its scores along an axis beside the paper's numbers, or its rows ranked by score."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import Axes, Row, SuiteData
from nearkin.benchmark.tables import mark, row_runs, row_tests, suite_tables
from nearkin.console import markdown
from nearkin.evaluation.statistics import Summary, summary
from nearkin.files import atomic_file
from nearkin.report.charts import INK, PALETTE, curve_style, figure_style, new_figure, save_figure
from nearkin.training.run_folder import CHOSEN


class RankedRow(NamedTuple):
    """A measured row: its scores by seed, and its mark in the table."""

    name: str
    scores: list[float]
    mark: str

    @property
    def mean(self) -> float:
        """Mean score over the seeds."""
        return sum(self.scores) / len(self.scores)


class SuiteRanking(NamedTuple):
    """The rows of a suite on one data set, ranked."""

    rows: list[RankedRow]  # best first
    base: float | None  # mean of the suite's baseline
    untrained: float | None  # mean of the baseline's network before training


def ranking(results: SuiteResults, dataset: SuiteData) -> SuiteRanking:
    """The trained and measured rows of a suite, ranked by the metric that sorts it."""
    suite = results.planned.suite
    metric = suite.sort
    ours = {row.name: row_runs(results, row, dataset) for row in suite.rows.values()}
    tests = row_tests(suite, ours, metric)
    trained = {name: runs for name, runs in ours.items() if runs.which == "scores" and runs.values(metric)}
    rows = [
        RankedRow(name, list(runs.values(metric).values()), mark(tests.get(name))) for name, runs in trained.items()
    ]
    rows.sort(key=lambda row: -row.mean)
    base = next((row.mean for row in rows if row.name == suite.baseline), None)
    before = [run["before"][metric] for run in ours[suite.baseline].runs.values()] if base is not None else []
    return SuiteRanking(rows, base, sum(before) / len(before) if before else None)


def draw_ranking(found: SuiteRanking, *, metric: str, title: str) -> Any:
    """A row of dots per suite row. Means far below the untrained network are written at the left edge."""
    with figure_style():
        figure = new_figure(7.2, 1.4 + 0.19 * len(found.rows))
        plot = figure.subplots()
        edge = _edge(found)
        for place, row in enumerate(found.rows):
            inside = [score for score in row.scores if score >= edge]
            plot.plot(inside, [place] * len(inside), "o", color=PALETTE[0], markersize=4, alpha=0.6, linewidth=0)
            if row.mean >= edge:
                plot.plot([row.mean], [place], "|", color=INK, markersize=11, markeredgewidth=1.6)
            else:
                plot.text(edge, place, f" ◂ {row.mean:.1f}", va="center", fontsize=8, color=INK)
        lines = ((found.base, "-", "baseline ", "right"), (found.untrained, ":", " untrained", "left"))
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
            "Dots: seeds; bars: means; ◂: the mean lies further left. Lines: the suite's baseline, and the network "
            "before training.\n↑ ↓: significantly above or below the baseline by the test of the table."
        )
        figure.supxlabel(words, fontsize=7, color=INK)
    return figure


def _edge(found: SuiteRanking) -> float:
    """Left end of the axis: a little below the untrained network, or below the lowest score."""
    scores: Sequence[float] = [score for row in found.rows for score in row.scores]
    low = min(scores) if found.untrained is None else max(min(scores), min(found.untrained, max(scores)))
    return low - 0.12 * (max(scores) - low) - 0.1


class Point(NamedTuple):
    """A suite row in the figure; a row without `x` is a horizontal line."""

    name: str
    x: float | None
    ours: Summary
    paper: float | None
    paper_network: str


class Curves(NamedTuple):
    """The curves and lines of one data set."""

    series: dict[str, list[Point]]  # sorted by x
    lines: list[Point]
    caption: str

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to draw."""
        points = [*self.lines, *(point for series in self.series.values() for point in series)]
        return any(point.ours.n or point.paper is not None for point in points)


def write_suite(results: SuiteResults, out: Path) -> list[Path]:
    """Write SUITE.md and the figures to `out`; nothing if no run of the suite is finished."""
    if not any(cell.id in results.runs for cell in results.planned.runs):
        return []
    table = out / f"{results.planned.suite.name}.md"
    with atomic_file(table) as temporary:
        temporary.write_text(markdown(suite_tables(results), level=1), encoding="utf-8")
    return [table, *write_figures(results, out)]


def write_figures(results: SuiteResults, out: Path) -> list[Path]:
    """Write SUITE-DATA.png and .svg per data set with numbers; none for a suite with neither [figure] nor sort."""
    written = []
    for dataset in results.planned.suite.data.values():
        figure = _figure(results, dataset)
        for form in ("png", "svg") if figure else ():
            path = out / f"{results.planned.suite.name}-{dataset.name}.{form}"
            written.append(save_figure(figure, path))
    return written


def _figure(results: SuiteResults, dataset: SuiteData) -> Any:
    suite = results.planned.suite
    title = f"{suite.title} ({dataset.name})"
    if suite.figure is not None:
        found = curves(results, dataset, suite.figure)
        return _draw(found, suite.figure, title) if found.has_numbers else None
    if suite.sort not in dataset.metrics:
        return None
    ranked = ranking(results, dataset)
    return draw_ranking(ranked, metric=suite.sort, title=title) if len(ranked.rows) > 1 else None


def curves(results: SuiteResults, dataset: SuiteData, axes: Axes) -> Curves:
    """The numbers of one data set: curves by series, horizontal lines, and a caption."""
    rows = [
        row for row in results.planned.suite.rows.values() if dataset.name in row.methods or dataset.name in row.paper
    ]
    points = [_point(results, row, dataset, axes.metric) for row in rows]
    series: dict[str, list[Point]] = {}
    for row, point in zip(rows, points, strict=True):
        if point.x is not None:
            series.setdefault(row.series or "ours", []).append(point)
    for curve in series.values():
        curve.sort(key=lambda point: point.x or 0.0)
    runs = [run for row in rows for run in row_runs(results, row, dataset).runs.values()]
    return Curves(series, [point for point in points if point.x is None], _caption(points, runs))


def _point(results: SuiteResults, row: Row, dataset: SuiteData, metric: str) -> Point:
    ours = summary(list(row_runs(results, row, dataset).values(metric).values()))
    paper = row.paper.get(dataset.name, {}).get(metric)
    return Point(row.name, row.x, ours, None if paper is None else paper.value, row.backbone)


def _caption(points: Sequence[Point], runs: Sequence[Any]) -> str:
    networks = ", ".join(sorted({point.paper_network for point in points if point.paper is not None}))
    hollow = f"Hollow: the paper's numbers ({networks})." if networks else ""
    if not runs:
        return hollow
    counts = sorted({point.ours.n for point in points if point.ours.n})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    means = f"mean over {seeds} seeds" if counts[-1] > 1 else "one seed"
    bars = ", bars are the standard error" if counts[-1] > 1 else ""
    ours = ", ".join(sorted({run["settings"]["backbone"] for run in runs}))
    chosen = ", ".join(dict.fromkeys(CHOSEN[run["select"]] for run in runs))
    return f"Ours ({ours}): {means}{bars}; epoch: {chosen}. {hollow}".strip()


def _draw(found: Curves, axes: Axes, title: str) -> Any:
    with figure_style():
        figure = new_figure(5.6, 3.9)
        plot = figure.subplots()
        for number, (name, points) in enumerate(found.series.items()):
            _curve(plot, name, points, curve_style(number))
        for number, point in enumerate(found.lines):
            _line(plot, point, ("--", "-.", ":")[number % 3])
        plot.set_xscale(axes.scale)
        places = sorted({point.x for points in found.series.values() for point in points if point.x is not None})
        if len(places) <= 12:  # more would overlap
            plot.set_xticks(places, [f"{x:g}" for x in places])
            plot.minorticks_off()
        plot.set_xlabel(axes.x)
        plot.set_ylabel(f"{axes.metric}, percent")
        plot.set_title(title, fontsize=9, loc="left", wrap=True)
        plot.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")  # opaque, lines may pass behind it
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
