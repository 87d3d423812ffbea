"""An index in a Lance table on disk: `lance:///folder`, for more items than memory holds.

Opening it reads a few kilobytes. Every add is one commit of its own items; many processes may write at once, since a
commit that meets another is tried again. An index over the ids finds those to be replaced. After some commits their
small files become one, in bounded steps: the work never grows with the table. Names that are not UTF-8 are stored
escaped. Kinds: exact, which reads all vectors from disk for each search, and ivfpq.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nearkin.errors import NearkinError, first_line
from nearkin.search.index.approximate import FEW, MIN_ITEMS, OUTGROWN, PROBES, REFINE, code_bytes
from nearkin.search.index.base import Batch, Floats, Hit, Index, Item, Items, Meta, NoIndex
from nearkin.search.index.exact import SPARE, Ints, nearest, similarity
from nearkin.search.names import escape_all, escape_name, unescape_all, unescape_name

Found = TypeVar("Found")

ABOUT = "nearkin"  # in the table's metadata: the meta at its creation; in its config, with a dot and a name: changes
KEY = {"lance-schema:unenforced-primary-key": "true"}  # so that two writers cannot both insert an id
IDS, VECTORS = "id_idx", "vector_idx"  # indexes of the table
ITEM = ["id", "path", "label", "stamp"]
NAMES = 1000  # ids per condition
BLOCK = 2**13  # rows read at once
TIDY_EVERY = 32  # files of items, after which small ones are merged
FILE = 2**16  # rows: files of this size are never merged
SAMPLE = 256  # vectors per inverted list that Lance trains on
FAN = 16  # parts of an index, after which they become one
ERRORS = (OSError, RuntimeError, ValueError)  # what Lance raises
RETRIES = 100  # of a commit that meets another
KEEP = timedelta(hours=1)  # files that were replaced, for processes that read them


class LanceIndex(Index):
    """An index in a Lance table. Many threads may use it, and many processes may write to it."""

    def __init__(self, url: str) -> None:
        self.path = table_path(url)
        with _errors_translated():
            try:
                self.table: Any = lance.dataset(str(self.path))
            except (ValueError, FileNotFoundError):
                raise _no_index(self.path) from None
            super().__init__(self._read_meta())

    @classmethod
    def create(cls, url: str, meta: Meta) -> "LanceIndex":
        """Create the table."""
        path = table_path(url)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise NearkinError(f"{path} exists already: open it if it is an index, or choose another place.")
        schema = _schema(meta["dim"]).with_metadata({ABOUT: json.dumps(escape_all(meta))})
        with _errors_translated():
            table = lance.write_dataset(schema.empty_table(), str(path), schema=schema, enable_stable_row_ids=True)
            table.create_scalar_index("id", "BTREE", name=IDS)
        return cls(url)

    def _read_meta(self) -> Meta:
        known = self.table.schema.metadata or {}
        if ABOUT.encode() not in known:
            raise _no_index(self.path)
        changes = {
            name.removeprefix(f"{ABOUT}."): json.loads(value)
            for name, value in self.table.config().items()
            if name.startswith(f"{ABOUT}.")
        }
        meta: Meta = unescape_all({**json.loads(known[ABOUT.encode()]), **changes})
        return meta

    def _write_meta(self, changes: Meta) -> Meta:
        with _errors_translated():
            self.table.checkout_latest()
            self.table.update_config({f"{ABOUT}.{name}": json.dumps(escape_all(v)) for name, v in changes.items()})
            return self._read_meta()

    # Writing.

    def _add(self, batch: Batch) -> None:
        columns = [pa.array(escape_all(column), pa.string()) for column in zip(*batch.items, strict=True)]
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(batch.vectors.ravel()), self.dim)
        rows = pa.table([*columns, vectors], schema=_schema(self.dim))
        self._merge(rows, lambda merge: merge.when_matched_update_all().when_not_matched_insert_all())
        if len(self.table.get_fragments()) % TIDY_EVERY == 0:
            self._tidy()

    def remove(self, ids: Sequence[str]) -> int:
        rows = pa.table({"id": pa.array(escape_all(list(dict.fromkeys(ids))), pa.string())})
        done = self._merge(rows, lambda merge: merge.when_matched_delete())
        return int(done["num_deleted_rows"])

    def _merge(self, rows: pa.Table, what: Callable[[Any], Any]) -> Any:
        """Commit changes to the items with the ids of some rows."""
        with _errors_translated():
            self.table.checkout_latest()
            return what(self.table.merge_insert("id")).conflict_retries(RETRIES).execute(rows)

    def _tidy(self) -> None:
        """Merge small files and cover new ones by the index of ids. Another writer may do the same: then it is done."""
        with suppress(*ERRORS):
            self.table.optimize.compact_files(target_rows_per_fragment=FILE, max_source_rows=2 * FILE, num_threads=1)
            self._cover(IDS)
            self.table.cleanup_old_versions(older_than=KEEP)

    def _cover(self, name: str) -> None:
        """Add new items to an index as another part, and merge parts now and then, but never the first and largest."""
        parts = sum(len(index.segments) for index in self.table.describe_indices() if index.name == name)
        merged = FAN - 1 if parts > FAN else 0
        self.table.optimize.optimize_indices(index_names=[name], num_indices_to_merge=merged)

    def _build(self) -> bool:
        with _errors_translated():
            self.table.checkout_latest()
            self._tidy()
            count = len(self)
            if count < MIN_ITEMS:
                return False
            trained = self.meta.get("trained", 0)
            if trained and count <= OUTGROWN * trained:
                self._cover(VECTORS)
                return True
            self.table.create_index(
                "vector",
                "IVF_PQ",
                name=VECTORS,
                metric=self._metric,
                num_partitions=max(1, min(round(count**0.5), count // SAMPLE)),
                num_sub_vectors=code_bytes(self.dim),
                replace=True,
            )
        self.remember(trained=count)
        return True

    @property
    def _metric(self) -> str:
        return "l2" if self.space.is_monotone_in_distance else "dot"

    # Reading.

    def _read(self, work: Callable[[Any], Found]) -> Found:
        """Read from the table; from its newest version if a writer has removed files of the one that was opened."""
        with _errors_translated():
            try:
                return work(self.table)
            except ERRORS:
                self.table.checkout_latest()
                return work(self.table)

    def _scan(self, columns: list[str], *, where: str | None = None, **options: Any) -> Any:
        """Some columns of the rows that fulfil a condition."""
        given = {"columns": columns, "filter": where, "with_row_id": True, **options}
        return self._read(lambda table: table.scanner(**given).to_table())

    def _search(
        self, queries: Floats, k: int, *, labels: list[str] | None, exclude: list[str], exact: bool
    ) -> list[list[Hit]]:
        if labels == []:
            return [[] for _ in queries]
        where = None if labels is None else f"label IN ({_texts(labels)})"
        share = 1.0
        if not (exact := exact or not self.meta.get("trained")) and where is not None:
            share = self._count(where) / max(1, len(self))
            exact = share * len(self) < max(MIN_ITEMS, FEW * len(self))
        out, more = {escape_name(name) for name in exclude}, k + len(exclude)
        found = self._nearest(queries, more, where) if exact else self._near(queries, more, where, share)
        return self._hits(queries, found, k, out)

    def _nearest(self, queries: Floats, k: int, where: str | None) -> Ints:
        """Ids [Q, m] of the nearest rows: one pass over the vectors for all queries; -1 if there are fewer."""
        given = {"columns": ["vector"], "filter": where, "with_row_id": True, "batch_size": BLOCK}

        def search(table: Any) -> Ints:
            batches = table.scanner(**given).to_batches()
            blocks = ((_row_ids(batch), _vectors(batch, self.dim)) for batch in batches if len(batch))
            return nearest(blocks, queries, k + SPARE, self.space)

        return self._read(search)

    def _near(self, queries: Floats, k: int, where: str | None, share: float) -> Ints:
        """Ids [Q, m] of rows that the approximate index finds, and of newer ones; -1 if there are fewer."""
        found = np.full((len(queries), k), -1)
        probes = max(1, round(self.meta["effort"] / share / PROBES))
        for row, query in zip(found, queries, strict=True):
            how = {"column": "vector", "q": query, "k": k, "nprobes": probes, "refine_factor": REFINE}
            near = self._scan(["_distance"], where=where, prefilter=True, nearest={**how, "metric": self._metric})
            row[: len(near)] = _row_ids(near)
        return found

    def _hits(self, queries: Floats, found: Ints, k: int, out: set[str]) -> list[list[Hit]]:
        """The k best of the rows found, without those of some ids; ties by row."""
        ids = np.unique(found[found >= 0])
        rows = self._scan([*ITEM[:3], "vector"], where=f"_rowid IN ({_numbers(ids)})") if len(ids) else None
        if rows is None or not len(rows):
            return [[] for _ in queries]
        order = np.argsort(_row_ids(rows))
        ids, vectors, items = _row_ids(rows)[order], _vectors(rows, self.dim)[order], rows.select(ITEM[:3]).to_pylist()
        answers = []
        for query, candidates in zip(queries, found, strict=True):
            place = np.flatnonzero(np.isin(ids, candidates))
            s = similarity(query[None], vectors[place], self.space)
            best = [(place[n], s[n]) for n in np.argsort(-s, kind="stable")]
            known = [(items[order[row]], float(value)) for row, value in best]
            answers.append([Hit(*_item(item)[:3], value) for item, value in known if item["id"] not in out][:k])
        return answers

    def _count(self, where: str | None = None) -> int:
        return self._read(lambda table: int(table.count_rows(where)))

    def __len__(self) -> int:
        return self._count()

    def _of_ids(self, ids: Sequence[str], columns: list[str]) -> Iterator[Any]:
        """The rows with some ids."""
        for start in range(0, len(ids), NAMES):
            yield self._scan(columns, where=f"id IN ({_texts(ids[start : start + NAMES])})")

    def _items(self, ids: Sequence[str]) -> list[Item]:
        return [_item(row) for found in self._of_ids(ids, ITEM) for row in found.select(ITEM).to_pylist()]

    def items(self) -> Items:
        found = self._scan(ITEM[:3])
        ids, paths, labels = (unescape_all(found[name].to_pylist()) for name in ITEM[:3])
        return Items(ids, paths, labels)

    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        if ids is None:
            return _vectors(self._scan(["vector"]), self.dim)
        parts = list(self._of_ids(ids, ["id", "vector"]))
        known = [name for part in parts for name in part["id"].to_pylist()]
        row = {name: number for number, name in enumerate(known)}
        vectors = np.concatenate([np.empty((0, self.dim), np.float32), *(_vectors(part, self.dim) for part in parts)])
        return vectors[[row[escape_name(name)] if escape_name(name) in row else self._missing(name) for name in ids]]

    def _missing(self, name: str) -> int:
        self.item(name)  # raises
        raise AssertionError

    def _stamps(self) -> dict[str, tuple[str | None, str | None]]:
        found = self._scan(["id", "label", "stamp"])
        ids, labels, stamps = (unescape_all(found[name].to_pylist()) for name in ("id", "label", "stamp"))
        return dict(zip(ids, zip(labels, stamps, strict=True), strict=True))

    def label_names(self) -> list[str]:
        names = pc.unique(self._scan(["label"])["label"]).to_pylist()
        return sorted(unescape_name(name) for name in names if name is not None)


def table_path(url: str) -> Path:
    """The folder of a table."""
    path = Path(url.removeprefix("lance://"))
    if not path.is_absolute() or path == Path("/"):
        raise NearkinError(f"The URL of a Lance index is lance:///folder, with an absolute path, not {url!r}.")
    return path


def _no_index(path: Path) -> NoIndex:
    return NoIndex(f"There is no index in {path}: create one with nearkin index RUN IMAGES --store lance://{path}.")


def _schema(dim: int) -> pa.Schema:
    texts = [pa.field(name, pa.string(), nullable=name in ("label", "stamp")) for name in ITEM]
    return pa.schema([texts[0].with_metadata(KEY), *texts[1:], pa.field("vector", pa.list_(pa.float32(), dim), False)])


def _texts(names: Sequence[str]) -> str:
    """Texts of a condition."""
    return ", ".join("'" + escape_name(name).replace("'", "''") + "'" for name in names)


def _numbers(ids: Ints) -> str:
    return ", ".join(map(str, ids.tolist()))


def _row_ids(rows: Any) -> Ints:
    return np.asarray(rows["_rowid"]).astype(np.int64)


def _vectors(rows: Any, dim: int) -> Floats:
    """[N, D]"""
    column = rows["vector"]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found: Floats = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    return found


def _item(row: dict[str, Any]) -> Item:
    return Item(*unescape_all([row["id"], row["path"], row["label"], row.get("stamp")]))


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Turn errors of Lance into NearkinErrors."""
    try:
        yield
    except NearkinError:
        raise
    except Exception as error:  # also pyarrow's
        raise NearkinError(f"Lance failed: {first_line(error).rstrip('.')}.") from None
