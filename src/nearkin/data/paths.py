"""Millions of paths in little memory: a table of their names as bytes, of which a data set uses some rows."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Place(NamedTuple):
    """Where the bytes of an image are."""

    file: str
    offset: int = 0
    size: int = -1  # all that there are


class PlacedPath(type(Path())):  # type: ignore[misc]
    """A path through a file that holds images, which need not be looked up there."""

    place: Place


@dataclass(frozen=True, eq=False)
class Table:
    """Files in folders, or images in other files, by name."""

    folders: tuple[str, ...]  # or files with images in them
    counts: tuple[int, ...]  # names per folder, in this order
    names: Bytes  # one after the other, UTF-8
    ends: Numbers  # [N] of each name
    offset: Numbers | None = None  # [N] where its bytes begin in the file that holds them; None: a file of its own
    size: Numbers | None = None  # [N] bytes
    shape: NDArray[np.int32] | None = None  # [N, 2] height and width in pixels, as shown; 0 if it has no good header

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, row: int) -> str:
        """Return one name."""
        start = self.ends[row - 1] if row else 0
        return self.names[start : self.ends[row]].tobytes().decode(errors="surrogateescape")

    def folder_of(self, rows: Numbers | np.int64) -> Numbers:
        """Return the numbers of the folders of some rows."""
        return np.searchsorted(np.cumsum(self.counts), rows, side="right")

    def path(self, row: int) -> Path:
        """Return one path."""
        folder = self.folders[int(self.folder_of(np.int64(row)))]
        if self.offset is None or self.size is None:
            return Path(folder, self.name(row))
        path = PlacedPath(folder, self.name(row))
        path.place = Place(folder, int(self.offset[row]), int(self.size[row]))
        return path

    def take(self, rows: Numbers) -> "Table":
        """Return a table of some rows, which must be sorted by folder."""
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths)
        source = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
        counts = np.bincount(self.folder_of(rows), minlength=len(self.folders)).tolist()
        places: list[Any] = [
            None if column is None else column[rows] for column in (self.offset, self.size, self.shape)
        ]
        return Table(self.folders, tuple(counts), self.names[source], ends, *places)


def table_of(folder: str, names: Iterable[str]) -> Table:
    """Return a table of names in one folder; a name may be a path, also an absolute one."""
    encoded = list(map(os.fsencode, names))
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Table((folder,), (len(ends),), np.frombuffer(b"".join(encoded), np.uint8), ends)


def joined_tables(tables: Sequence[Table]) -> Table:
    """Return several tables as one; either all or none know where their images begin."""
    before = np.cumsum([0, *(len(table.names) for table in tables[:-1])])
    places: list[Any] = []
    for column in ("offset", "size", "shape"):
        parts = [part for table in tables if (part := getattr(table, column)) is not None]
        places.append(np.concatenate(parts) if parts else None)
    return Table(
        tuple(folder for table in tables for folder in table.folders),
        tuple(count for table in tables for count in table.counts),
        np.concatenate([table.names for table in tables]),
        np.concatenate([table.ends + start for table, start in zip(tables, before, strict=True)]),
        *places,
    )


class Paths(Sequence[Path]):
    """The paths in some rows of a table."""

    def __init__(self, table: Table, rows: Numbers | None = None) -> None:
        self.table, self.rows = table, np.arange(len(table)) if rows is None else rows

    @classmethod
    def of(cls, paths: Sequence[Path | str]) -> "Paths":
        """Return paths in little memory."""
        return paths if isinstance(paths, Paths) else cls(table_of("", (os.fspath(path) for path in paths)))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> "Paths": ...
    def __getitem__(self, index: int | slice) -> "Path | Paths":
        if isinstance(index, slice):
            return Paths(self.table, self.rows[index])
        return self.table.path(int(self.rows[index]))

    def __iter__(self) -> Iterator[Path]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Paths):
            return self.digest == other.digest
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Paths({len(self):,})"

    @property
    def shapes(self) -> Tensor | None:
        """Height and width of all images, as shown, [N, 2]; 0 for a bad header. None if they are not known."""
        return None if self.table.shape is None else torch.from_numpy(self.table.shape[self.rows].astype(np.int64))

    @cached_property
    def digest(self) -> bytes:
        """What these paths are, in this order."""
        order = np.argsort(self.table.folder_of(self.rows), kind="stable")
        packed = self.table.take(self.rows[order])
        found = hashlib.blake2b("\0".join(packed.folders).encode(errors="surrogateescape"))
        for column in (order, np.array(packed.counts), packed.ends, packed.names):
            found.update(np.ascontiguousarray(column).data)
        return found.digest()

    def take(self, rows: Tensor | Numbers | Sequence[int]) -> "Paths":
        """Select paths by their numbers."""
        return Paths(self.table, self.rows[torch.as_tensor(rows, dtype=torch.int64).numpy()])


def joined_paths(parts: Sequence[Sequence[Path]]) -> Paths:
    """Return all paths, one part after the other."""
    known = [Paths.of(part) for part in parts]
    if len({id(part.table) for part in known}) == 1:
        return Paths(known[0].table, np.concatenate([part.rows for part in known]))
    if len({part.table.offset is None for part in known}) == 1:
        before = np.cumsum([0, *(len(part.table) for part in known[:-1])])
        rows = np.concatenate([part.rows + start for part, start in zip(known, before, strict=True)])
        return Paths(joined_tables([part.table for part in known]), rows)
    return Paths(table_of("", (str(path) for part in known for path in part)))
