"""The map as it is asked for: a rough one at once, the careful one when it is drawn."""

import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from nearkin.index import Index
from nearkin.serve.answers import Map
from nearkin.serve.map import POINTS, Floats, Layout, cached, careful, rough, sample

NONE = Map(state="none", method="", total=0, labels=[], ids=[], label=[], x=[], y=[]).model_dump_json().encode()


class Atlas:
    """The map of an index as JSON, drawn in a thread of its own when it is first asked for."""

    def __init__(self, index: Index, ids: Sequence[str], labels: Sequence[str | None]) -> None:
        self.index, self.total = index, len(ids)
        rows = sample(labels, POINTS)
        self.ids, self.labels = [ids[row] for row in rows], [labels[row] for row in rows]
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.json: bytes | None = NONE if not self.ids else None

    def get(self) -> bytes:
        """The map as it is now."""
        with self.lock:
            if self.json is None:
                embeddings = self.index.embeddings(None if len(self.ids) == self.total else self.ids)
                self.json = self._written(rough(embeddings), state="drawing")
                self.thread = threading.Thread(target=self._draw, args=(embeddings,), name="map", daemon=True)
                self.thread.start()
            return self.json

    def _draw(self, embeddings: Floats) -> None:
        try:
            layout = cached(embeddings, lambda: careful(embeddings, self.labels))
        except Exception:  # whatever t-SNE makes of strange embeddings: the rough map stays
            layout = rough(embeddings)
        self.json = self._written(layout, state="done")

    def _written(self, layout: Layout, *, state: Literal["drawing", "done"]) -> bytes:
        names = sorted({label for label in self.labels if label is not None})
        number = {name: n for n, name in enumerate(names)}
        x, y = np.round(layout.places.T.astype(np.float64), 5).tolist()
        found = Map(
            state=state,
            method=layout.method,
            total=self.total,
            labels=names,
            ids=self.ids,
            label=[-1 if label is None else number[label] for label in self.labels],
            x=x,
            y=y,
        )
        return found.model_dump_json().encode()
