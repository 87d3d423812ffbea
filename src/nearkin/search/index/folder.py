"""An index in a folder. Its files are mapped into memory, so it opens at once, and a commit writes its own items."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearkin.errors import NearkinError
from nearkin.files import write_lock
from nearkin.search.index.approximate import (
    FEW,
    MIN_ITEMS,
    OUTGROWN,
    Graph,
    import_faiss,
    make_graph,
    read_graph,
    write_graph,
)
from nearkin.search.index.base import Batch, Floats, Hit, Index, Item, Items, Meta
from nearkin.search.index.exact import Ints, rescore, search_exact
from nearkin.search.index.manifest import Entry, Manifest, clean, read_manifest, write_manifest
from nearkin.search.index.segment_files import Columns
from nearkin.search.index.segments import GARBAGE, Rows, read_rows, write_rows


class FolderIndex(Index):
    """An index in a folder. Many threads may search while one writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        super().__init__(self.manifest.meta)
        self.rows = self._read()
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
        return self.rows.count

    # Writing.

    def _add(self, batch: Batch) -> None:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            first = self.manifest.next_key
            keys = np.arange(first, first + len(batch.items))
            ids, paths, labels, stamps = (list(column) for column in zip(*batch.items, strict=True))
            self._commit(self._numbers(self.rows, ids), Columns(batch.vectors, keys, ids, paths, labels, stamps))

    def remove(self, ids: Sequence[str]) -> int:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            old = self._numbers(self.rows, list(dict.fromkeys(ids)))
            if len(old):
                self._commit(old, None)
            return len(old)

    def _write_meta(self, changes: Meta) -> Meta:
        with self._lock, write_lock(self.folder):
            self._catch_up()
            self._write(self.manifest._replace(meta={**self.manifest.meta, **changes}))
            return self.manifest.meta

    def _commit(self, gone: Ints, new: Columns | None) -> None:
        """Write what changes, and commit it."""
        rows = write_rows(self.folder, self.manifest.generation + 1, self.rows, gone, new)
        entries = tuple(Entry(segment.file.path.name, segment.file.rows) for segment in rows.segments)
        next_key = int(new.keys[-1]) + 1 if new else self.manifest.next_key
        self._write(self.manifest._replace(next_key=next_key, segments=entries, removed=tuple(rows.removed)))
        self.rows = rows

    def _write(self, manifest: Manifest) -> None:
        manifest = manifest._replace(generation=self.manifest.generation + 1)
        write_manifest(self.folder, manifest)
        self.manifest, self.meta = manifest, manifest.meta
        clean(self.folder, self.manifest)

    def _catch_up(self) -> None:
        """Read what another process has committed."""
        found = read_manifest(self.folder)
        if found.generation != self.manifest.generation:
            self.manifest, self.meta = found, found.meta
            self.rows = self._read()

    def _read(self) -> Rows:
        known = getattr(self, "rows", None)
        for _ in range(3):
            try:
                return read_rows(self.folder, self.manifest, known)
            except NearkinError:  # a writer may have replaced these files since the manifest was read
                found = read_manifest(self.folder)
                if found.generation == self.manifest.generation:
                    raise
                self.manifest, self.meta = found, found.meta
        raise NearkinError(f"{self.folder} keeps changing while it is read: try again.")

    # Reading.

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
        return [
            [rows.hit(row, value) for row, value in zip(*each, strict=True) if row >= 0]
            for each in zip(found[:, :k].tolist(), s[:, :k].tolist(), strict=True)
        ]

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
            if old is None or old.last < self.rows.last_key:
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
        return [rows.item(row) for row in self._numbers(rows, ids).tolist()]

    def _numbers(self, rows: Rows, ids: Sequence[str]) -> Ints:
        """The row numbers of the ids that exist."""
        found = rows.find(ids)
        return found[found >= 0]

    def items(self) -> Items:
        return self.rows.items()

    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        rows = self.rows
        if ids is None:
            return rows.vectors.take(np.flatnonzero(rows.alive))
        found = rows.find(ids)
        if (found < 0).any():
            self.item(ids[int((found < 0).argmax())])  # raises
        return rows.vectors.take(found)

    def _stamps(self) -> dict[str, tuple[str | None, str | None]]:
        return self.rows.stamps()

    def label_names(self) -> list[str]:
        return self.rows.label_names()
