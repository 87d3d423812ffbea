"""The items of an index in a folder: a snapshot of its files, and which files to write at a commit.

Files are written so that an interruption at any moment loses nothing that was committed: a commit replaces the
manifest, which names the files that count. A commit writes its own items, and merges a few small files now and then, so
its work does not grow with the index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import torch

from nearkin.errors import NearkinError
from nearkin.files import read_tensors, write_tensors
from nearkin.search.index.base import Hit, Item, Items
from nearkin.search.index.exact import Ints, Mask, Pieces
from nearkin.search.index.manifest import Manifest
from nearkin.search.index.segment_files import Columns, SegmentFile, hashes_of, write_segment

FAN = 8  # this many files of about the same size become one
LARGE = 2**15  # rows: files of this size are never merged, so that a commit rewrites at most FAN times as many
GARBAGE = 0.25  # fraction of removed rows above which a file is rewritten
NO_ROWS: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Segment:
    """A file of items without the removed ones."""

    file: SegmentFile
    gone: Ints  # ascending row numbers

    @property
    def is_garbage(self) -> bool:
        """Whether the file must be rewritten."""
        return self.file.is_old or len(self.gone) > GARBAGE * self.file.rows

    @property
    def count(self) -> int:
        """The number of items."""
        return self.file.rows - len(self.gone)

    @cached_property
    def alive(self) -> Mask:
        """[N]"""
        alive = np.ones(self.file.rows, np.bool_)
        alive[self.gone] = False
        return alive

    @cached_property
    def rows(self) -> Ints:
        """The rows of the items."""
        return np.flatnonzero(self.alive)

    def without(self, rows: Ints) -> "Segment":
        """The segment with some more rows removed."""
        return Segment(self.file, np.union1d(self.gone, rows)) if len(rows) else self

    def texts(self, name: str) -> list[str | None]:
        """The ids, paths, labels or stamps of the items."""
        if name == "labels":
            names = self.file.names
            return [names[n] for n in self.file.labels[self.rows].tolist()]
        texts: list[str | None] = getattr(self.file, name).all()
        return [texts[row] for row in self.rows.tolist()] if len(self.gone) else texts

    def names(self, name: str) -> list[str]:
        """The ids or paths of the items."""
        return cast("list[str]", self.texts(name))  # these are never None

    def columns(self) -> Columns:
        """All items."""
        ids = self.names("ids")
        paths = ids if self.file.has_equal_paths else self.names("paths")
        vectors, keys = self.file.vectors[self.rows], self.file.keys[self.rows]
        return Columns(vectors, keys, ids, paths, self.texts("labels"), self.texts("stamps"))


@dataclass(frozen=True, eq=False)
class Rows:
    """A snapshot of an index: one row per item of its files in the order they were added; removed rows are marked."""

    dim: int
    segments: tuple[Segment, ...] = ()
    removed: dict[str, Ints] = field(default_factory=dict)  # keys by file

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def count(self) -> int:
        """The number of items."""
        return sum(segment.count for segment in self.segments)

    @cached_property
    def starts(self) -> Ints:
        """The first row of each segment, and the number of rows."""
        return np.cumsum([0, *(segment.file.rows for segment in self.segments)])

    @cached_property
    def vectors(self) -> Pieces:
        """[N, D]"""
        return Pieces([segment.file.vectors for segment in self.segments], self.dim)

    @cached_property
    def keys(self) -> Ints:
        """[N] ascending."""
        return np.concatenate([np.empty(0, np.int64), *(segment.file.keys for segment in self.segments)])

    @cached_property
    def alive(self) -> Mask:
        """[N]"""
        return np.concatenate([np.empty(0, np.bool_), *(segment.alive for segment in self.segments)])

    @property
    def last_key(self) -> int:
        """The key of the newest row."""
        return int(self.segments[-1].file.keys[-1])

    def find(self, ids: Sequence[str]) -> Ints:
        """The row of each id [N]; -1 if there is none."""
        found, hashes = np.full(len(ids), -1), hashes_of(ids)
        for start, segment in zip(self.starts.tolist(), self.segments, strict=False):
            for place, row in segment.file.rows_of_ids(ids, hashes):
                if segment.alive[row]:
                    found[place] = start + row
        return found

    def _place(self, row: int) -> tuple[SegmentFile, int]:
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.segments[number].file, row - int(self.starts[number])

    def item(self, row: int) -> Item:
        """One row."""
        file, row = self._place(row)
        return Item(str(file.ids[row]), str(file.paths[row]), file.names[file.labels[row]], file.stamps[row])

    def hit(self, row: int, similarity: float) -> Hit:
        """One row as a search result."""
        file, row = self._place(row)
        return Hit(str(file.ids[row]), str(file.paths[row]), file.names[file.labels[row]], similarity)

    def of_labels(self, labels: Sequence[str] | None) -> Mask:
        """A mask of the rows that exist and have one of the labels."""
        if labels is None:
            return self.alive
        among = frozenset(labels)
        masks = [np.empty(0, np.bool_)]
        for segment in self.segments:
            wanted = np.array([name in among for name in segment.file.names], np.bool_)
            masks.append(segment.alive & wanted[segment.file.labels])
        return np.concatenate(masks)

    def label_names(self) -> list[str]:
        """The labels of all items, sorted."""
        names: set[str | None] = set()
        for segment in self.segments:
            names |= {segment.file.names[n] for n in np.unique(segment.file.labels[segment.rows]).tolist()}
        return sorted(name for name in names if name is not None)

    def items(self) -> Items:
        """Ids, paths and labels of all items."""
        ids = [name for segment in self.segments for name in segment.names("ids")]
        equal = all(segment.file.has_equal_paths for segment in self.segments)
        paths = ids if equal else [name for segment in self.segments for name in segment.names("paths")]
        return Items(ids, paths, [label for segment in self.segments for label in segment.texts("labels")])

    def stamps(self) -> dict[str, tuple[str | None, str | None]]:
        """The label and stamp of every item by id."""
        columns = ("labels", "stamps")
        return {
            name: (label, stamp)
            for segment in self.segments
            for name, label, stamp in zip(segment.names("ids"), *map(segment.texts, columns), strict=True)
        }

    def without(self, rows: Ints) -> "Rows":
        """The rows with some more marked as removed."""
        starts = self.starts.tolist()
        segments = [
            segment.without(rows[(rows >= start) & (rows < end)] - start)
            for segment, start, end in zip(self.segments, starts, starts[1:], strict=False)
        ]
        return Rows(self.dim, tuple(segments), self.removed)


def read_rows(folder: Path, manifest: Manifest, known: Rows | None = None) -> Rows:
    """Map all files; `known` has some of them already."""
    dim: int = manifest.meta["dim"]
    files = {segment.file.path.name: segment.file for segment in known.segments} if known else {}
    removed = {name: _read_removed(folder / name) for name in manifest.removed}
    gone = np.concatenate([np.empty(0, np.int64), *removed.values()])
    opened = [files.get(entry.file) or SegmentFile(folder / entry.file, entry.rows, dim) for entry in manifest.segments]
    return Rows(dim, tuple(Segment(file, file.rows_of_keys(gone)) for file in opened), removed)


def _read_removed(path: Path) -> Ints:
    try:
        keys: Ints = read_tensors(path)[0]["keys"].numpy()
    except (KeyError, NearkinError):
        raise NearkinError(f"{path} is missing or damaged: restore it, or create the index again.") from None
    return keys


def write_rows(folder: Path, generation: int, rows: Rows, gone: Ints, new: Columns | None) -> Rows:
    """Write what a commit changes: new items, and files without the rows that are gone. Returns the next snapshot."""
    marked = rows.without(gone).segments
    first = len(marked) - (absorbed([segment.count for segment in marked], len(new.ids)) if new else 0)
    segments, fresh = list[Segment](), [np.empty(0, np.int64)]
    for number, (before, after) in enumerate(zip(rows.segments[:first], marked[:first], strict=True)):
        if after.is_garbage and after.count:
            file = write_segment(folder, f"items-{generation:08d}-{number}.safetensors", after.columns())
            segments.append(Segment(file, NO_ROWS))
        elif after.count:
            segments.append(after)
            if after is not before:
                fresh.append(after.file.keys[np.setdiff1d(after.gone, before.gone)])
    if new:
        columns = _joined([*(segment.columns() for segment in marked[first:]), new])
        segments.append(Segment(write_segment(folder, f"items-{generation:08d}.safetensors", columns), NO_ROWS))
    removed = _write_removed(folder, generation, rows.removed, np.concatenate(fresh), segments)
    return Rows(rows.dim, tuple(segments), removed)


def absorbed(counts: Sequence[int], fresh: int) -> int:
    """How many of the last files, of these counts, become one with `fresh` rows: FAN − 1 or more that are no larger.

    Repeatedly, so a row is written about once for every factor of FAN between the size of a commit and LARGE.
    """
    total, taken = fresh, 0
    while True:
        same = 0
        for count in reversed(counts[: len(counts) - taken]):
            if count >= LARGE or _level(count) > _level(total):
                break
            same += 1
        if same < FAN - 1:
            return taken
        taken += same
        total = fresh + sum(counts[len(counts) - taken :])


def _level(count: int) -> int:
    """The number of digits to the base FAN."""
    return -(-count.bit_length() // (FAN.bit_length() - 1))


def _joined(parts: Sequence[Columns]) -> Columns:
    """Items one after the other."""
    vectors, keys = np.concatenate([part.vectors for part in parts]), np.concatenate([part.keys for part in parts])
    ids, paths, labels, stamps = (list(chain(*column)) for column in list(zip(*parts, strict=True))[2:])
    return Columns(vectors, keys, ids, paths, labels, stamps)


def _write_removed(
    folder: Path, generation: int, known: dict[str, Ints], fresh: Ints, segments: Sequence[Segment]
) -> dict[str, Ints]:
    """Write the keys of newly removed items, merged with other files as items are."""
    marked = sum(len(segment.gone) for segment in segments)
    if sum(map(len, known.values())) + len(fresh) > 2 * marked:  # most are of rows that are in no file any more
        known, fresh = {}, np.concatenate([NO_ROWS, *(segment.file.keys[segment.gone] for segment in segments)])
    if not len(fresh):
        return known
    names = list(known)
    first = len(names) - absorbed([len(keys) for keys in known.values()], len(fresh))
    keys = np.concatenate([*(known[name] for name in names[first:]), fresh])
    name = f"removed-{generation:08d}.safetensors"
    write_tensors(folder / name, {"keys": torch.from_numpy(keys)})
    return {**{name: known[name] for name in names[:first]}, name: keys}
