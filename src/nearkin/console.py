"""Output of long jobs: progress bars and notes, a clean stop on Ctrl-C, and tables for terminal, Markdown and LaTeX."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from nearkin.errors import NearkinError

Advance = Callable[[int, int], None]  # (done, total)
Status = Callable[[int, str], None]  # (steps done, text beside the bar)


class Reporter:
    """Progress bars and notes on a console, silent without one; and a list of images that were left out.

    A strict reporter makes those an error.
    """

    def __init__(self, console: Console | None = None, *, strict: bool = False) -> None:
        self.console, self.strict = console, strict
        self.left_out: dict[str, str] = {}  # path → reason
        self.training_now = False  # rich shows one bar at a time: the training bar hides others

    @property
    def watched(self) -> bool:
        """Whether the console is a terminal, where bars move."""
        return self.console is not None and self.console.is_terminal

    def note(self, sentence: str) -> None:
        """Print one sentence."""
        if self.console is not None:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def leave_out(self, images: Iterable[tuple[Path, str]]) -> None:
        """Add images that cannot be used, each with the reason."""
        found = {str(path): reason for path, reason in images}
        self.left_out |= found
        if found and self.strict:
            first, reason = next(iter(found.items()))
            count = "An image" if len(found) == 1 else f"{len(found):,} images"
            raise NearkinError(
                f"{count} would be left out, which strict forbids, the first: {first} ({reason}). Repair or move such "
                "files, or leave out strict."
            )

    @contextmanager
    def bar(self, title: str) -> Iterator[Advance]:
        """Show a bar for work of known length, or without a terminal one line every ten seconds."""
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
        """Show a bar over all training steps with a status text, in a terminal only; see `epoch` for other output."""
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
        """Print the line of an epoch, unless a terminal shows it in the bar."""
        if self.console is not None and not self.console.is_terminal:
            self.note(sentence)


def notebook_reporter() -> Reporter:
    """Return a reporter that shows one line per epoch in a notebook; elsewhere a silent one."""
    console = Console(width=120)
    return Reporter(console if console.is_jupyter else None)


@contextmanager
def stop_on_interrupt(*, once: bool = False) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets, for a stop after the current step.

    A second one stops at once, unless with `once`: torchrun passes Ctrl-C on to processes that have had it already.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(*_: object) -> None:
        requested.set()
        if not once:
            release()

    def release() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        release()


NOTHING = "–"
"""The cell of a missing value."""

GAP = 2
"""Spaces between the columns of a table."""


class PrintedTable(NamedTuple):
    """A table of strings. A rich console prints it; `markdown` and `latex` format it.

    With `text` all columns are left-aligned, and a narrow terminal folds their cells. Otherwise the columns after the
    first hold numbers: a narrow terminal folds headers and splits the table into several, but never breaks a cell.
    """

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    text: bool = False

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self._folded() if self.text else self._split(options.max_width)
        yield from (Text(note, style="dim") for note in self.notes)

    def _folded(self) -> Iterator[RenderableType]:
        table = _frame(self.title)
        for name in self.header:
            table.add_column(name, overflow="fold")
        for row in self.cells:
            table.add_row(*row)
        yield table

    def _split(self, room: int) -> Iterator[RenderableType]:
        columns = list(zip(self.header, *self.cells, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        if sum(width + GAP for width in widths) > room:
            widths = [max(map(cell_len, (*name.split(), *cells)), default=0) for name, *cells in columns]
        for number, group in enumerate(_fitting_groups(widths, room)):
            table = _frame("" if number else self.title)
            for i in (0, *group):
                table.add_column(self.header[i], width=widths[i], justify="right" if i else "left", overflow="fold")
            for row in self.cells:
                table.add_row(*(row[i] for i in (0, *group)))
            if number:
                yield ""
            yield table


def _frame(title: str) -> Table:
    return Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0))


def _fitting_groups(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split the columns after the first into groups that fit beside it, at least one column in each."""
    groups: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if groups[-1] and sum(widths[j] + GAP for j in (0, *groups[-1], i)) > room:  # rich adds a gap after the last
            groups.append([])
        groups[-1].append(i)
    return groups


def score_cells(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table with one row per name and one column per metric, in percent with one decimal."""
    metrics = list(dict.fromkeys(metric for scores in rows.values() for metric in scores))
    cells = [[name, *(f"{s[m]:.1f}" if m in s else NOTHING for m in metrics)] for name, s in rows.items()]
    return ["", *metrics], cells


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours, whichever suits its length."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def terminal(tables: Sequence[PrintedTable]) -> Group:
    """Tables for a rich console, each followed by an empty line."""
    return Group(*(part for table in tables for part in (table, Text(""))))


def plain_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A left-aligned table as lines of text. No cell is ever broken or cut: a narrow terminal wraps the lines."""
    rows = [header, *cells]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    padded = ((cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((" " * GAP).join(row).rstrip() for row in padded)


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """A table in Markdown: numbers right-aligned, or with `text` all columns left-aligned."""
    rule = ["---", *("---" if text else "---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *cells))


def markdown(tables: Sequence[PrintedTable], *, level: int = 3) -> str:
    """Tables in Markdown, each under a heading of that level."""
    parts = []
    for table in tables:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in table.cells]
        notes = "\n".join(f"- {note}" for note in table.notes)
        parts.append(f"{'#' * level} {table.title}\n\n{markdown_table(table.header, cells)}\n\n{notes}\n")
    return "\n".join(parts)


def latex(tables: Sequence[PrintedTable]) -> str:
    """Tables in LaTeX (packages booktabs and graphicx); a table wider than the page is scaled down to fit."""
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
