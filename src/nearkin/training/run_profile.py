"""Where the time of a run goes: a table of its parts, and a trace of a few steps.

Off, a part costs a call that returns the same empty context. On, each part ends by waiting for the device, so that its
time is its own; a profiled run is therefore slower.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from nearkin.console import Reporter, plain_table
from nearkin.files import write_text
from nearkin.training.run_folder import RunFolder

TRACED = 3
"""Steps in the trace, after `SETTLE` steps of the whole network, or as many as there are."""

SETTLE = 5

_NOT_TIMED = nullcontext()


class Profile:
    """Times the parts of a run, each without the parts within it, so that they add up to the whole."""

    def __init__(self, run: RunFolder, device: torch.device, *, on: bool) -> None:
        self.run, self.device, self.on = run, device, on
        self.within = ["preparing"]  # the parts that have begun, the innermost last
        self.seconds, self.times = defaultdict[str, float](float), Counter(self.within)
        self.since = time.perf_counter()
        self.traced = range(0)
        self.tracer: torch.profiler.profile | None = None

    def part(self, name: str) -> AbstractContextManager[object]:
        """The context of a part of the run."""
        return self._timed(name) if self.on else _NOT_TIMED

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._begin(name)
        try:
            with record_function(name):
                yield
        finally:
            self._end()

    def _begin(self, name: str) -> None:
        self._charge()
        self.within.append(name)
        self.times[name] += 1

    def _end(self) -> None:
        self._charge()
        self.within.pop()

    def _charge(self) -> None:
        """Count the time since the last call for the innermost part."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[self.within[-1]] += now - self.since
        self.since = now

    @contextmanager
    def training(self, steps: range, *, settled: int) -> Iterator[None]:
        """The context of the training steps; those from step `settled` on are alike and may be traced."""
        if not self.on:
            yield
            return
        first = max(min(max(steps.start, settled) + SETTLE, steps.stop - TRACED), steps.start)
        self.traced = range(first, first + TRACED)
        with self.part("other"), self._compiling():
            try:
                yield
            finally:
                self._end_trace()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Within this context, time spent in torch.compile is a part of its own."""
        from torch._dynamo.callback import callback_handler

        def begin(_: object) -> None:
            self._begin("compiling")

        def end(_: object) -> None:
            self._end()

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)

    def trace(self, step: int) -> None:
        """Before a step: start the trace if it is the first one to trace, end it after the last one."""
        if self.tracer is None and step in self.traced:
            with self.part("tracing"):
                self.tracer = torch.profiler.profile(record_shapes=True)
                self.tracer.start()
        elif self.tracer is not None and step not in self.traced:
            self._end_trace()

    def _end_trace(self) -> None:
        if self.tracer is not None:
            with self.part("tracing"):
                self.tracer.stop()
                self.tracer.export_chrome_trace(str(self.run.trace))
            self.tracer, self.traced = None, range(0)

    def report(self, reporter: Reporter) -> None:
        """Print the table and keep it in the run folder."""
        if self.on:
            self._charge()
            whole = sum(self.seconds.values())
            rows = [
                [name, f"{seconds:.2f}", f"{100 * seconds / whole:.1f}", f"{self.times[name]:,}"]
                for name, seconds in sorted(self.seconds.items(), key=lambda row: -row[1])
            ]
            rows.append(["whole", f"{whole:.2f}", "100.0", ""])
            table = plain_table(["part", "seconds", "percent", "times"], rows)
            write_text(self.run.profile, table + "\n")
            reporter.note(table)
