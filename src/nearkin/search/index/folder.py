"""An index in a folder, held in memory while it is open."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearkin.errors import NearkinError
from nearkin.files import write_lock
from nearkin.search.index.approximate import MIN_ITEMS, Graph, import_faiss, make_graph, read_graph, write_graph
from nearkin.search.index.base import Batch, Floats, Hit, Index, Item, Items, Meta
from nearkin.search.index.exact import Ints, rescore, search_exact
from nearkin.search.index.segments import (
    Manifest,
    Rows,
    clean,
    read_manifest,
    read_rows,
    write_manifest,
    write_removed,
    write_segment,
)

MERGE = 2  # a new segment absorbs the previous one unless that is this many times larger
GARBAGE = 0.25  # fraction of removed rows above which all segments are rewritten
FEW = 0.1  # fraction of items below which a filtered search is exact instead of through the graph
OUTGROWN = 4  # growth after which inverted lists are trained again


class FolderIndex(Index):
    """An index in a folder. Many threads may search while one writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        super().__init__(self.manifest.meta)
        self.rows = self._read()
        self._where: dict[str, int] | None = None
        self._lock = threading.RLock()
        self._read_graph: tuple[str, Graph | None] | None = None

    @classmethod
    def create(cls, folder: str | Path, meta: Meta) -> "FolderIndex":
        """Create an empty index in a new folder."""
        if meta["kind"] != "exact":
            import_faiss()  # raises before the folder is made and images are embedded
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with write_lock(folder):
            write_manifest(folder, Manifest(meta))
        return cls(folder)

    def __len__(self) -> int:
        return int(self.rows.alive.sum())

    # Writing.

    def _add(self, batch: Batch) -> None:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            old = self._numbers(self.rows, [item.id for item in batch.items])
            first = self.manifest.next_key
            keys = np.arange(first, first + len(batch.items))
            self._commit(self.rows.without(old).with_batch(batch, keys), next_key=first + len(keys))

    def remove(self, ids: Sequence[str]) -> int:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            old = self._numbers(self.rows, list(dict.fromkeys(ids)))
            if old:
                self._commit(self.rows.without(old), next_key=self.manifest.next_key)
            return len(old)

    def _write_meta(self, changes: Meta) -> Meta:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            self._write(self.manifest._replace(meta={**self.manifest.meta, **changes}))
            return self.manifest.meta

    def _commit(self, rows: Rows, *, next_key: int) -> None:
        """Write the new rows and commit them."""
        number = self.manifest.generation + 1
        segments = list(self.manifest.segments)
        stored = sum(segment.rows for segment in segments)  # rows before this one are in segments
        garbage = len(rows) - int(rows.alive.sum()) > GARBAGE * len(rows)
        while segments and (garbage or (stored < len(rows) and segments[-1].rows < MERGE * (len(rows) - stored))):
            stored -= segments.pop().rows
        if stored < len(rows):
            fresh = np.arange(stored, len(rows))
            fresh = fresh[rows.alive[fresh]]
            rows = _joined(rows, stored, fresh)
            if len(fresh):
                segments.append(write_segment(self.folder, number, rows.take(np.arange(stored, len(rows)))))
        gone = rows.keys[~rows.alive]
        removed = write_removed(self.folder, number, gone) if len(gone) else None
        manifest = self.manifest._replace(next_key=next_key, segments=tuple(segments), removed=removed)
        self._write(manifest)
        self._follow(rows)

    def _follow(self, rows: Rows) -> None:
        """Replace the rows in memory, and update the map of ids if row numbers did not change."""
        old, known = len(self.rows), self._where
        moved = not np.array_equal(self.rows.keys, rows.keys[:old])
        if known is not None and not moved:
            gone = np.flatnonzero(self.rows.alive & ~rows.alive[:old]).tolist()
            for row in gone:
                del known[rows.ids[row]]
            known |= {rows.ids[row]: row for row in range(old, len(rows))}
        self.rows, self._where = rows, None if moved else known

    def _write(self, manifest: Manifest) -> None:
        manifest = manifest._replace(generation=self.manifest.generation + 1)
        write_manifest(self.folder, manifest)
        self.manifest, self.meta = manifest, manifest.meta
        clean(self.folder, self.manifest)

    def _catch_up(self) -> None:
        """Read what another process has committed."""
        found = read_manifest(self.folder)
        if found.generation != self.manifest.generation:
            self.manifest, self._where = found, None
            self.meta = found.meta
            self.rows = self._read()

    def _read(self) -> Rows:
        for _ in range(3):
            try:
                return read_rows(self.folder, self.manifest)
            except NearkinError:  # a writer may have replaced these files since the manifest was read
                found = read_manifest(self.folder)
                if found.generation == self.manifest.generation:
                    raise
                self.manifest, self.meta = found, found.meta
        raise NearkinError(f"{self.folder} keeps changing while it is read: try again.")

    # Reading.

    @property
    def _rows_by_id(self) -> dict[str, int]:
        with self._lock:
            if self._where is None:
                rows = self.rows
                self._where = {rows.ids[row]: row for row in np.flatnonzero(rows.alive).tolist()}
            return self._where

    def _search(
        self, queries: Floats, k: int, *, labels: list[str] | None, exclude: list[str], exact: bool
    ) -> list[list[Hit]]:
        rows, graph = self.rows, None if exact else self._graph()
        wanted = rows.of_labels(labels)
        if exclude:
            wanted = wanted.copy()
            wanted[self._numbers(rows, exclude)] = False
        if graph is None or wanted.sum() < max(MIN_ITEMS, FEW * len(rows)):
            mask = None if wanted.all() else wanted
            found, s = search_exact(rows.vectors, queries, k, space=self.space, wanted=mask)
        else:
            near = graph.search(queries, k, effort=self.meta["effort"], rows=rows, wanted=wanted)
            late = wanted & (rows.keys > graph.last)
            if late.any():
                near = np.hstack([near, search_exact(rows.vectors, queries, k, space=self.space, wanted=late)[0]])
            found, s = rescore(rows.vectors, queries, near, space=self.space)
        return [_hits(rows, *each) for each in zip(found[:, :k], s[:, :k], strict=True)]

    def _graph(self) -> Graph | None:
        """The graph, read on first use."""
        known = self.manifest.graph
        if known is None:
            return None
        with self._lock:
            if self._read_graph is None or self._read_graph[0] != known["file"]:
                self._read_graph = known["file"], read_graph(self.folder, known, self.kind)
            return self._read_graph[1]

    def check_build(self) -> None:
        if self.kind != "exact":
            import_faiss()

    def _build(self) -> bool:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            if len(self) < MIN_ITEMS:
                if self.manifest.graph is not None:
                    self._write(self.manifest._replace(graph=None))
                return False
            old = self._graph()
            if old is not None and self._stale(old):
                old = None
            if old is None or old.last < self.rows.keys[-1]:
                graph = make_graph(self.kind, self.rows, space=self.space, old=old)
                known = write_graph(self.folder, self.manifest.generation + 1, graph)
                self._read_graph = known["file"], graph
                self._write(self.manifest._replace(graph=known))
            return True

    def _stale(self, graph: Graph) -> bool:
        """Whether so many items were removed or added that the graph should be rebuilt."""
        rows = self.rows
        alive = int((rows.alive & (rows.keys <= graph.last)).sum())
        items: int = graph.faiss.ntotal
        return alive < (1 - GARBAGE) * items or (self.kind == "ivfpq" and len(self) > OUTGROWN * items)

    def _items(self, ids: Sequence[str]) -> list[Item]:
        rows = self.rows
        return [rows.item(row) for row in self._numbers(rows, ids)]

    def _numbers(self, rows: Rows, ids: Sequence[str]) -> list[int]:
        """The row numbers of the ids that exist. The map may be newer than the rows, so each entry is checked."""
        where = self._rows_by_id
        found = [(name, where[name]) for name in ids if name in where]
        return [row for name, row in found if row < len(rows) and rows.ids[row] == name]

    def items(self) -> Items:
        rows = self._present()
        return Items(rows.ids, rows.paths, [rows.names[n] for n in rows.labels.tolist()])

    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        if ids is None:
            return self._present().vectors
        rows = self.rows
        return rows.vectors[[self._numbers(rows, [self.item(name).id])[0] for name in ids]]

    def stamps(self) -> dict[str, tuple[str | None, str | None]]:
        rows = self._present()
        labels = [rows.names[n] for n in rows.labels.tolist()]
        return dict(zip(rows.ids, zip(labels, rows.stamps, strict=True), strict=True))

    def label_names(self) -> list[str]:
        rows = self.rows
        present = np.unique(rows.labels[rows.alive])
        return sorted(name for n in present.tolist() if (name := rows.names[n]) is not None)

    def _present(self) -> Rows:
        rows = self.rows
        return rows if rows.alive.all() else rows.take(np.flatnonzero(rows.alive))


def _joined(rows: Rows, stored: int, fresh: Ints) -> Rows:
    """The rows that stay in their segments, then those to be written."""
    if len(fresh) == len(rows) - stored:
        return rows
    return rows.take(np.concatenate([np.arange(stored), fresh]))


def _hits(rows: Rows, found: Ints, s: Floats) -> list[Hit]:
    return [
        Hit(rows.ids[row], rows.paths[row], rows.names[rows.labels[row]], float(value))
        for row, value in zip(found.tolist(), s.tolist(), strict=True)
        if row >= 0
    ]
