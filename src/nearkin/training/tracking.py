"""The log of a run as curves, for TensorBoard or for a function of the user.

loss, lr          of each epoch
check/METRIC      on held-out training classes, or on test with select=test
test/METRIC       on the test set
kept/METRIC       on the test set, of the model that is kept, at its step
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nearkin.errors import NearkinError
from nearkin.files import Json
from nearkin.training.plan import Plan

Log = Callable[[Mapping[str, float], int], object]
"""Receives points, name of the curve → value, and the step they belong to."""


def curves(event: Json, select_by: str) -> Iterator[tuple[str, float]]:
    """Return the points of an event, each with the name of its curve."""
    kind = event["event"]
    if kind == "epoch":
        yield "loss", event["loss"]
        yield "lr", event["lr"]
    elif kind == "check":
        yield f"check/{select_by}", event["score"]
    else:
        yield from ((f"{kind}/{metric}", value) for metric, value in event["scores"].items())


class TensorBoard:
    """A log into a folder that TensorBoard reads; each point is on disk at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None
        _writer_class()  # if it is missing, fail now rather than after the first epoch

    def open(self) -> None:
        """Delete what was written before, and begin."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.writer = _writer_class()(str(self.folder))

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class Tracker:
    """Passes the events of a run to its logs: TensorBoard if the plan asks for it, and the user's function.

    A resumed run passes its earlier events first, so that each log receives all of them.
    """

    def __init__(self, plan: Plan, folder: Path, log: Log | None = None, *, on: bool = True) -> None:
        self.tensorboard = TensorBoard(folder) if plan.tensorboard and on else None
        logs = (self.tensorboard, log and _of_fold(log, plan)) if on else ()
        self.logs = [each for each in logs if each is not None]
        self.select_by = plan.select_by

    def begin(self, events: Iterable[Json]) -> None:
        """Pass the events of before the checkpoint."""
        if self.tensorboard is not None:
            self.tensorboard.open()
        for event in events:
            self.add(event)

    def add(self, event: Json) -> None:
        """Pass an event."""
        for log in self.logs:
            if values := dict(curves(event, self.select_by)):  # a run without test images has no scores
                log(values, event["step"])

    def close(self) -> None:
        """Pass no more events."""
        if self.tensorboard is not None:
            self.tensorboard.close()


def _of_fold(log: Log, plan: Plan) -> Log:
    """Return a log that tells the curves of several folds apart: fold-1/loss, fold-2/loss, …"""
    if not plan.folds:
        return log
    return lambda values, step: log({f"fold-{plan.fold}/{name}": value for name, value in values.items()}, step)


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise NearkinError(
            "TensorBoard is not installed: install nearkin[track], or leave out the setting tensorboard."
        ) from None
    return SummaryWriter
