"""An index in Qdrant: `qdrant://host:port/collection`, or `qdrant:///folder/collection` for the client's local mode.

The index's meta is the one point of a second collection, NAME_about, which is made first: an index exists if both do.
Items are added in batches, one commit per batch. The engine filters labels. Names that are not UTF-8 are stored
escaped. Kinds: exact and hnsw. The local mode is for tests and small sets: it compares with every item in Python.
"""

import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from qdrant_client import QdrantClient, models

from nearkin.errors import NearkinError, first_line
from nearkin.search.index.base import Batch, Floats, Hit, Index, Item, Items, Meta, NoIndex
from nearkin.search.names import escape_all, unescape_all
from nearkin.space import Space

PORT = 6333
BATCH = 256  # points per request
PAGE = 1000  # points per answer
PATIENCE = 600.0  # seconds for the engine to finish indexing
ABOUT = "_about"


class QdrantIndex(Index):
    """A collection of a Qdrant server, or of a folder in local mode."""

    def __init__(self, url: str, client: QdrantClient | None = None) -> None:
        _, port, self.name = split_url(url)
        self.local = not port
        self.client = client or connect(url)
        with _closing_on_error(self.client), _errors_translated():
            super().__init__(self._read_meta())

    @classmethod
    def create(cls, url: str, meta: Meta) -> "QdrantIndex":
        """Create the collections."""
        name, client = split_url(url)[2], connect(url)
        with _closing_on_error(client), _errors_translated():
            if client.collection_exists(name):
                raise NearkinError(f"There is a collection {name!r} in Qdrant already: choose another name.")
            if not client.collection_exists(name + ABOUT):  # a killed process may have left it alone
                one = models.VectorParams(size=1, distance=models.Distance.DOT)
                client.create_collection(name + ABOUT, vectors_config=one)
            _write_about(client, name, meta)
            far = models.Distance.EUCLID if Space(meta["space"]).by_distance else models.Distance.DOT
            client.create_collection(name, vectors_config=models.VectorParams(size=meta["dim"], distance=far))
            with warnings.catch_warnings(action="ignore"):  # the client warns that it has no effect in local mode
                client.create_payload_index(name, "label", models.PayloadSchemaType.KEYWORD)
        return cls(url, client)

    def _read_meta(self) -> Meta:
        meta = _about(self.client, self.name)
        if meta is None or not self.client.collection_exists(self.name):
            raise NoIndex(f"There is no index {self.name!r} in Qdrant: create one with nearkin index.")
        return meta

    def _write_meta(self, changes: Meta) -> Meta:
        with _errors_translated():
            meta = {**(_about(self.client, self.name) or self.meta), **changes}
            _write_about(self.client, self.name, meta)
            return meta

    def _add(self, batch: Batch) -> None:
        with _errors_translated():
            for start in range(0, len(batch.items), BATCH):
                chunk = slice(start, start + BATCH)
                items = batch.items[chunk]
                points = models.Batch(
                    ids=[_point_id(item.id) for item in items],
                    vectors=batch.vectors[chunk].tolist(),
                    payloads=[escape_all(item._asdict()) for item in items],
                )
                self.client.upsert(self.name, points, wait=True)

    def remove(self, ids: Sequence[str]) -> int:
        with _errors_translated():
            found = [_point_id(item.id) for item in self._items(list(dict.fromkeys(ids)))]
            if found:
                self.client.delete(self.name, models.PointIdsList(points=list(found)), wait=True)
        return len(found)

    def _build(self) -> bool:
        """Wait for the engine, which indexes by itself."""
        with _errors_translated():
            end = time.monotonic() + PATIENCE
            while self.client.get_collection(self.name).status != models.CollectionStatus.GREEN:
                if time.monotonic() > end:
                    raise NearkinError(f"Qdrant is still indexing {self.name!r} after {PATIENCE:.0f} s: wait for it.")
                time.sleep(0.5)
        return len(self) > 1

    def _search(
        self, queries: Floats, k: int, *, labels: list[str] | None, exclude: list[str], exact: bool
    ) -> list[list[Hit]]:
        parameters = None if self.local else self._parameters(exact or self.kind == "exact")
        among = _filter(labels, exclude)
        requests = [
            models.QueryRequest(query=query, limit=k, filter=among, params=parameters, with_payload=True)
            for query in queries.tolist()
        ]
        found = []
        with _errors_translated():
            for start in range(0, len(requests), BATCH):
                found += self.client.query_batch_points(self.name, requests[start : start + BATCH])
        return [[Hit(*_item(p)[:3], self._similarity(p.score)) for p in answer.points] for answer in found]

    def _parameters(self, exactly: bool) -> models.SearchParams:
        return models.SearchParams(exact=exactly, hnsw_ef=None if exactly else self.meta["effort"])

    def _similarity(self, score: float) -> float:
        return 1 - score**2 / 2 if self.space.by_distance else score

    def __len__(self) -> int:
        with _errors_translated():
            return self.client.count(self.name, exact=True).count

    def _items(self, ids: Sequence[str]) -> list[Item]:
        with _errors_translated():
            return [_item(point) for point in self.client.retrieve(self.name, [_point_id(name) for name in ids])]

    def _all(self, *, vectors: bool = False) -> Iterator[Any]:
        """All points, in the engine's order."""
        place = None
        while True:
            found, place = self.client.scroll(self.name, limit=PAGE, offset=place, with_vectors=vectors)
            yield from found
            if place is None:
                return

    def items(self) -> Items:
        with _errors_translated():
            found = [_item(point) for point in self._all()]
        return Items([i.id for i in found], [i.path for i in found], [i.label for i in found])

    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        with _errors_translated():
            if ids is None:
                vectors = [point.vector for point in self._all(vectors=True)]
            else:
                found = self.client.retrieve(self.name, [_point_id(name) for name in ids], with_vectors=True)
                known = {_item(point).id: point.vector for point in found}
                vectors = [known[self.item(name).id] for name in ids]
        return np.array(vectors, np.float32).reshape(-1, self.dim)

    def _stamps(self) -> dict[str, tuple[str | None, str | None]]:
        with _errors_translated():
            return {item.id: (item.label, item.stamp) for item in map(_item, self._all())}

    def label_names(self) -> list[str]:
        with _errors_translated():
            return sorted({item.label for item in map(_item, self._all()) if item.label is not None})

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


