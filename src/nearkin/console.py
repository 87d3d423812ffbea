"""What a long job tells while it runs: bars in a terminal, plain lines elsewhere, nothing where nobody asked."""
# MERGED: Tables of scores, for a terminal and for Markdown.
# MERGED: Stopping when asked: Ctrl-C leaves things in order.
# MERGED: A table with its title and notes, in words, and the formats it is printed in: terminal, Markdown, LaTeX.

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Advance = Callable[[int, int], None]  # (done, total)
Status = Callable[[int, str], None]  # (steps done, what to say beside the bar)


class Reporter:
    """Bars and notes on a console; with no console, silence."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.training_now = False  # one bar at a time: within a training the smaller ones are left out

    @property
    def watched(self) -> bool:
        """Whether somebody sees a bar move."""
        return self.console is not None and self.console.is_terminal

    def note(self, sentence: str) -> None:
        """One sentence for the person who waits."""
        if self.console is not None:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str) -> Iterator[Advance]:
        """A bar for work of known length; without a terminal a line every ten seconds."""
        if self.console is None or self.training_now:
            yield lambda _done, _total: None
        elif self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(title, total=None)
                yield lambda done, total: progress.update(task, completed=done, total=total)
        else:
            yield self._lines(title)

    def _lines(self, title: str) -> Advance:
        last = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last > 10:
                last = time.monotonic()
                self.note(f"{title}: {done:,} of {total:,}")

        return advance

    @contextmanager
    def training(self, total: int) -> Iterator[Status]:
        """A bar over all steps with what is known now beside it; only in a terminal (elsewhere epochs are lines)."""
        if not self.watched:
            yield lambda _done, _text: None
            return
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("", total=total, text="")
            self.training_now = True
            try:
                yield lambda done, text: progress.update(task, completed=done, text=text)
            finally:
                self.training_now = False

    def epoch(self, sentence: str) -> None:
        """An epoch's line; in a terminal the bar says it already."""
        if self.console is not None and not self.console.is_terminal:
            self.note(sentence)


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


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C once sets the event, for a stop after the step; twice stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    usual = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, usual)


NOTHING = "–"


class PrintedTable(NamedTuple):
    """A table in words; every format is made of it."""

    title: str
    header: list[str]
    cells: list[list[str]]
    notes: list[str]


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
