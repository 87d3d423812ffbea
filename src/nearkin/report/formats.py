"""A table with its title and notes, in words, and the formats it is printed in: terminal, Markdown, LaTeX."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from nearkin.evaluate.statistics import Summary
from nearkin.report.tables import WideTable, markdown_table

NOTHING = "–"


class PrintedTable(NamedTuple):
    """A table in words; every format is made of it."""

    title: str
    header: list[str]
    cells: list[list[str]]
    notes: list[str]


def mean_words(found: Summary) -> str:
    """A mean, with its standard error where there is one."""
    return f"{found.mean:.2f}" if found.n < 2 else f"{found.mean:.2f} ± {found.error:.2f}"


def p_words(p: float) -> str:
    """A p-value as one prints it."""
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """A time in its fitting unit."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def terminal(tables: Sequence[PrintedTable]) -> Group:
    """For a terminal."""
    parts: list[Any] = []
    for table in tables:
        parts.append(WideTable(table.header, table.cells, table.title))
        parts += [Text(note, style="dim") for note in table.notes]
        parts.append(Text(""))
    return Group(*parts)


def markdown(tables: Sequence[PrintedTable], *, level: int = 3) -> str:
    """In Markdown, each table under a heading of that level."""
    parts = []
    for table in tables:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in table.cells]
        notes = "\n".join(f"- {note}" for note in table.notes)
        parts.append(f"{'#' * level} {table.title}\n\n{markdown_table(table.header, cells)}\n\n{notes}\n")
    return "\n".join(parts)


def latex(tables: Sequence[PrintedTable]) -> str:
    """In LaTeX, for the packages booktabs and graphicx; what is wider than the page is made as wide as it."""
    return "\n".join([r"% \usepackage{booktabs, graphicx}", *map(_latex, tables)])


def _latex(table: PrintedTable) -> str:
    lines = [" & ".join(map(_escape, row)) + r" \\" for row in (table.header, *table.cells)]
    notes = " ".join(map(_escape, table.notes))
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(table.title)}. {notes}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": r"$-$",
    "–": "--",
    "<": r"$<$",
    ">": r"$>$",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
