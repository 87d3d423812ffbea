"""The items of an embedded index in memory: columns that are replaced, never changed, so that searches need no lock."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearkin.index.base import Batch, Floats, Item
from nearkin.index.exact import Ints, Mask


@dataclass(frozen=True, eq=False)
class Rows:
    """One moment of an index: a row an item, in the order they came, with those that were removed marked."""

    vectors: Floats  # [N, D]
    keys: Ints  # [N] ascending: the item's number, never used again
    ids: list[str]
    paths: list[str]  # the same list as ids where they are the same
    labels: NDArray[np.int32]  # [N] numbers of `names`
    names: list[str | None]
    stamps: list[str | None]
    alive: Mask  # [N]

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, row: int) -> Item:
        """One row."""
        return Item(self.ids[row], self.paths[row], self.names[self.labels[row]], self.stamps[row])

    def with_batch(self, batch: Batch, keys: Ints) -> "Rows":
        """The rows with more of them at the end."""
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
        """Some rows, by number and in order."""
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
        """Which rows are there and have one of the labels."""
        if labels is None:
            return self.alive
        wanted = np.array([name in labels for name in self.names], np.bool_)
        return self.alive & wanted[self.labels] if len(self) else self.alive


def no_rows(dim: int) -> Rows:
    """An index of nothing."""
    ids: list[str] = []
    none = np.empty(0, np.int64)
    return Rows(np.empty((0, dim), np.float32), none, ids, ids, none.astype(np.int32), [], [], none.astype(np.bool_))


def extended(v: Floats, more: Floats) -> Floats:
    """`v` with rows added: in the room that is left behind it, or moved to where there is twice as much.

    Only the youngest array of a line may be extended; older ones stay as they are, since they end before the new rows.
    """
    total = len(v) + len(more)
    room = v.base if isinstance(v.base, np.ndarray) else v
    if len(room) < total:
        room = np.empty((max(total, 2 * len(v)), v.shape[1]), np.float32)
        room[: len(v)] = v
    room[len(v) : total] = more
    return room[:total]
