"""What the server does, apart from how it is asked: searches, pictures, the map."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from nearkin import __version__
from nearkin.errors import NearkinError
from nearkin.search.index import Hit, Index
from nearkin.search.query import threshold_of
from nearkin.serve import answers
from nearkin.serve.limits import Limits, Refused
from nearkin.serve.map import Atlas
from nearkin.serve.pictures import LARGE, Cache, check_upload, decode_upload, thumbnail
from nearkin.serve.queues import Budget, Desk, Pool, Question, Searcher, finish
from nearkin.training.model import Model


class Service:
    """One index with its model. What it says about itself is as of now; to see later additions, start it anew."""

    def __init__(
        self, index: Index, model: Model | None, *, name: str, why: str | None, run: str | Path | None, limits: Limits
    ) -> None:
        self.index, self.model, self.limits = index, model, limits
        self.ids, self.paths, self.labels = index.items()
        self.threshold = _threshold(index, run)
        self.about = self._about(name, why)
        self.atlas = Atlas(index, self.ids, self.labels)
        self.budget = Budget(limits.uploads_bytes)
        self.decoding = Pool("decode", threads=limits.threads, waiting=limits.waiting)
        self.decoding_large = Pool("large", threads=1, waiting=limits.waiting_large)
        self.showing = Pool("show", threads=limits.threads, waiting=limits.waiting)
        self.desk: Desk[Question, list[Hit]] = Desk(
            Searcher(index, model).answer, batch=limits.batch, waiting=limits.waiting
        )
        self.cache = Cache(thumbnail)

    def close(self) -> None:
        """Finish what is under way."""
        self.desk.close()
        self.decoding.close()
        self.decoding_large.close()
        self.showing.close()

    def _about(self, name: str, why: str | None) -> answers.About:
        counts = Counter(label for label in self.labels if label is not None)
        return answers.About(
            name=name,
            items=len(self.ids),
            dim=self.index.dim,
            space=self.index.space,
            kind=self.index.kind,
            labels=[answers.Label(name=label, items=counts[label]) for label in sorted(counts)],
            threshold=self.threshold,
            by_picture=self.model is not None,
            by_picture_why=why,
            upload_bytes=self.limits.upload_bytes,
            upload_pixels=self.limits.pixels,
            most_hits=self.limits.hits,
            version=__version__,
        )

    async def by_picture(self, data: bytes, *, k: int, labels: Sequence[str] | None) -> answers.Found:
        """The kin of a picture of one's own."""
        if self.model is None:
            raise Refused(409, self.about.by_picture_why or "This index has no model to see pictures with.")
        limit, seconds = self.limits.pixels, self.limits.work_seconds
        count = await finish(self.decoding.submit(partial(check_upload, data, limit=limit)), seconds)
        decode = partial(
            decode_upload,
            data,
            short=self.model.short,
            size=self.model.size,
            channels=self.model.embedder.trunk.channels,
            limit=limit,
        )
        pool = self.decoding if count <= LARGE else self.decoding_large
        pixels = await finish(pool.submit(decode), seconds)
        return await self._ask(Question(k, labels=None if labels is None else tuple(labels), pixels=pixels))

    async def by_item(self, item_id: str, *, k: int, labels: Sequence[str] | None) -> answers.Found:
        """The kin of an item."""
        return await self._ask(Question(k, labels=None if labels is None else tuple(labels), id=item_id))

    async def _ask(self, question: Question) -> answers.Found:
        hits = await finish(self.desk.submit(question), self.limits.work_seconds)
        least = None if self.threshold is None else self.threshold.similarity
        return answers.Found(
            query=None if question.id is None else await run_in_threadpool(self.item, question.id),
            hits=[
                answers.Hit(**hit._asdict(), same=None if least is None else hit.similarity >= least) for hit in hits
            ],
        )

    def item(self, item_id: str) -> answers.Item:
        """An item of the index; nothing else has a path here."""
        try:
            found = self.index.item(item_id)
        except NearkinError:
            raise Refused(404, "There is no such picture in the index.") from None
        return answers.Item(id=found.id, path=found.path, label=found.label)

    async def picture(self, item_id: str, side: int) -> tuple[bytes, str]:
        """An item's picture, and its media type."""

        def make() -> tuple[bytes, str]:
            return self.cache.get(Path(self.item(item_id).path), side)

        return await finish(self.showing.submit(make), self.limits.work_seconds)

    def examples(self, count: int, labels: Sequence[str] | None = None) -> answers.Examples:
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
        return answers.Examples(
            items=[answers.Item(id=self.ids[r], path=self.paths[r], label=self.labels[r]) for r in chosen]
        )

    async def map(self) -> bytes:
        """The map as JSON."""
        return await asyncio.to_thread(self.atlas.get)


def _threshold(index: Index, run: str | Path | None) -> answers.Threshold | None:
    known = threshold_of(index, run)
    return None if known is None else answers.Threshold.model_validate(known)
