"""A forest plot: differences with their intervals, one per line, beside published ones."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from nearkin.report.charts import INK, PALETTE, figure_style, new_figure

MEASURED, EMPHASISED, PUBLISHED = PALETTE[5], PALETTE[0], PALETTE[1]


class Effect(NamedTuple):
    """A line of the plot; NaN where there is no number."""

    label: str  # of one or several lines
    difference: float
    low: float
    high: float
    published: float
    remark: str = ""  # at the right edge
    emphasised: bool = False


def draw_forest(effects: Sequence[Effect], *, unit: str) -> Any:
    """Dots with intervals are measured, hollow diamonds published; the first lines are at the top."""
    with figure_style():
        lines = sum(1 + effect.label.count("\n") for effect in effects)
        figure = new_figure(7.6, 1.15 + 0.14 * len(effects) + 0.12 * lines)
        plot = figure.subplots()
        for place, effect in enumerate(effects):
            colour = EMPHASISED if effect.emphasised else MEASURED
            if not math.isnan(effect.low):
                plot.plot([effect.low, effect.high], [place] * 2, "-", color=colour, linewidth=2)
            plot.plot([effect.difference], [place], "o", color=colour, markersize=6)
            plot.plot([effect.published], [place], "D", color=PUBLISHED, markerfacecolor="none", markersize=5.5)
            plot.annotate(
                effect.remark, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=INK
            )
        plot.axvline(0, color=INK, linewidth=0.9, zorder=0.5)
        plot.set_yticks(range(len(effects)), [effect.label for effect in effects], fontsize=7.5)
        for tick, effect in zip(plot.get_yticklabels(), effects, strict=True):
            tick.set_fontweight("bold" if effect.emphasised else "normal")
        plot.set_ylim(len(effects) - 0.4, -0.6)
        plot.set_xlim(*_limits(effects))
        plot.grid(visible=False, axis="y")
        plot.set_xlabel(unit)
        words = "Dots: ours, with 95 % intervals. Diamonds: the paper. Bold: the claim that the verdict is about."
        figure.supxlabel(words, fontsize=7, color=INK)
    return figure


def _limits(effects: Sequence[Effect]) -> tuple[float, float]:
    """Both ends of the axis, with zero inside; one wide interval must not hide the others."""
    points = [0.0, *(v for e in effects for v in (e.difference, e.published) if not math.isnan(v))]
    low, high = min(points), max(points)
    room = max(0.35 * (high - low), 0.5)
    ends = [v for e in effects for v in (e.low, e.high) if not math.isnan(v)]
    least, most = min([low, *ends]), max([high, *ends])
    return max(least, low - 2 * room) - 0.1 * room, min(most, high + 2 * room) + 0.1 * room
