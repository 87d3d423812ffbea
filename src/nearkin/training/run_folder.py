"""The files of a run, written so that a killed run can be resumed."""

import json
from pathlib import Path

from nearkin.errors import NearkinError
from nearkin.files import Json, atomic_file, read_json

CHOSEN = {
    "last": "the last epoch",
    "validation": "the best on held-out training classes",
    "test": "the best ON THE TEST SET",
}
"""The setting `select` → which epoch a run keeps, in words."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.log = self.path / "log.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.classes = self.path / "classes.safetensors"
        self.result = self.path / "result.json"
        self.snapshots = self.path / "snapshots"

    def parts(self) -> list["RunFolder"]:
        """Return the runs of the folds; empty for a single run."""
        return [RunFolder(self.path / name) for name in read_json(self.config).get("parts", [])]

    def leftovers(self) -> list[str]:
        """Return the names of files and folders that a run has written here."""
        files = (self.config, self.log, self.checkpoint, self.model, self.classes, self.result, self.snapshots)
        folders = (path for pattern in ("fold-*", "repeat-*", "tensorboard") for path in self.path.glob(pattern))
        return sorted(path.name for path in (*files, *folders) if path.exists())

    def append(self, event: Json) -> None:
        """Append a line to the log."""
        with self.log.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def events(self) -> list[Json]:
        """Read the log, except a last line that a kill left incomplete."""
        if not self.log.exists():
            return []
        lines = self.log.read_bytes().split(b"\n")
        return [self._event(line, number) for number, line in enumerate(lines[:-1], start=1)]

    def _event(self, line: bytes, number: int) -> Json:
        try:
            event: Json = json.loads(line)
            if {"event", "step"} <= event.keys():
                return event
        except (ValueError, AttributeError):  # not JSON, not UTF-8, or not a record
            pass
        raise NearkinError(f"{self.log} is damaged in line {number}: restore it, or train again.")

    def keep_events(self, count: int) -> None:
        """Keep the first `count` lines of the log: those before the checkpoint that training resumes from."""
        events = self.events()[:count]
        with atomic_file(self.log) as temporary:
            temporary.write_text("".join(json.dumps(e) + "\n" for e in events))
