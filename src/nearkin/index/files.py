"""The files of an embedded index, written so that a kill at any moment loses nothing that was committed.

    index.json                     the manifest: which files count; it is replaced whole, and that is the commit
    items-00000012.safetensors     a segment: keys, vectors, and ids, paths, labels and stamps as JSON
    removed-00000013.safetensors   the keys of items that were removed from segments
    graph-00000014.faiss           for an approximate index: made from the items, and can be made again

Files other than the manifest are never changed. What no manifest names was left by a kill and is deleted by the next
writer. One process writes at a time.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin.errors import NearkinError
from nearkin.index.base import Batch, Item, Meta, NoIndex
from nearkin.index.exact import Ints
from nearkin.index.rows import Rows, no_rows
from nearkin.runs import read_json, read_tensors, write_json, write_tensors

FORMAT = 1
OURS = re.compile(r"(items|removed)-\d+\.safetensors|graph-\d+\.faiss|\.(items|removed|graph|index)[-.].*")


class Segment(NamedTuple):
    """One file of items."""

    file: str
    rows: int


class Manifest(NamedTuple):
    """Which files count."""

    meta: Meta
    generation: int = 0  # of commits; also the number in the names of the files they write
    next_key: int = 0
    segments: tuple[Segment, ...] = ()
    removed: str | None = None
    graph: Meta | None = None  # file, items in it, digest

    @property
    def files(self) -> set[str]:
        """The names of all files that count."""
        graph = self.graph["file"] if self.graph else None
        return {name for name in (*(s.file for s in self.segments), self.removed, graph) if name}


def manifest_path(folder: Path) -> Path:
    """Where the manifest is."""
    return folder / "index.json"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index, or a sentence on why there is none."""
    path = manifest_path(folder)
    if not path.exists():
        raise NoIndex(f"There is no index in {folder}: make one with nearkin index RUN IMAGES -o {folder}.")
    try:
        content = read_json(path)
    except NearkinError:
        raise NearkinError(f"{path} is damaged: restore it, or make the index anew.") from None
    if content.get("format") != FORMAT or "meta" not in content:
        raise NearkinError(f"{path} is not the manifest of an index of this version: make the index anew.")
    try:
        segments = tuple(Segment(*given) for given in content["segments"])
        known = {name: content[name] for name in ("meta", "generation", "next_key", "removed", "graph")}
    except (KeyError, TypeError):
        raise NearkinError(f"{path} is damaged: restore it, or make the index anew.") from None
    return Manifest(**known, segments=segments)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit: from here on, these files count."""
    sync(folder)  # the files it names are there before it is
    write_json(manifest_path(folder), {"format": FORMAT, **manifest._asdict()})
    sync(folder)


def write_segment(folder: Path, generation: int, rows: Rows) -> Segment:
    """Write rows that are there as a file of items."""
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
    """All items that count."""
    dim: int = manifest.meta["dim"]
    total = sum(segment.rows for segment in manifest.segments)
    rows = no_rows(dim)
    room = np.empty((total, dim), np.float32)
    rows = Rows(room[:0], rows.keys, rows.ids, rows.paths, rows.labels, rows.names, rows.stamps, rows.alive)
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
        raise NearkinError(f"{path} is missing or damaged: restore it, or make the index anew.") from None
    return Batch(vectors, items), keys


def clean(folder: Path, manifest: Manifest) -> None:
    """Delete what no longer counts, and what a kill left behind."""
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in manifest.files:
            path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Have the folder's list of files on disk, where the system can be asked for that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
