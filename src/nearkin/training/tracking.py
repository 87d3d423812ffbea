"""A run for TensorBoard: what its log says, as curves. The log is the truth; this is written from it.

loss, lr          of each epoch
check/METRIC      on held-out training classes, or on test where that was asked for
test/METRIC       looks at the test set
kept/METRIC       the test scores of the model that is kept, at the step it is from
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nearkin.errors import NearkinError
from nearkin.files import Json


def curves(event: Json, select_by: str) -> Iterator[tuple[str, float]]:
    """The points of an event, each with the name of its curve."""
    kind = event["event"]
    if kind == "epoch":
        yield "loss", event["loss"]
        yield "lr", event["lr"]
    elif kind == "check":
        yield f"check/{select_by}", event["score"]
    else:
        yield from ((f"{kind}/{metric}", value) for metric, value in event["scores"].items())


class Tracker:
    """Writes events into a folder for TensorBoard, those there were first: a resumed run has each once.

    With no folder it writes nothing, and needs nothing.
    """

    def __init__(self, folder: Path | None, select_by: str) -> None:
        self.folder, self.select_by = folder, select_by
        self.writer: Any = None
        if folder is not None:
            _writer_class()  # missing is better said now than after the first epoch

    def begin(self, events: Iterable[Json]) -> None:
        """Forget what was written before, and write these."""
        if self.folder is None:
            return
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.writer = _writer_class()(str(self.folder))
        for event in events:
            self.add(event)

    def add(self, event: Json) -> None:
        """One more event, at once on disk; its values are on the host already."""
        if self.writer is not None:
            for name, value in curves(event, self.select_by):
                self.writer.add_scalar(name, value, event["step"])
            self.writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise NearkinError(
            "TensorBoard is not installed: install nearkin[track], or leave the setting tensorboard off."
        ) from None
    return SummaryWriter
