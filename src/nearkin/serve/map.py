"""A map of the whole index: every item a point in the plane, kin near each other.

Principal components give a rough map at once. The map that stays is t-SNE of up to `LANDMARKS` items, spread over the
classes; the others lie where their nearest landmarks are. The same index gives the same map, and it is kept on disk.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from nearkin.errors import NearkinError
from nearkin.files import cache_dir, read_tensors, write_tensors
from nearkin.search.index import Index

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

VERSION = 1  # raise it when the same embeddings give another map: old files are then passed over
POINTS = 20_000  # that a map shows; of a larger index a part
LANDMARKS = 2_000  # that t-SNE arranges
COMPONENTS = 32  # that t-SNE works on
NEIGHBOURS = 3  # landmarks between which another item lies


class Layout(NamedTuple):
    """Places [N, 2] in 0 … 1, and how they were found."""

    places: Floats
    method: str


def sample(labels: Sequence[str | None], most: int) -> Ints:
    """Rows of at most `most` items, of every class the same part as near as may be, in order."""
    if len(labels) <= most:
        return np.arange(len(labels))
    number = {label: n for n, label in enumerate(dict.fromkeys(labels))}
    classes = np.array([number[label] for label in labels])
    order = np.argsort(classes, kind="stable")  # class by class: every n-th of them is a fair part of each
    return np.sort(order[np.linspace(0, len(order) - 1, most).round().astype(np.int64)])


def rough(embeddings: Floats) -> Layout:
    """Principal components: fast, and crowded in the middle."""
    return Layout(_frame(_components(embeddings, 2)), "principal components")


def careful(embeddings: Floats, labels: Sequence[str | None]) -> Layout:
    """t-SNE of landmarks, the others between them."""
    if len(embeddings) < 5:  # neighbourhoods need neighbours
        return rough(embeddings)
    from sklearn.manifold import TSNE

    rows = sample(labels, LANDMARKS)
    narrow = _components(embeddings, COMPONENTS)
    start = narrow[rows, :2]
    start = 1e-4 * start / max(float(start[:, 0].std()), 1e-12)
    perplexity = min(30.0, (len(rows) - 1) / 4)
    arranged = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(narrow[rows])
    places = arranged if len(rows) == len(embeddings) else _between(embeddings, rows, arranged)
    return Layout(_frame(places), "t-SNE")


def cached(embeddings: Floats, make: Callable[[], Layout], *, folder: Path | None = None) -> Layout:
    """A map that was made before, or the one made now; a cache that cannot be written or read is done without."""
    digest = hashlib.sha256(f"{VERSION} {embeddings.shape} {LANDMARKS}".encode())
    digest.update(np.ascontiguousarray(embeddings).data)
    path = (folder or cache_dir()) / "maps" / f"{digest.hexdigest()[:32]}.safetensors"
    with suppress(NearkinError, OSError, KeyError):
        tensors, about = read_tensors(path)
        if len(tensors["places"]) == len(embeddings):
            return Layout(tensors["places"].numpy(), about["method"])
    made = make()
    with suppress(OSError):
        write_tensors(path, {"places": torch.from_numpy(made.places)}, {"method": made.method})
    return made


def _components(embeddings: Floats, count: int) -> Floats:
    """The first principal components [N, count], zeros where there are fewer; each with its largest part positive."""
    if not len(embeddings):
        return np.zeros((0, count), np.float32)
    x = embeddings.astype(np.float64)
    x = x - x.mean(0)
    variances, axes = np.linalg.eigh(x.T @ x)
    order = np.argsort(variances)[::-1][:count]
    axes = axes[:, order] * np.sign(axes[np.abs(axes[:, order]).argmax(0), order])
    found = x @ axes
    return np.pad(found, ((0, 0), (0, count - found.shape[1]))).astype(np.float32)


def _between(embeddings: Floats, rows: Ints, arranged: Floats) -> Floats:
    """Landmarks where they are, every other item in the middle of its nearest ones, the nearer the closer."""
    x, marks = torch.from_numpy(embeddings), torch.from_numpy(embeddings[rows])
    at = torch.from_numpy(arranged)
    places = []
    for block in torch.split(x, 4096):
        distance, nearest = torch.cdist(block, marks).topk(min(NEIGHBOURS, len(marks)), largest=False)
        weight = 1 / distance.clamp_min(1e-6)
        weight = weight / weight.sum(1, keepdim=True)
        places.append((weight[:, :, None] * at[nearest]).sum(1))
    found: Floats = torch.cat(places).numpy()
    return found


def _frame(places: Floats) -> Floats:
    """The places moved and scaled into 0 … 1, both axes alike."""
    if not len(places):
        return places.astype(np.float32)
    low, high = places.min(0), places.max(0)
    extent = max(float((high - low).max()), 1e-12)
    framed: Floats = ((places - (low + high) / 2) / extent + 0.5).astype(np.float32)
    return framed


class Map(BaseModel):
    """The index in the plane, column by column."""

    state: Literal["drawing", "done", "none"] = Field(description="Whether a better map is on its way.")
    method: str
    total: int = Field(description="Items in the index; a large one is shown in part.")
    labels: list[str]
    ids: list[str]
    label: list[int] = Field(description="For each point the number of its label, -1 for none.")
    x: list[float]
    y: list[float]


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
