"""An index in PostgreSQL with pgvector: `postgresql://user@host/database`, and `?nearkin=NAME` for one of several.

Its tables are NAME_items and NAME_about. Items are added by COPY, in one transaction per call; writers wait for each
other, searches do not. The database filters labels, through its own index if that is faster. Names that are not UTF-8
are stored escaped. Kinds: exact (every row is compared) and hnsw.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np
import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql

from nearkin.errors import NearkinError, first_line
from nearkin.search.index.base import Batch, Floats, Hit, Index, Item, Items, Meta, NoIndex
from nearkin.search.names import escape_all, escape_name, unescape_all

Connection = psycopg.Connection[Any]

MAX_DIMENSIONS = 2000  # of pgvector's HNSW
SCHEMA = """
CREATE TABLE {about} (meta jsonb NOT NULL);
CREATE TABLE {items} (
    id text PRIMARY KEY, path text NOT NULL, label text, stamp text,
    key bigserial, embedding vector({dim}) NOT NULL
);
CREATE INDEX ON {items} (label);
CREATE INDEX ON {items} (key);
"""
ADD = """
INSERT INTO {items} (id, path, label, stamp, embedding)
SELECT id, path, label, stamp, embedding FROM incoming ORDER BY number
ON CONFLICT (id) DO UPDATE SET
    path = excluded.path, label = excluded.label, stamp = excluded.stamp,
    key = excluded.key, embedding = excluded.embedding
"""
SEARCH = """
SELECT id, path, label, embedding {distance} %(query)s AS distance FROM {items} {among}
ORDER BY embedding {distance} %(query)s LIMIT %(k)s
"""


class PostgresIndex(Index):
    """An index in a database. Many threads may use it, and many processes may write to it."""

    def __init__(self, url: str) -> None:
        self.address, self.name = split_url(url)
        self.idle: LifoQueue[Connection] = LifoQueue()
        super().__init__(self._read_meta())

    @classmethod
    def create(cls, url: str, meta: Meta) -> "PostgresIndex":
        """Create the tables."""
        if meta["kind"] == "hnsw" and meta["dim"] > MAX_DIMENSIONS:
            raise NearkinError(f"pgvector's HNSW supports up to {MAX_DIMENSIONS} dimensions, not {meta['dim']}.")
        address, name = split_url(url)
        with connected(address) as connection, connection.transaction():
            if _exists(connection, name):
                raise NearkinError(f"There is an index {name!r} in the database already: choose ?nearkin=ANOTHER_NAME.")
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            connection.execute(sql.SQL(SCHEMA).format(**_tables(name), dim=sql.Literal(meta["dim"])))
            connection.execute(
                sql.SQL("INSERT INTO {about} VALUES (%s)").format(**_tables(name)), [json.dumps(escape_all(meta))]
            )
        return cls(url)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection for this thread alone, in a transaction; database errors become NearkinErrors."""
        connection = self._idle_connection() or self._new_connection()
        try:
            with connection.transaction():
                yield connection
        except psycopg.Error as error:
            raise NearkinError(f"PostgreSQL failed: {first_line(error)}.") from None
        finally:
            if connection.closed:
                connection.close()
            else:
                self.idle.put(connection)

    def _idle_connection(self) -> Connection | None:
        """A connection that is open already and answers: a server that was restarted has closed the others."""
        while True:
            try:
                connection = self.idle.get_nowait()
            except Empty:
                return None
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:
                connection.close()
            else:
                return connection

    def _new_connection(self) -> Connection:
        connection = connect(self.address)
        try:
            register_vector(connection)
        except psycopg.Error as error:
            connection.close()
            raise NearkinError(f"PostgreSQL failed: {first_line(error)}.") from None
        return connection

    def _do(self, connection: Connection, text: str, values: Any = None) -> Any:
        return connection.execute(sql.SQL(text).format(**_tables(self.name)), values)

    def _rows(self, text: str, values: Any = None) -> list[Any]:
        with self._connection() as connection:
            found: list[Any] = self._do(connection, text, values).fetchall()
        return found

    def _read_meta(self) -> Meta:
        with connected(self.address) as connection:
            if not _exists(connection, self.name):
                raise NoIndex(f"There is no index {self.name!r} in the database: create one with nearkin index.")
            meta: Meta = unescape_all(self._do(connection, "SELECT meta FROM {about}").fetchone()[0])
        return meta

    def _write_meta(self, changes: Meta) -> Meta:
        text = "UPDATE {about} SET meta = meta || %s RETURNING meta"
        meta: Meta = unescape_all(self._rows(text, [json.dumps(escape_all(changes))])[0][0])
        return meta

    def _add(self, batch: Batch) -> None:
        with self._connection() as connection:
            # Two writers that replace the same items in another order would wait for each other for good.
            self._do(connection, "LOCK TABLE {items} IN SHARE ROW EXCLUSIVE MODE")
            self._do(
                connection,
                "CREATE TEMP TABLE incoming ON COMMIT DROP AS "
                "SELECT 0::int AS number, id, path, label, stamp, embedding FROM {items} WITH NO DATA",
            )
            cursor = connection.cursor()
            with cursor.copy("COPY incoming FROM STDIN WITH (FORMAT BINARY)") as copy:
                copy.set_types(["int4", "text", "text", "text", "text", "vector"])
                for number, (item, vector) in enumerate(zip(batch.items, batch.vectors, strict=True)):
                    copy.write_row((number, *escape_all(item), vector))
            self._do(connection, ADD)

    def remove(self, ids: Sequence[str]) -> int:
        with self._connection() as connection:
            count: int = self._do(connection, "DELETE FROM {items} WHERE id = ANY(%s)", [escape_all(ids)]).rowcount
        return count

    def _build(self) -> bool:
        operators = sql.SQL("vector_l2_ops" if self.space.by_distance else "vector_ip_ops")
        named = {**_tables(self.name), "graph": sql.Identifier(f"{self.name}_graph"), "operators": operators}
        text = "CREATE INDEX IF NOT EXISTS {graph} ON {items} USING hnsw (embedding {operators})"
        with self._connection() as connection:
            connection.execute(sql.SQL(text).format(**named))
            self._do(connection, "ANALYZE {items}")
        return len(self) > 1

    def _search(
        self, queries: Floats, k: int, *, labels: list[str] | None, exclude: list[str], exact: bool
    ) -> list[list[Hit]]:
        distance = "<->" if self.space.by_distance else "<#>"  # the latter is −x·v
        among = _conditions(labels, exclude)
        text = sql.SQL(SEARCH).format(**_tables(self.name), distance=sql.SQL(distance), among=among)
        values = {"k": k, "labels": escape_all(labels), "exclude": escape_all(exclude)}
        found = []
        with self._connection() as connection:
            if exact or self.kind == "exact":
                connection.execute("SET LOCAL enable_indexscan = off")
            else:
                connection.execute(sql.SQL("SET LOCAL hnsw.ef_search = {}").format(sql.Literal(self.meta["effort"])))
                connection.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            for query in queries:
                rows = connection.execute(text, {**values, "query": query}).fetchall()
                found.append([self._hit(row) for row in rows])
        return found

    def _hit(self, row: tuple[Any, ...]) -> Hit:
        name, path, label = unescape_all(row[:3])
        return Hit(name, path, label, self._similarity(row[3]))

    def _similarity(self, distance: float) -> float:
        return 1 - distance**2 / 2 if self.space.by_distance else -distance

    def __len__(self) -> int:
        count: int = self._rows("SELECT count(*) FROM {items}")[0][0]
        return count

    def _items(self, ids: Sequence[str]) -> list[Item]:
        rows = self._rows("SELECT id, path, label, stamp FROM {items} WHERE id = ANY(%s)", [escape_all(ids)])
        return [Item(*unescape_all(row)) for row in rows]

    def items(self) -> Items:
        found = [Item(*unescape_all(row)) for row in self._rows("SELECT id, path, label FROM {items} ORDER BY key")]
        return Items([i.id for i in found], [i.path for i in found], [i.label for i in found])

    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        if ids is None:
            rows = [row[0] for row in self._rows("SELECT embedding FROM {items} ORDER BY key")]
        else:
            text = "SELECT id, embedding FROM {items} WHERE id = ANY(%s)"
            known = dict(self._rows(text, [escape_all(ids)]))
            rows = [known[escape_name(self.item(name).id)] for name in ids]
        return np.array([_numbers(row) for row in rows], np.float32).reshape(-1, self.dim)

    def _stamps(self) -> dict[str, tuple[str | None, str | None]]:
        rows = self._rows("SELECT id, path, label, stamp FROM {items}")
        return {item.id: (item.label, item.stamp) for item in (Item(*unescape_all(row)) for row in rows)}

    def label_names(self) -> list[str]:
        rows = self._rows("SELECT DISTINCT label FROM {items} WHERE label IS NOT NULL")
        return sorted(unescape_all([row[0] for row in rows]))

    def close(self) -> None:
        """Close the idle connections."""
        while not self.idle.empty():
            self.idle.get_nowait().close()


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into the address of a database and the name of the index in it."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = options.pop("nearkin", "nearkin")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", name):
        raise NearkinError(f"The name of an index in a database has only small letters, digits and _, unlike {name!r}.")
    return urlunsplit(parts._replace(query=urlencode(options))), name


