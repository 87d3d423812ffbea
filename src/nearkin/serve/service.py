"""What the server does, apart from how it is asked: searches, pictures, the map."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from nearkin.files import VERSION
from nearkin.search.index import Hit as IndexHit
from nearkin.search.index import Index
from nearkin.search.query import Query, same_class, search_queries, threshold_of
from nearkin.serve.guard import Limits, Refused
from nearkin.serve.map import Atlas
from nearkin.serve.pictures import LARGE, Cache, check_upload, decode_upload, thumbnail
from nearkin.serve.queues import Budget, Desk, Pool, finish
from nearkin.training.model import Model


class Label(BaseModel):
    """A class of the index."""

    name: str
    items: int = Field(description="How many items have it.")


class Threshold(BaseModel):
    """The similarity from which two pictures are taken for one class."""

    similarity: float
    precision: float | None = Field(None, description="The part of such pairs that were kin at calibration; 0 … 1.")


class About(BaseModel):
    """What the index is."""

    name: str
    items: int
    dim: int
    space: str = Field(description="The geometry: cosine, ball, euclidean or inner.")
    kind: str = Field(description="How it searches: exact, hnsw or ivfpq.")
    labels: list[Label] = Field(description="The classes, sorted by name.")
    threshold: Threshold | None
    by_picture: bool = Field(description="Whether pictures can be searched by; else only items can.")
    by_picture_why: str | None = Field(description="Where they cannot: why, in a sentence.")
    upload_bytes: int = Field(description="Bytes that a picture may have.")
    upload_pixels: int = Field(description="Pixels that a picture may have.")
    most_hits: int = Field(description="Hits that a search may ask for.")
    version: str


class Item(BaseModel):
    """One picture of the index."""

    id: str
    path: str
    label: str | None


class Hit(Item):
    """A picture that was found."""

    similarity: float
    same: bool | None = Field(description="Whether it is taken for the same class; null where there is no threshold.")


class Found(BaseModel):
    """The nearest pictures, the nearest first."""

    query: Item | None = Field(description="The item that was searched by; null for a picture of one's own.")
    hits: list[Hit]


class Examples(BaseModel):
    """Pictures to begin with, of as many classes as may be."""

    items: list[Item]


class Service:
    """One index with its model. What it says about itself is as of now; to see later additions, start it anew."""

    def __init__(
        self, index: Index, model: Model | None, *, name: str, why: str | None, run: str | Path | None, limits: Limits
    ) -> None:
        self.index, self.model, self.limits = index, model, limits
        self.ids, self.paths, self.labels = index.items()
        self.threshold = threshold_of(index, run)
        self.about = self._about(name, why)
        self.atlas = Atlas(index, self.ids, self.labels)
        self.budget = Budget(limits.uploads_bytes)
        self.decoding = Pool("decode", threads=limits.threads, waiting=limits.waiting)
        self.decoding_large = Pool("large", threads=1, waiting=limits.waiting_large)
        self.showing = Pool("show", threads=limits.threads, waiting=limits.waiting)
        self.desk: Desk[Query, list[IndexHit]] = Desk(
            partial(search_queries, index, model=model), batch=limits.batch, waiting=limits.waiting
        )
        self.cache = Cache(thumbnail)

    def close(self) -> None:
        """Finish what is under way."""
        self.desk.close()
        self.decoding.close()
        self.decoding_large.close()
        self.showing.close()

    def _about(self, name: str, why: str | None) -> About:
        counts = Counter(label for label in self.labels if label is not None)
        return About(
            name=name,
            items=len(self.ids),
            dim=self.index.dim,
            space=self.index.space,
            kind=self.index.kind,
            labels=[Label(name=label, items=counts[label]) for label in sorted(counts)],
            threshold=None if self.threshold is None else Threshold.model_validate(self.threshold),
            by_picture=self.model is not None,
            by_picture_why=why,
            upload_bytes=self.limits.upload_bytes,
            upload_pixels=self.limits.pixels,
            most_hits=self.limits.hits,
            version=VERSION,
        )

    async def by_picture(self, data: bytes, *, k: int, labels: Sequence[str] | None) -> Found:
        """The kin of a picture of one's own."""
        if self.model is None:
            raise Refused(409, self.about.by_picture_why or "This index has no model to see pictures with.")
        limit, seconds = self.limits.pixels, self.limits.work_seconds
        count = await finish(self.decoding.submit(partial(check_upload, data, limit=limit)), seconds)
        decode = partial(
            decode_upload,
            data,
            short_side=self.model.short_side,
            channels=self.model.embedder.trunk.channels,
            limit=limit,
        )
        pool = self.decoding if count <= LARGE else self.decoding_large
        pixels = await finish(pool.submit(decode), seconds)
        return await self._ask(Query(k, labels=None if labels is None else tuple(labels), pixels=pixels))

    async def by_item(self, item_id: str, *, k: int, labels: Sequence[str] | None) -> Found:
        """The kin of an item."""
        return await self._ask(Query(k, labels=None if labels is None else tuple(labels), id=item_id))

    async def _ask(self, query: Query) -> Found:
        hits = await finish(self.desk.submit(query), self.limits.work_seconds)
        return Found(
            query=None if query.id is None else await run_in_threadpool(self.item, query.id),
            hits=[Hit(**hit._asdict(), same=same_class(hit, self.threshold)) for hit in hits],
        )

    def item(self, item_id: str) -> Item:
        """An item of the index; nothing else has a path here."""
        found = self.index.item(item_id)
        return Item(id=found.id, path=found.path, label=found.label)

    async def picture(self, item_id: str, side: int) -> tuple[bytes, str]:
        """An item's picture, and its media type."""

        def make() -> tuple[bytes, str]:
            return self.cache.get(Path(self.item(item_id).path), side)

        return await finish(self.showing.submit(make), self.limits.work_seconds)

    def examples(self, count: int, labels: Sequence[str] | None = None) -> Examples:
        """Items to begin with: the first of every class, or of every so many classes."""
        wanted = None if labels is None else frozenset(labels)
        every = [row for row, label in enumerate(self.labels) if wanted is None or label in wanted]
        first: dict[str | None, int] = {}
        for row in every:
            first.setdefault(self.labels[row], row)
        rows = sorted(first.values())
        if len(rows) < count:  # few classes, or none: others beside them, evenly
            step = max(1, len(every) // count)
            rows = list(dict.fromkeys([*rows, *every[::step]]))
        step = max(1, len(rows) // count)
        chosen = rows[::step][:count]
        return Examples(items=[Item(id=self.ids[r], path=self.paths[r], label=self.labels[r]) for r in chosen])

    async def map(self) -> bytes:
        """The map as JSON."""
        return await asyncio.to_thread(self.atlas.get)
