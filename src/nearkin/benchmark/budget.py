"""A budget of time for a command that makes several runs."""

import _thread
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nearkin.errors import NearkinError

_UNITS = {"h": 3600, "m": 60, "s": 1}


def seconds_of(budget: str | float) -> float:
    """The seconds in a text such as 25m, 90s or 1h30m; a plain number is seconds."""
    if isinstance(budget, int | float):
        return float(budget)
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", budget.strip())
    if parts is None or not any(parts.groups()):
        raise NearkinError(f"Cannot read the budget {budget!r}: write hours, minutes, seconds as in 1h30m, 25m or 90s.")
    return float(sum(int(number or 0) * unit for number, unit in zip(parts.groups(), _UNITS.values(), strict=True)))


class Budget:
    """A budget of time; None is unlimited."""

    def __init__(self, budget: str | float | None) -> None:
        self.end = None if budget is None else time.monotonic() + seconds_of(budget)
        self.expired = False

    def allows(self, seconds: float) -> bool:
        """Whether more than this many seconds are left."""
        return self.end is None or time.monotonic() + max(seconds, 1e-3) < self.end

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Interrupt the main thread at the end of the budget, as Ctrl-C does: training saves itself first."""
        if self.end is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        timer = threading.Timer(max(0.0, self.end - time.monotonic()), self._interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _interrupt(self) -> None:
        self.expired = True
        _thread.interrupt_main()
