"""The look of all figures, and the charts of a report: lines, histograms, critical differences.

Colour-blind readers can tell the colours apart, and markers differ too. Equal numbers give equal bytes. On a page a
chart is inline SVG: its text is text, and its colours follow the page's light or dark scheme.
"""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.evaluation.statistics import Floats
from nearkin.files import atomic_file
from nearkin.report.html import escape

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")  # after Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, GRID = "#333333", "#dddddd"
HEIGHT = 2.7  # inches of a chart, without its legend
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 9,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "nearkin",  # ids of an SVG are random otherwise
}


def figure_style() -> AbstractContextManager[None]:
    """Context in which matplotlib draws in the style of nearkin."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def curve_style(number: int) -> dict[str, str]:
    """Colour and marker of the n-th curve. The markers shift by one each time the colours repeat."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[(number + number // len(PALETTE)) % len(MARKERS)],
    }


def new_figure(width: float, height: float, *, layout: Any = "constrained") -> Any:
    """An empty figure of a size in inches; call it within `figure_style()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def panels(rows: int, columns: int, *, side: float) -> tuple[Any, Any]:
    """A figure of square panels, [rows][columns]."""
    figure = new_figure(side * columns, side * rows + 0.3)
    return figure, figure.subplots(rows, columns, squeeze=False)


def render(figure: Any, form: str, *, text: str = "path") -> bytes:
    """A figure as png or svg, without its date. `text`: "path" draws the letters of an svg, "none" keeps them text."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({**STYLE, "svg.fonttype": text}):
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(buffer, format=form, dpi=160, metadata=metadata, transparent=text == "none")
    return buffer.getvalue()


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG or SVG, by the suffix of the path."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(render(figure, path.suffix.removeprefix(".")))
    return path


def inline_svg(figure: Any, *, title: str) -> str:
    """A figure as SVG to be put into a page."""
    text = render(figure, "svg", text="none").decode()
    text = re.sub(r"<(metadata|style).*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    key = hashlib.sha256(f"{title}{text}".encode()).hexdigest()[:8]  # ids must differ between the charts of a page
    text = re.sub(r'(?<=\s)id="([^"]+)"', lambda m: f'id="{key}{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}", text)
    colours = {INK: "currentColor", GRID: "var(--rule)"} | {c: f"var(--c{n})" for n, c in enumerate(PALETTE)}
    for colour, name in colours.items():
        text = text.replace(colour, name)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", text)
    width, height = (float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    root = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
    return root + text[text.index(">") + 1 :]


class Line(NamedTuple):
    """A curve. Curves with the same label look the same and share one legend entry."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashes: str = "-"


def line_chart(lines: Sequence[Line], *, x: str, y: str, title: str, mark: float | None = None) -> str:
    """Curves as inline SVG; `mark` is the x of a vertical line."""
    figure, plot = _new_chart()
    numbers = {label: n for n, label in enumerate(dict.fromkeys(line.label for line in lines))}
    in_legend: set[str] = set()
    for line in lines:
        style: dict[str, Any] = curve_style(numbers[line.label])
        style["marker"] = style["marker"] if len(line.x) <= 12 else ""
        label = line.label if line.label not in in_legend else None
        plot.plot(line.x, line.y, line.dashes, label=label, linewidth=1.3, markersize=4, **style)
        in_legend.add(line.label)
    if mark is not None:
        plot.axvline(mark, color=INK, linewidth=0.8, linestyle=":")
    return _finish_chart(figure, plot, x=x, y=y, title=title, legend=len(in_legend))


def histogram(series: Mapping[str, Floats], *, x: str, y: str, title: str, bins: int = 50) -> str:
    """Outlines of several histograms over common bins, each of area 1, as inline SVG."""
    figure, plot = _new_chart()
    filled = {name: values for name, values in series.items() if len(values)}
    edges = np.histogram_bin_edges(np.concatenate(list(filled.values())), bins=bins) if filled else np.array([0.0, 1.0])
    for number, (name, values) in enumerate(filled.items()):
        heights, _ = np.histogram(values, bins=edges, density=True)
        colour, dashes = PALETTE[number % len(PALETTE)], ("-", "--", "-.")[number % 3]
        plot.stairs(heights, edges, color=colour, linestyle=dashes, linewidth=1.5, label=name)
        plot.stairs(heights, edges, color=colour, fill=True, alpha=0.15)
    return _finish_chart(figure, plot, x=x, y=y, title=title, legend=len(filled))


def _new_chart(width: float = 3.9, height: float = HEIGHT) -> tuple[Any, Any]:
    with figure_style():
        figure = new_figure(width, height)
        return figure, figure.subplots()


def _finish_chart(figure: Any, plot: Any, *, x: str, y: str, title: str, legend: int) -> str:
    with figure_style():
        plot.set_xlabel(x)
        plot.set_ylabel(y)
        if legend > 1:
            figure.legend(loc="outside lower left", ncols=1 if legend > 4 else 2, fontsize=8)
            figure.set_figheight(HEIGHT + 0.17 * (legend if legend > 4 else (legend + 1) // 2))
    return inline_svg(figure, title=title)


def critical_difference(
    names: Sequence[str], ranks: Sequence[float], groups: Sequence[Sequence[int]], critical: float, *, title: str
) -> str:
    """Average ranks on a line, the best on the left; a bar joins methods without a significant difference."""
    order = sorted(range(len(names)), key=lambda i: (ranks[i], i))
    left, right = order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :][::-1]
    low, high = 1.0, float(len(names))
    step, first = 0.34, 0.55 + 0.16 * len(groups)  # inches: between names, and from the axis down to the first one
    figure, plot = _new_chart(6.6, 0.95 + first + step * len(left))
    plot.set_axis_off()
    margin = 0.62 * (high - low)  # room for the names on either side
    plot.set_xlim(low - margin, high + margin)
    plot.set_ylim(-(first + step * len(left)), 0.8)
    plot.plot([low, high], [0, 0], color=INK, linewidth=1)
    for rank in range(1, len(names) + 1):
        plot.plot([rank, rank], [0, 0.09], color=INK, linewidth=1)
        plot.text(rank, 0.14, str(rank), ha="center", va="bottom", fontsize=9, color=INK)
    plot.plot([low, low + critical], [0.55, 0.55], color=INK, linewidth=2, marker="|", markersize=6)
    plot.text(
        low + critical / 2, 0.6, f"critical difference {critical:.2f}", ha="center", va="bottom", fontsize=8, color=INK
    )
    for side, end, away, align in ((left, low, -0.04 * margin, "right"), (right, high, 0.04 * margin, "left")):
        for place, i in enumerate(side):
            y = -(first + step * place)
            plot.plot([ranks[i], ranks[i], end + away], [0, y, y], color=INK, linewidth=0.8)
            plot.text(end + 2 * away, y, f"{names[i]} ({ranks[i]:.2f})", ha=align, va="center", fontsize=9, color=INK)
    for number, group in enumerate(groups):
        ends = [min(ranks[i] for i in group) - 0.02, max(ranks[i] for i in group) + 0.02]
        plot.plot(ends, [-0.16 * (number + 1)] * 2, color=PALETTE[0], linewidth=4, solid_capstyle="round")
    return inline_svg(figure, title=title)