def connect(address: str) -> Connection:
    """Connect to a database."""
    try:
        # No prepared statements: a plan that uses the graph must not serve an exact search.
        return psycopg.connect(address, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        host = urlsplit(address).hostname or "this machine"
        raise NearkinError(f"Cannot connect to PostgreSQL on {host}: {first_line(error)}.") from None


@contextmanager
def connected(address: str) -> Iterator[Connection]:
    """A connection that is closed at the end."""
    connection = connect(address)
    try:
        yield connection
    except psycopg.Error as error:
        raise NearkinError(f"PostgreSQL failed: {first_line(error)}.") from None
    finally:
        connection.close()


def _conditions(labels: list[str] | None, exclude: list[str]) -> sql.Composable:
    """The WHERE clause, with only the conditions in use, so that the database can choose the right index."""
    conditions = ["label = ANY(%(labels)s)"] * (labels is not None) + ["id <> ALL(%(exclude)s)"] * bool(exclude)
    return sql.SQL("WHERE " + " AND ".join(conditions) if conditions else "")


def _tables(name: str) -> dict[str, sql.Composable]:
    return {"items": sql.Identifier(f"{name}_items"), "about": sql.Identifier(f"{name}_about")}


def _exists(connection: Connection, name: str) -> bool:
    found = connection.execute("SELECT to_regclass(%s)", [f'"{name}_about"']).fetchone()
    return found is not None and found[0] is not None


def _numbers(vector: Any) -> Any:
    return vector.to_numpy() if hasattr(vector, "to_numpy") else vector
