"""The items of an index in a folder: columns in memory and segment files on disk.

Columns are replaced, never changed, so searches need no lock. Files are written so that an interruption at any moment
loses nothing that was committed: a commit replaces the manifest, which names the files that count.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.errors import NearkinError
from nearkin.files import read_json, read_tensors, write_json, write_tensors
from nearkin.search.index.base import Batch, Floats, Item, Meta, NoIndex
from nearkin.search.index.engines import MANIFEST
from nearkin.search.index.exact import Ints, Mask


@dataclass(frozen=True, eq=False)
class Rows:
    """A snapshot of an index: one row per item in the order they were added; removed rows are marked."""

    vectors: Floats  # [N, D]
    keys: Ints  # [N] ascending; the key of a removed item is never used again
    ids: list[str]
    paths: list[str]  # the same list object as ids if they are equal
    labels: NDArray[np.int32]  # [N] index into `names`
    names: list[str | None]
    stamps: list[str | None]
    alive: Mask  # [N]

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, row: int) -> Item:
        """One row."""
        return Item(self.ids[row], self.paths[row], self.names[self.labels[row]], self.stamps[row])

    def with_batch(self, batch: Batch, keys: Ints) -> "Rows":
        """The rows with a batch appended."""
        ids, paths, labels, stamps = (list(column) for column in zip(*batch.items, strict=True))
        number = {name: n for n, name in enumerate(self.names)}
        for label in labels:
            number.setdefault(label, len(number))
        same = self.ids is self.paths and ids == paths
        all_ids = self.ids + ids
        return Rows(
            vectors=extended(self.vectors, batch.vectors),
            keys=np.concatenate([self.keys, keys]),
            ids=all_ids,
            paths=all_ids if same else self.paths + paths,
            labels=np.concatenate([self.labels, np.array([number[label] for label in labels], np.int32)]),
            names=list(number),
            stamps=self.stamps + stamps,
            alive=np.concatenate([self.alive, np.ones(len(ids), np.bool_)]),
        )

    def without(self, rows: Iterable[int]) -> "Rows":
        """The rows with some more marked as removed."""
        alive = self.alive.copy()
        alive[list(rows)] = False
        return replace(self, alive=alive)

    def take(self, rows: Ints) -> "Rows":
        """Some rows, by number."""
        numbers = rows.tolist()
        ids = [self.ids[row] for row in numbers]
        return Rows(
            vectors=self.vectors[rows],
            keys=self.keys[rows],
            ids=ids,
            paths=ids if self.ids is self.paths else [self.paths[row] for row in numbers],
            labels=self.labels[rows],
            names=self.names,
            stamps=[self.stamps[row] for row in numbers],
            alive=self.alive[rows],
        )

    def of_labels(self, labels: Sequence[str] | None) -> Mask:
        """A mask of the rows that exist and have one of the labels."""
        if labels is None:
            return self.alive
        wanted = np.array([name in labels for name in self.names], np.bool_)
        return self.alive & wanted[self.labels] if len(self) else self.alive


def no_rows(dim: int) -> Rows:
    """The rows of an empty index."""
    ids: list[str] = []
    none = np.empty(0, np.int64)
    return Rows(np.empty((0, dim), np.float32), none, ids, ids, none.astype(np.int32), [], [], none.astype(np.bool_))


def extended(v: Floats, more: Floats) -> Floats:
    """`v` with rows appended in its spare capacity, or in a new array of twice the size.

    Only the newest array may be extended. Older ones stay valid, since they end before the new rows.
    """
    total = len(v) + len(more)
    capacity = v.base if isinstance(v.base, np.ndarray) else v
    if len(capacity) < total:
        capacity = np.empty((max(total, 2 * len(v)), v.shape[1]), np.float32)
        capacity[: len(v)] = v
    capacity[len(v) : total] = more
    return capacity[:total]


FORMAT = 1
INDEX_FILES = re.compile(r"(items|removed)-\d+\.safetensors|graph-\d+\.faiss|\.(items|removed|graph|index)[-.].*")


class Segment(NamedTuple):
    """One file of items."""

    file: str
    rows: int


class Manifest(NamedTuple):
    """The files that make up the index."""

    meta: Meta
    generation: int = 0  # number of commits, and the number in the names of new files
    next_key: int = 0
    segments: tuple[Segment, ...] = ()
    removed: str | None = None
    graph: Meta | None = None  # file, its items, its digest

    @property
    def files(self) -> set[str]:
        """The names of all files of the index."""
        graph = self.graph["file"] if self.graph else None
        return {name for name in (*(s.file for s in self.segments), self.removed, graph) if name}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index."""
    path = folder / MANIFEST
    if not path.exists():
        raise NoIndex(f"There is no index in {folder}: create one with nearkin index RUN IMAGES -o {folder}.")
    try:
        content = read_json(path)
    except NearkinError:
        raise NearkinError(f"{path} is damaged: restore it, or create the index again.") from None
    if content.get("format") != FORMAT or "meta" not in content:
        raise NearkinError(f"{path} is not an index manifest of this version: create the index again.")
    try:
        segments = tuple(Segment(*entry) for entry in content["segments"])
        known = {name: content[name] for name in ("meta", "generation", "next_key", "removed", "graph")}
    except (KeyError, TypeError):
        raise NearkinError(f"{path} is damaged: restore it, or create the index again.") from None
    return Manifest(**known, segments=segments)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit: these files are now the index."""
    write_json(folder / MANIFEST, {"format": FORMAT, **manifest._asdict()})


def write_segment(folder: Path, generation: int, rows: Rows) -> Segment:
    """Write rows as a file of items."""
    labels = [rows.names[n] for n in rows.labels.tolist()]
    ids = None if rows.ids is rows.paths else rows.ids
    text = json.dumps({"ids": ids, "paths": rows.paths, "labels": labels, "stamps": rows.stamps})
    name = f"items-{generation:08d}.safetensors"
    tensors = {
        "keys": torch.from_numpy(rows.keys),
        "vectors": torch.from_numpy(rows.vectors),
        "items": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),
    }
    write_tensors(folder / name, tensors)
    return Segment(name, len(rows))


def write_removed(folder: Path, generation: int, keys: Ints) -> str:
    """Write the keys of removed items."""
    name = f"removed-{generation:08d}.safetensors"
    write_tensors(folder / name, {"keys": torch.from_numpy(keys)})
    return name


def read_rows(folder: Path, manifest: Manifest) -> Rows:
    """Read all items."""
    dim: int = manifest.meta["dim"]
    total = sum(segment.rows for segment in manifest.segments)
    rows = replace(no_rows(dim), vectors=np.empty((total, dim), np.float32)[:0])  # with capacity for all
    for segment in manifest.segments:
        batch, keys = _read_segment(folder / segment.file, segment, dim)
        rows = rows.with_batch(batch, keys)
    if manifest.removed is None:
        return rows
    gone = read_tensors(folder / manifest.removed)[0]["keys"].numpy()
    return rows.without(np.flatnonzero(np.isin(rows.keys, gone)))


def _read_segment(path: Path, segment: Segment, dim: int) -> tuple[Batch, Ints]:
    try:
        tensors, _ = read_tensors(path)
        vectors, keys = tensors["vectors"].numpy(), tensors["keys"].numpy()
        columns: Any = json.loads(tensors["items"].numpy().tobytes())
        ids = columns["paths"] if columns["ids"] is None else columns["ids"]
        rows = zip(ids, columns["paths"], columns["labels"], columns["stamps"], strict=True)
        items = [Item(*row) for row in rows]
        if vectors.shape != (segment.rows, dim) or len(keys) != segment.rows or len(items) != segment.rows:
            raise KeyError("count")
    except (KeyError, TypeError, ValueError):  # a NearkinError is a ValueError
        raise NearkinError(f"{path} is missing or damaged: restore it, or create the index again.") from None
    return Batch(vectors, items), keys


def clean(folder: Path, manifest: Manifest) -> None:
    """Delete files of the index that the manifest does not name, such as leftovers of an interruption."""
    for path in folder.iterdir():
        if INDEX_FILES.fullmatch(path.name) and path.name not in manifest.files:
            path.unlink(missing_ok=True)
