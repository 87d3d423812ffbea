"""Tables of scores, for a terminal and for Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

GAP = 2
"""Blanks between columns."""


def score_cells(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table with a row a name and a column a metric, in percent with one decimal."""
    metrics = list(dict.fromkeys(metric for scores in rows.values() for metric in scores))
    cells = [[name, *(f"{s[m]:.1f}" if m in s else "–" for m in metrics)] for name, s in rows.items()]
    return ["", *metrics], cells


def terminal_table(
    header: Sequence[str], cells: Sequence[Sequence[str]], *, title: str = "", text: bool = False
) -> Table:
    """A table for a terminal: the first column to the left, numbers to the right; with `text` all to the left.

    In a narrow terminal cells are folded.
    """
    table = _frame(title)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number and not text else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


class WideTable(NamedTuple):
    """A table of numbers for a terminal, in several parts where it is too wide: headers are folded, cells never."""

    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    title: str

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = [[name, *cells] for name, *cells in zip(self.header, *self.cells, strict=True)]
        widths = [max(map(cell_len, (*name.split(), *cells)), default=0) for name, *cells in columns]
        for number, part in enumerate(_parts(widths, options.max_width)):
            table = _frame("" if number else self.title)
            for i in (0, *part):
                table.add_column(columns[i][0], width=widths[i], justify="right" if i else "left")
            for row in self.cells:
                table.add_row(*(row[i] for i in (0, *part)))
            if number:
                yield ""
            yield table


def _frame(title: str) -> Table:
    return Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0))


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns after the first, in parts that fit beside it; one at least in each."""
    parts: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if parts[-1] and sum(widths[j] + GAP for j in (0, *parts[-1], i)) > room:  # rich keeps a gap after the last
            parts.append([])
        parts[-1].append(i)
    return parts


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """The same in Markdown; with `text` every column stands to the left."""
    rule = ["---", *("---" if text else "---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *cells))