def split_url(url: str) -> tuple[str, int, str]:
    """Split a URL into host, port and collection; for the local mode: folder, 0 and collection."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = "", None
    if not name or (host and folder) or not (host or folder):
        raise NearkinError(f"The URL of a Qdrant index is qdrant://host:port/collection, not {url!r}.")
    return (host, port or PORT, name) if host else (folder, 0, name)


def connect(url: str) -> QdrantClient:
    """Make a client; it does not contact the server yet."""
    host, port, _ = split_url(url)
    if port:
        return QdrantClient(host=host, port=port, check_compatibility=False)
    Path(host).mkdir(parents=True, exist_ok=True)
    with _errors_translated():
        return QdrantClient(path=host)


def _write_about(client: QdrantClient, name: str, meta: Meta) -> None:
    client.upsert(name + ABOUT, [models.PointStruct(id=0, vector=[1.0], payload=escape_all(meta))], wait=True)


def _about(client: QdrantClient, name: str) -> Meta | None:
    """The meta of an index; None if there is none."""
    found = client.retrieve(name + ABOUT, [0]) if client.collection_exists(name + ABOUT) else []
    return unescape_all(found[0].payload) if found else None


@contextmanager
def _closing_on_error(client: QdrantClient) -> Iterator[None]:
    """Close a client on errors: in local mode an open one locks out all others."""
    try:
        yield
    except NearkinError:
        client.close()
        raise


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Turn errors of the client into NearkinErrors."""
    try:
        yield
    except NearkinError:
        raise
    except Exception as error:  # the client raises whatever its transports raise
        raise NearkinError(f"Qdrant failed: {first_line(error).rstrip('.')}.") from None


def _point_id(name: str) -> str:
    """The id of a point as a UUID, as Qdrant requires."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, escape_all(name)))


def _item(point: Any) -> Item:
    return Item(**unescape_all(point.payload))


def _filter(labels: list[str] | None, exclude: list[str]) -> models.Filter | None:
    must: list[Any] = []
    must_not: list[Any] = []
    if labels is not None:
        must.append(models.FieldCondition(key="label", match=models.MatchAny(any=escape_all(labels))))
    if exclude:
        must_not.append(models.HasIdCondition(has_id=[_point_id(name) for name in exclude]))
    return models.Filter(must=must, must_not=must_not) if must or must_not else None
