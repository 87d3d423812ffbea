"""Files of items: their columns are mapped into memory, so that opening one reads nothing, and are never changed.

Texts are one array of bytes with the end of each text. The ids are also there as sorted 64-bit hashes, by which an item
is found without reading the others. The first version kept all texts as JSON; its files are read into memory.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.errors import NearkinError
from nearkin.files import map_tensors, write_tensors
from nearkin.search.index.base import Floats
from nearkin.search.index.exact import Ints

NOTHING = b"\xff"  # stands for None: no text has this byte in UTF-8


class Columns(NamedTuple):
    """Items in memory, to be written to a file."""

    vectors: Floats  # [N, D]
    keys: Ints  # [N] ascending; the key of a removed item is never used again
    ids: list[str]
    paths: list[str]
    labels: list[str | None]
    stamps: list[str | None]


class Texts:
    """A column of texts in bytes."""

    def __init__(self, data: NDArray[np.uint8], ends: Ints) -> None:
        self.data, self.ends = data, ends

    def __getitem__(self, row: int) -> str | None:
        start = int(self.ends[row - 1]) if row else 0
        return _decoded(self.data[start : int(self.ends[row])].tobytes())

    def all(self) -> list[str | None]:
        """All texts."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [_decoded(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _decoded(data: bytes) -> str | None:
    return None if data == NOTHING else data.decode("utf-8", "surrogatepass")


def _encoded(texts: Sequence[str | None]) -> tuple[NDArray[np.uint8], Ints]:
    data = [NOTHING if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    return np.frombuffer(bytearray(b"".join(data)), np.uint8), np.cumsum([len(each) for each in data], dtype=np.int64)


def _digest(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(array.data).hexdigest()


def hashes_of(ids: Sequence[str]) -> Ints:
    """A hash of each id, the same in every process."""
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in ids)
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def as_arrays(columns: Columns) -> dict[str, NDArray[np.generic]]:
    """The arrays of a file."""
    names = {name: n for n, name in enumerate(dict.fromkeys(columns.labels))}
    hashes = hashes_of(columns.ids)
    order = np.argsort(hashes, kind="stable")
    arrays: dict[str, NDArray[np.generic]] = {
        "vectors": columns.vectors,
        "keys": columns.keys,
        "hashes": hashes[order],
        "order": order,
        "labels": np.array([names[label] for label in columns.labels], np.int32),
    }
    texts: dict[str, Sequence[str | None]] = {"ids": columns.ids, "stamps": columns.stamps, "names": list(names)}
    if columns.ids != columns.paths:
        texts["paths"] = columns.paths
    for name, column in texts.items():
        arrays[name], arrays[f"{name}.ends"] = _encoded(column)
    return arrays


class SegmentFile:
    """A file of items. Each array is checked against its digest before its first use."""

    def __init__(self, path: Path, rows: int, dim: int, *, is_checked: bool = False) -> None:
        self.path, self.rows = path, rows
        try:
            tensors, about, check = map_tensors(path)
            self._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            self._digests: dict[str, str] = {} if is_checked else about.get("digests", {})
            self.is_old = "items" in self._arrays
            if self.is_old:
                check()
                self._arrays = as_arrays(_of_first_version(self._arrays))
            shapes = {self._arrays["vectors"].shape, (*self._arrays["keys"].shape, dim)}
            if shapes != {(rows, dim)} or not (self.is_old or is_checked or set(self._digests) == set(self._arrays)):
                raise KeyError("count")
        except (KeyError, TypeError, ValueError):  # a NearkinError is a ValueError
            raise self._damaged() from None

    def _damaged(self) -> NearkinError:
        return NearkinError(f"{self.path} is missing or damaged: restore it, or create the index again.")

    def column(self, name: str) -> NDArray[np.generic]:
        """An array of the file, checked."""
        array, digest = self._arrays[name], self._digests.get(name)
        if digest is not None:
            if digest != _digest(array):
                raise self._damaged()
            self._digests.pop(name, None)
        return array

    @property
    def vectors(self) -> Floats:
        """[N, D]"""
        return self.column("vectors").view(np.float32)

    @property
    def keys(self) -> Ints:
        """[N] ascending."""
        return self.column("keys").view(np.int64)

    @property
    def labels(self) -> NDArray[np.int32]:
        """[N] index into `names`."""
        return self.column("labels").view(np.int32)

    @cached_property
    def names(self) -> list[str | None]:
        """The different labels."""
        return self._texts("names").all()

    @cached_property
    def ids(self) -> Texts:
        """[N]"""
        return self._texts("ids")

    @property
    def has_equal_paths(self) -> bool:
        """Whether the ids are the paths."""
        return "paths" not in self._arrays

    @cached_property
    def paths(self) -> Texts:
        """[N]"""
        return self.ids if self.has_equal_paths else self._texts("paths")

    @cached_property
    def stamps(self) -> Texts:
        """[N]"""
        return self._texts("stamps")

    def _texts(self, name: str) -> Texts:
        return Texts(self.column(name).view(np.uint8), self.column(f"{name}.ends").view(np.int64))

    def rows_of_keys(self, keys: Ints) -> Ints:
        """The rows of those keys that are here. It reads only some keys, unchecked: any later use checks the file."""
        own = self._arrays["keys"].view(np.int64)
        keys = keys[(keys >= own[0]) & (keys <= own[-1])] if self.rows else keys[:0]
        rows = np.searchsorted(own, keys)
        found: Ints = np.unique(rows[own[rows] == keys])
        return found

    def rows_of_ids(self, ids: Sequence[str], hashes: Ints) -> list[tuple[int, int]]:
        """Of each id that is here its place in `ids` and its row."""
        known = self.column("hashes").view(np.int64)
        first, end = np.searchsorted(known, hashes), np.searchsorted(known, hashes, side="right")
        order = self.column("order")
        return [
            (place, row)
            for place in np.flatnonzero(first < end).tolist()
            for row in order[first[place] : end[place]].tolist()
            if self.ids[row] == ids[place]
        ]


def _of_first_version(arrays: dict[str, NDArray[np.generic]]) -> Columns:
    columns = json.loads(arrays["items"].tobytes())
    paths, labels, stamps = columns["paths"], columns["labels"], columns["stamps"]
    ids = paths if columns["ids"] is None else columns["ids"]
    vectors, keys = arrays["vectors"], arrays["keys"]
    if {len(column) for column in (ids, paths, labels, stamps, keys)} != {len(vectors)}:
        raise KeyError("count")
    return Columns(vectors.view(np.float32), keys.view(np.int64), ids, paths, labels, stamps)


def write_segment(folder: Path, name: str, columns: Columns) -> SegmentFile:
    """Write items to a file, and map it."""
    arrays = as_arrays(columns)
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    write_tensors(folder / name, tensors, {"digests": {key: _digest(array) for key, array in arrays.items()}})
    return SegmentFile(folder / name, len(columns.ids), columns.vectors.shape[1], is_checked=True)
