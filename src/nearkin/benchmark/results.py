"""Finished runs as lines of one file, which can be carried to another machine and merged with others by run id.

results.jsonl              a line a run: id, what decides its outcome, scores, provenance
queries/ID.safetensors     what the bootstrap needs: the class of every test query and its value by each metric
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.files import Json, atomic_file, read_tensors, write_tensors

LABELS = "labels"
NEEDED = {"id", "seed", "scores"}
"""What a line must hold to be a run."""


class Merged(NamedTuple):
    """What a merge found."""

    runs: int
    conflicts: tuple[str, ...]  # sentences: the same run with other scores


class Queries(NamedTuple):
    """The values of one run query by query, in the order of the test set."""

    labels: Tensor  # [Q] int64
    values: Mapping[str, Tensor]  # metric → [Q] percent, NaN where the query has no relevant item


def read_results(path: str | Path) -> dict[str, Json]:
    """The runs of a results file by id; of several lines for one run the last counts, and one that a kill cut short at
    the end does not.
    """
    file = Path(path)
    if not file.exists():
        return {}
    found: dict[str, Json] = {}
    *lines, rest = file.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, rest] if _record(rest) else lines, start=1):
        record = _record(line)
        if record is None:
            raise NearkinError(f"Line {number} of {file} is no run: remove the line, or restore the file.")
        found[record["id"]] = record
    return found


def _record(line: bytes) -> Json | None:
    """A run, or None where a line is none."""
    try:
        record: Any = json.loads(line)
        return record if record.keys() >= NEEDED and isinstance(record["scores"], dict) else None
    except (ValueError, AttributeError):  # ValueError: neither JSON nor UTF-8
        return None


def append_result(path: Path, record: Json) -> None:
    """Add a run; a rest that a kill left at the end of the file is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        rest = content[content.rfind(b"\n") + 1 :]
        if _record(rest):
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(rest))
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def merge(paths: Sequence[str | Path], out: str | Path) -> Merged:
    """One results file of several, each run once; where two disagree the first is kept, and a sentence says so."""
    kept: dict[str, Json] = {}
    conflicts: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise NearkinError(f"There is no results file {path}.")
        for key, record in read_results(path).items():
            conflicts += _differences(kept[key], record, path) if key in kept else []
            mine = kept.setdefault(key, record)
            mine["scores"] = {**record["scores"], **mine["scores"]}
        _copy_queries(path.parent, Path(out).parent)
    with atomic_file(Path(out)) as temporary:
        temporary.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept.values()), encoding="utf-8")
    return Merged(len(kept), tuple(conflicts))


def _differences(mine: Json, other: Json, path: Path) -> list[str]:
    shared = mine["scores"].keys() & other["scores"].keys()
    apart = [m for m in shared if abs(mine["scores"][m] - other["scores"][m]) > 1e-6]
    if not apart:
        return []
    metric = min(apart)
    one, two = (f"{run['scores'][metric]:.2f} ({run.get('hardware')})" for run in (mine, other))
    what = f"{mine.get('method')} on {mine.get('data')} with seed {mine['seed']}"
    return [f"{what}: {metric} {one} is kept and {two} of {path} is not."]


def _copy_queries(source: Path, target: Path) -> None:
    for file in sorted((source / "queries").glob("*.safetensors")):
        place = target / "queries" / file.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def query_file(out: str | Path, key: str) -> Path:
    """Where the query values of a run lie."""
    return Path(out) / "queries" / f"{key}.safetensors"


def write_queries(path: Path, queries: Queries) -> None:
    """Keep the values, as float32."""
    values = {name: value.float() for name, value in queries.values.items()}
    write_tensors(path, {LABELS: queries.labels.to(torch.int32), **values})


def read_queries(path: Path) -> Queries:
    """The values of a run."""
    tensors, _ = read_tensors(path)
    labels = tensors.pop(LABELS).long()
    return Queries(labels, tensors)
