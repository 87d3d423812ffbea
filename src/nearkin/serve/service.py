"""What the server does, independent of HTTP: searches, thumbnails, the map; and the JSON it answers with."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from nearkin.files import VERSION, Json
from nearkin.search.index import Hit as IndexHit
from nearkin.search.index import Index
from nearkin.search.index import Item as IndexItem
from nearkin.search.index.base import NoItem
from nearkin.search.names import escape_name, unescape_name
from nearkin.search.query import Query, same_class, search_queries, threshold_of
from nearkin.serve.guard import Limits, Refused
from nearkin.serve.map import IndexMap
from nearkin.serve.pictures import LARGE, Cache, check_upload, decode_upload, thumbnail
from nearkin.serve.queues import BatchQueue, Budget, Pool, finish
from nearkin.training.model import Model


class Label(BaseModel):
    """A class of the index."""

    name: str
    items: int = Field(description="Number of items.")


class Threshold(BaseModel):
    """The similarity above which two pictures are taken for the same class."""

    similarity: float
    precision: float | None = Field(None, description="Fraction of such pairs of the same class at calibration.")


class About(BaseModel):
    """A description of the index."""

    name: str
    items: int
    dim: int
    space: str = Field(description="The geometry: cosine, ball, euclidean or inner.")
    kind: str = Field(description="The kind of search: exact, hnsw or ivfpq.")
    labels: list[Label] = Field(description="The classes, sorted by name.")
    threshold: Threshold | None
    by_picture: bool = Field(description="Whether uploaded pictures can be searched; if not, only items can.")
    by_picture_why: str | None = Field(description="The reason if they cannot.")
    upload_bytes: int = Field(description="Maximum bytes of an upload.")
    upload_pixels: int = Field(description="Maximum pixels of an upload.")
    most_hits: int = Field(description="Maximum number of hits.")
    version: str


class Item(BaseModel):
    """One picture of the index."""

    id: str
    path: str = Field(description="Relative to the index's folder.")
    label: str | None


class Hit(Item):
    """A search result."""

    similarity: float
    same: bool | None = Field(description="Whether it is taken for the same class; null without a threshold.")


class Found(BaseModel):
    """The nearest pictures, best first."""

    query: Item | None = Field(description="The item searched for; null for an uploaded picture.")
    hits: list[Hit]


class Examples(BaseModel):
    """Some pictures, of as many classes as possible."""

    items: list[Item]


class Service:
    """One index with its model. Items and labels are read once: restart the server to see later additions."""

    def __init__(
        self,
        index: Index,
        model: Model | None,
        *,
        name: str,
        why: str | None,
        run: str | Path | None,
        root: str | Path | None,
        limits: Limits,
    ) -> None:
        self.index, self.model, self.limits = index, model, limits
        self.root = os.path.abspath(str(root or getattr(index, "folder", ".")))
        self.ids, self.paths, labels = index.items()
        shown = {label: None if label is None else escape_name(label) for label in set(labels)}
        self.labels = [shown[label] for label in labels]
        self.exact_labels = {name: label for label, name in shown.items()}
        self.threshold = threshold_of(index, run)
        self.about = self._about(name, why)
        self.index_map = IndexMap(index, self.ids, self.labels, shown=self.shown)
        self.budget = Budget(limits.uploads_bytes)
        self.decoding = Pool("decode", threads=limits.threads, waiting=limits.waiting)
        self.decoding_large = Pool("large", threads=1, waiting=limits.waiting_large)
        self.showing = Pool("show", threads=limits.threads, waiting=limits.waiting)
        self.searches: BatchQueue[Query, list[IndexHit]] = BatchQueue(
            partial(search_queries, index, model=model), batch=limits.batch, waiting=limits.waiting
        )
        self.cache = Cache(thumbnail)

    def close(self) -> None:
        """Finish the work in progress."""
        self.searches.close()
        self.decoding.close()
        self.decoding_large.close()
        self.showing.close()

    def _about(self, name: str, why: str | None) -> About:
        counts = Counter(label for label in self.labels if label is not None)
        return About(
            name=escape_name(name),
            items=len(self.ids),
            dim=self.index.dim,
            space=self.index.space,
            kind=self.index.kind,
            labels=[Label(name=label, items=counts[label]) for label in sorted(counts)],
            threshold=None if self.threshold is None else Threshold.model_validate(self.threshold),
            by_picture=self.model is not None,
            by_picture_why=None if why is None else escape_name(why),
            upload_bytes=self.limits.upload_bytes,
            upload_pixels=self.limits.pixels,
            most_hits=self.limits.hits,
            version=VERSION,
        )

    async def by_picture(self, data: bytes, *, k: int, labels: Sequence[str] | None) -> Found:
        """The nearest items of an uploaded picture."""
        if self.model is None:
            raise Refused(409, self.about.by_picture_why or "This index has no model to embed pictures with.")
        limit, seconds = self.limits.pixels, self.limits.work_seconds
        count = await finish(self.decoding.submit(partial(check_upload, data, limit=limit)), seconds)
        decode = partial(
            decode_upload,
            data,
            storage=self.model.storage,
            channels=self.model.embedder.trunk.channels,
            limit=limit,
        )
        pool = self.decoding if count <= LARGE else self.decoding_large
        pixels = await finish(pool.submit(decode), seconds)
        return await self._ask(Query(k, labels=self._exact(labels), pixels=pixels))

    async def by_item(self, item_id: str, *, k: int, labels: Sequence[str] | None) -> Found:
        """The nearest items of an item."""
        item = await run_in_threadpool(self.find, item_id)
        return await self._ask(Query(k, labels=self._exact(labels), id=item.id), item)

    async def _ask(self, query: Query, item: IndexItem | None = None) -> Found:
        hits = await finish(self.searches.submit(query), self.limits.work_seconds)
        return Found(
            query=None if item is None else Item(**self._shown(item)),
            hits=[
                Hit(**self._shown(hit), similarity=hit.similarity, same=same_class(hit, self.threshold)) for hit in hits
            ],
        )

    def _shown(self, item: IndexItem | IndexHit) -> Json:
        """An item's id, path and label as clients see them."""
        label = None if item.label is None else escape_name(item.label)
        return {"id": self.shown(item.id), "path": self.shown(item.path), "label": label}

    def shown(self, name: str) -> str:
        """A path or id as clients see it: relative to the root, so that it does not tell where the server's files are.

        Ids that are not paths stay; so do paths that would not lead back.
        """
        with suppress(ValueError):  # on another drive
            near = os.path.relpath(name, self.root)
            if os.path.isabs(name) and self._inside(near) == name:
                return escape_name(near)
        return escape_name(name)

    def _inside(self, name: str) -> str:
        return os.path.normpath(os.path.join(self.root, name))

    def find(self, shown: str) -> IndexItem:
        """The item with an id as clients see it. No other file can be reached."""
        name = unescape_name(shown)
        for exact in (self._inside(name), name):
            with suppress(NoItem, UnicodeEncodeError):  # some stores hold only UTF-8
                return self.index.item(exact)
        raise NoItem(f"There is no item {shown!r} in the index.")

    def _exact(self, labels: Sequence[str] | None) -> tuple[str, ...] | None:
        """The index's labels by the names that clients see."""
        return None if labels is None else tuple(self.exact_labels.get(label) or label for label in labels)

    async def picture(self, item_id: str, side: int) -> tuple[bytes, str]:
        """A thumbnail of an item, and its media type."""

        def make() -> tuple[bytes, str]:
            return self.cache.get(Path(self.find(item_id).path), side)

        return await finish(self.showing.submit(make), self.limits.work_seconds)

    def examples(self, count: int, labels: Sequence[str] | None = None) -> Examples:
        """The first item of every class, or of every n-th class if there are more than `count`."""
        wanted = None if labels is None else frozenset(labels)
        every = [row for row, label in enumerate(self.labels) if wanted is None or label in wanted]
        first: dict[str | None, int] = {}
        for row in every:
            first.setdefault(self.labels[row], row)
        rows = sorted(first.values())
        if len(rows) < count:  # few classes: add more items, evenly spaced
            step = max(1, len(every) // count)
            rows = list(dict.fromkeys([*rows, *every[::step]]))
        step = max(1, len(rows) // count)
        chosen = rows[::step][:count]
        return Examples(
            items=[
                Item(id=self.shown(self.ids[r]), path=self.shown(self.paths[r]), label=self.labels[r]) for r in chosen
            ]
        )

    async def map(self) -> bytes:
        """The map as JSON."""
        return await asyncio.to_thread(self.index_map.get)
