"""The log of a run as curves for TensorBoard.

loss, lr          of each epoch
check/METRIC      on held-out training classes, or on test with select=test
test/METRIC       on the test set
kept/METRIC       on the test set, of the model that is kept, at its step
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nearkin.errors import NearkinError
from nearkin.files import Json


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


class Tracker:
    """Writer of events for TensorBoard; without a folder it writes nothing and needs no package.

    A resumed run writes its earlier events first, so that each appears once.
    """

    def __init__(self, folder: Path | None, select_by: str) -> None:
        self.folder, self.select_by = folder, select_by
        self.writer: Any = None
        if folder is not None:
            _writer_class()  # if it is missing, fail now rather than after the first epoch

    def begin(self, events: Iterable[Json]) -> None:
        """Delete what was written before, and write these events."""
        if self.folder is None:
            return
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.writer = _writer_class()(str(self.folder))
        for event in events:
            self.add(event)

    def add(self, event: Json) -> None:
        """Write an event to disk at once."""
        if self.writer is not None:
            for name, value in curves(event, self.select_by):
                self.writer.add_scalar(name, value, event["step"])
            self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise NearkinError(
            "TensorBoard is not installed: install nearkin[track], or leave out the setting tensorboard."
        ) from None
    return SummaryWriter
