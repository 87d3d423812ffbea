"""Finished runs as lines of one file, which can be copied to another machine and merged with others by run id.

results.jsonl              one line per run: id, what decides its outcome, scores, provenance
queries/ID.safetensors     for the bootstrap: the class of every test query and its value of each metric
"""

import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.files import Json, Needs, atomic_file, line_of, read_lines, read_tensors, write_tensors, write_text

LABELS = "labels"
NEEDED: Needs = {"id": str, "seed": int, "scores": dict}
"""The entries that every run has."""


class Merged(NamedTuple):
    """The outcome of a merge."""

    runs: int
    conflicts: tuple[str, ...]  # one sentence per run with different scores


class Queries(NamedTuple):
    """The values of each query of one run, in the order of the test set."""

    labels: Tensor  # [Q] int64
    values: Mapping[str, Tensor]  # metric → [Q] percent, NaN if the query has no relevant item


def read_results(path: str | Path) -> dict[str, Json]:
    """The runs of a results file by id; the last line of a run counts.

    An incomplete last line, left by a killed process, is ignored.
    """
    lines = read_lines(Path(path), needs=NEEDED, otherwise="remove the line")
    return {record["id"]: record for record in lines}


def images_of(record: Json) -> str:
    """The digest of the images that a run was made with; empty for runs that did not record it."""
    return str(record.get("images", {}).get("digest", ""))


def merge(
    paths: Sequence[str | Path], out: str | Path, *, only: Container[str] | None = None, queries: bool = True
) -> Merged:
    """Merge results files, each run once; if two disagree, the first is kept and the conflict reported.

    Runs made with different images of one data set are refused. `only` are the ids of the runs to keep; without
    `queries` the values of each query are left behind.
    """
    kept: dict[str, Json] = {}
    conflicts: list[str] = []
    made_with: dict[tuple[str, str], tuple[str, Path]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise NearkinError(f"There is no results file {path}.")
        for key, record in read_results(path).items():
            if only is not None and key not in only:
                continue
            data = (str(record.get("data")), str(record.get("settings", {}).get("data")))
            digest, other = made_with.setdefault(data, (images_of(record), path))
            if digest != images_of(record):
                raise NearkinError(
                    f"{path} and {other} have runs made with different images of {data[0]}: merge them into two files."
                )
            conflicts += _differences(kept[key], record, path) if key in kept else []
            first = kept.setdefault(key, record)
            first["scores"] = {**record["scores"], **first["scores"]}
        if queries:
            _copy_queries(path.parent, Path(out).parent)
    write_text(Path(out), "".join(map(line_of, kept.values())))
    return Merged(len(kept), tuple(conflicts))


def _differences(first: Json, second: Json, path: Path) -> list[str]:
    shared = first["scores"].keys() & second["scores"].keys()
    different = [m for m in shared if abs(first["scores"][m] - second["scores"][m]) > 1e-6]
    if not different:
        return []
    metric = min(different)
    kept, dropped = (f"{run['scores'][metric]:.2f} ({run.get('hardware')})" for run in (first, second))
    what = f"{first.get('method')} on {first.get('data')} with seed {first['seed']}"
    return [f"{what}: {metric} {kept} is kept and {dropped} of {path} is not."]


def _copy_queries(source: Path, target: Path) -> None:
    for file in sorted((source / "queries").glob("*.safetensors")):
        copy = target / "queries" / file.name
        if not copy.exists():
            with atomic_file(copy) as temporary:
                shutil.copyfile(file, temporary)


def query_file(out: str | Path, key: str) -> Path:
    """The file with the query values of a run."""
    return Path(out) / "queries" / f"{key}.safetensors"


def write_queries(path: Path, queries: Queries) -> None:
    """Write the values, as float32."""
    values = {name: value.float() for name, value in queries.values.items()}
    write_tensors(path, {LABELS: queries.labels.to(torch.int32), **values})


def read_queries(path: Path) -> Queries:
    """Read the values of a run."""
    tensors, _ = read_tensors(path)
    labels = tensors.pop(LABELS).long()
    return Queries(labels, tensors)
