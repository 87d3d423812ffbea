"""A map of the whole index: every item is a point in the plane, similar items near each other.

Principal components give a first map at once. The final map is t-SNE of up to `LANDMARKS` items, spread over the
classes; the others lie between their nearest landmarks. The same index gives the same map, which is cached on disk.
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

VERSION = 1  # raise it when the same embeddings give another map: old files are then ignored
POINTS = 20_000  # per map; a larger index is sampled
LANDMARKS = 2_000  # arranged by t-SNE
COMPONENTS = 32  # input dimensions of t-SNE
NEIGHBOURS = 3  # landmarks that place another item


class Layout(NamedTuple):
    """Positions [N, 2] in 0 … 1, and the method that found them."""

    positions: Floats
    method: str


def sample(labels: Sequence[str | None], limit: int) -> Ints:
    """At most `limit` rows in order, about the same fraction of every class."""
    if len(labels) <= limit:
        return np.arange(len(labels))
    number = {label: n for n, label in enumerate(dict.fromkeys(labels))}
    classes = np.array([number[label] for label in labels])
    order = np.argsort(classes, kind="stable")  # class by class: every n-th row samples each class evenly
    return np.sort(order[np.linspace(0, len(order) - 1, limit).round().astype(np.int64)])


def principal_components_map(embeddings: Floats) -> Layout:
    """A map by principal components: fast, but crowded in the middle."""
    return Layout(_scaled(_components(embeddings, 2)), "principal components")


def tsne_map(embeddings: Floats, labels: Sequence[str | None]) -> Layout:
    """A map by t-SNE of landmarks, with the other items between them."""
    if len(embeddings) < 5:  # neighbourhoods need neighbours
        return principal_components_map(embeddings)
    from sklearn.manifold import TSNE

    rows = sample(labels, LANDMARKS)
    narrow = _components(embeddings, COMPONENTS)
    start = narrow[rows, :2]
    start = 1e-4 * start / max(float(start[:, 0].std()), 1e-12)
    perplexity = min(30.0, (len(rows) - 1) / 4)
    arranged = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(narrow[rows])
    positions = arranged if len(rows) == len(embeddings) else _interpolate(embeddings, rows, arranged)
    return Layout(_scaled(positions), "t-SNE")


def cached_map(embeddings: Floats, make: Callable[[], Layout], *, folder: Path | None = None) -> Layout:
    """The cached map of these embeddings, or a new one. A cache that cannot be read or written is ignored."""
    digest = hashlib.sha256(f"{VERSION} {embeddings.shape} {LANDMARKS}".encode())
    digest.update(np.ascontiguousarray(embeddings).data)
    path = (folder or cache_dir()) / "maps" / f"{digest.hexdigest()[:32]}.safetensors"
    with suppress(NearkinError, OSError, KeyError):
        tensors, about = read_tensors(path)
        if len(tensors["places"]) == len(embeddings):
            return Layout(tensors["places"].numpy(), about["method"])
    made = make()
    with suppress(NearkinError):
        write_tensors(path, {"places": torch.from_numpy(made.positions)}, {"method": made.method})
    return made


def _components(embeddings: Floats, count: int) -> Floats:
    """The first principal components [N, count], zero-padded; signs make the largest coefficient positive."""
    if not len(embeddings):
        return np.zeros((0, count), np.float32)
    x = embeddings.astype(np.float64)
    x = x - x.mean(0)
    variances, axes = np.linalg.eigh(x.T @ x)
    order = np.argsort(variances)[::-1][:count]
    axes = axes[:, order] * np.sign(axes[np.abs(axes[:, order]).argmax(0), order])
    found = x @ axes
    return np.pad(found, ((0, 0), (0, count - found.shape[1]))).astype(np.float32)


def _interpolate(embeddings: Floats, rows: Ints, arranged: Floats) -> Floats:
    """Positions of all items: the mean of their nearest landmarks, weighted by inverse distance."""
    x, marks = torch.from_numpy(embeddings), torch.from_numpy(embeddings[rows])
    at = torch.from_numpy(arranged)
    positions = []
    for block in torch.split(x, 4096):
        distance, nearest = torch.cdist(block, marks).topk(min(NEIGHBOURS, len(marks)), largest=False)
        weight = 1 / distance.clamp_min(1e-6)
        weight = weight / weight.sum(1, keepdim=True)
        positions.append((weight[:, :, None] * at[nearest]).sum(1))
    found: Floats = torch.cat(positions).numpy()
    return found


def _scaled(positions: Floats) -> Floats:
    """Positions moved and scaled into 0 … 1, with the same scale on both axes."""
    if not len(positions):
        return positions.astype(np.float32)
    low, high = positions.min(0), positions.max(0)
    extent = max(float((high - low).max()), 1e-12)
    scaled: Floats = ((positions - (low + high) / 2) / extent + 0.5).astype(np.float32)
    return scaled


class Map(BaseModel):
    """The index in the plane, as columns."""

    state: Literal["drawing", "done", "none"] = Field(description="drawing: a better map is being computed.")
    method: str
    total: int = Field(description="Number of items in the index; a large one is sampled.")
    labels: list[str]
    ids: list[str]
    label: list[int] = Field(description="For each point the position of its label in `labels`; -1 for none.")
    x: list[float]
    y: list[float]


NONE = Map(state="none", method="", total=0, labels=[], ids=[], label=[], x=[], y=[]).model_dump_json().encode()


class IndexMap:
    """The map of an index as JSON, computed in its own thread on first use."""

    def __init__(
        self, index: Index, ids: Sequence[str], labels: Sequence[str | None], *, shown: Callable[[str], str]
    ) -> None:
        self.index, self.total, self.shown = index, len(ids), shown
        rows = sample(labels, POINTS)
        self.ids, self.labels = [ids[row] for row in rows], [labels[row] for row in rows]
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.json: bytes | None = NONE if not self.ids else None

    def get(self) -> bytes:
        """The current map."""
        with self.lock:
            if self.json is None:
                embeddings = self.index.embeddings(None if len(self.ids) == self.total else self.ids)
                self.json = self._as_json(principal_components_map(embeddings), state="drawing")
                self.thread = threading.Thread(target=self._draw, args=(embeddings,), name="map", daemon=True)
                self.thread.start()
            return self.json

    def _draw(self, embeddings: Floats) -> None:
        try:
            layout = cached_map(embeddings, lambda: tsne_map(embeddings, self.labels))
        except Exception:  # t-SNE may fail on odd embeddings: keep the first map
            layout = principal_components_map(embeddings)
        self.json = self._as_json(layout, state="done")

    def _as_json(self, layout: Layout, *, state: Literal["drawing", "done"]) -> bytes:
        names = sorted({label for label in self.labels if label is not None})
        number = {name: n for n, name in enumerate(names)}
        x, y = np.round(layout.positions.T.astype(np.float64), 5).tolist()
        found = Map(
            state=state,
            method=layout.method,
            total=self.total,
            labels=names,
            ids=[self.shown(name) for name in self.ids],
            label=[-1 if label is None else number[label] for label in self.labels],
            x=x,
            y=y,
        )
        return found.model_dump_json().encode()
