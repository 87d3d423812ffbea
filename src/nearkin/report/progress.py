"""What a long job tells while it runs: bars in a terminal, plain lines elsewhere, nothing where nobody asked."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
