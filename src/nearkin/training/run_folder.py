"""TODO."""

import json
from pathlib import Path

from nearkin.files import Json, atomic_file, read_json

CHOSEN = {
    "last": "the last epoch",
    "validation": "the best on held-out training classes",
    "test": "the best ON THE TEST SET",
}
"""What chose the epoch that a run keeps, in words, by its `select`."""


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
        """The runs whose models are this one's together; none where it is a run by itself."""
        return [RunFolder(self.path / name) for name in read_json(self.config).get("parts", [])]

    def append(self, event: Json) -> None:
        """Add a line to the log."""
        with self.log.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def events(self) -> list[Json]:
        """The log, without a last line that a kill cut short."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def keep_events(self, count: int) -> None:
        """Forget what was logged after the checkpoint that training goes on from."""
        events = self.events()[:count]
        with atomic_file(self.log) as temporary:
            temporary.write_text("".join(json.dumps(e) + "\n" for e in events))
