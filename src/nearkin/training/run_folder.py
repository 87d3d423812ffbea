"""The files of a run, written so that a killed run can be resumed."""

import io
from pathlib import Path

from rich.console import Console

from nearkin.console import PrintedTable, score_cells
from nearkin.errors import NearkinError
from nearkin.files import Json, Needs, append_line, line_of, read_json, read_lines, sync_path, write_text
from nearkin.training.gain import read_gain

CHOSEN = {
    "last": "the last epoch",
    "validation": "the best on held-out training classes",
    "test": "the best ON THE TEST SET",
}
"""The setting `select` → which epoch a run keeps, in words."""


RESULT: Needs = {"scores": dict, "seed": int, "steps": int, "seconds": int | float, "select": str}
"""The entries of result.json that every run has."""


CARD_MARK = b"library_name: nearkin"
"""What a model card of nearkin holds, and no other README.md."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.settings = self.path / "settings.toml"
        self.card = self.path / "README.md"
        self.log = self.path / "log.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.classes = self.path / "classes.safetensors"
        self.result = self.path / "result.json"
        self.snapshots = self.path / "snapshots"
        self.before = self.path / "before.safetensors"
        self.profile = self.path / "profile.txt"
        self.trace = self.path / "trace.json.gz"

    def __repr__(self) -> str:
        if not self.result.exists():
            return f"Run {self.path}, not finished"
        result, plan = self.read_result(), read_json(self.config)["plan"]
        rows = {"before training": result.get("before", {}), f"kept: {CHOSEN[result['select']]}": result["scores"]}
        if not result["scores"]:
            return f"Run {self.path}: {plan['method']} on all classes of {plan['data']}, {plan['backbone']}; no scores"
        title = f"Run {self.path}: {plan['method']} on {plan['data']}, {plan['backbone']}; test classes, percent"
        text = io.StringIO()
        Console(file=text, width=120, no_color=True, force_jupyter=False, force_terminal=False).print(
            PrintedTable(title, *score_cells(rows)), soft_wrap=True
        )
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*lines, str(read_gain(result) or "")]).rstrip()

    def parts(self) -> list["RunFolder"]:
        """Return the runs of the folds; empty for a single run."""
        return [RunFolder(self.path / name) for name in read_json(self.config).get("parts", [])]

    def read_result(self) -> Json:
        """Read what a finished run measured."""
        if not self.result.exists() and self.config.exists():
            saved = read_json(self.config).get("saved")
            raise NearkinError(
                f"{self.path} was written by Model.save, which measures nothing: use nearkin eval {self.path}."
                if saved
                else f"{self.path} is not finished: continue it with nearkin train --resume --out {self.path}."
            )
        return read_json(self.result, needs=RESULT)

    def leftovers(self) -> list[str]:
        """Return the names of files and folders that a run has written here."""
        files = (
            self.config,
            self.settings,
            self.log,
            self.checkpoint,
            self.model,
            self.classes,
            self.result,
            self.snapshots,
            self.before,
            self.profile,
            self.trace,
        )
        folders = (
            path for pattern in ("fold-*", "repeat-*", "test-view", "tensorboard") for path in self.path.glob(pattern)
        )
        cards = [self.card] if self.has_own_card() else []
        return sorted(path.name for path in (*files, *folders, *cards) if path.exists())

    def has_own_card(self) -> bool:
        """Whether there is a README.md that nearkin wrote."""
        if not self.card.is_file():
            return False
        return CARD_MARK in self.card.read_bytes()

    def append(self, event: Json) -> None:
        """Append a line to the log. `sync_log` makes it safe from a power failure."""
        append_line(self.log, event, sync=False)

    def sync_log(self) -> None:
        """Flush the log to disk."""
        sync_path(self.log)

    def events(self) -> list[Json]:
        """Read the log, except a last line that a kill left incomplete."""
        return read_lines(self.log, needs={"event": str, "step": int}, otherwise="train again")

    def keep_events(self, count: int) -> None:
        """Keep the first `count` lines of the log: those before the checkpoint that training resumes from."""
        events = self.events()
        if len(events) < count:
            raise NearkinError(
                f"{self.log} has {len(events)} of the {count} lines that were written before {self.checkpoint.name}: "
                "restore it, or train again."
            )
        write_text(self.log, "".join(map(line_of, events[:count])))
