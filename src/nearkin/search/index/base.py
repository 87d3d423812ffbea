"""The interface of every index: how one is created, opened, filled and searched, and how its recall is measured."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.search.index.engines import (
    POINTER,
    Kind,
    check_free,
    check_kind,
    check_store,
    engine_of,
    holds_index,
    is_url,
    without_password,
    write_pointer,
)
from nearkin.space import Space
from nearkin.training.model import fingerprint

Floats = NDArray[np.float32]
Meta = dict[str, Any]

RECALL_QUERIES = 200
RECALL_TARGET = 0.95
EFFORTS = (64, 128, 256, 512, 1000)  # PostgreSQL allows at most 1000
TOLERANCE = 1e-5  # engines round similarities differently, and ties may swap


class NoIndex(NearkinError):  # noqa: N818 (not always an error: callers create one)
    """There is no index at an address."""


class NoItem(NearkinError):  # noqa: N818 (as above)
    """There is no item with an id in the index."""


class Hit(NamedTuple):
    """One search result."""

    id: str
    path: str
    label: str | None
    similarity: float


class Item(NamedTuple):
    """One item of an index. The stamp tells whether its file has changed."""

    id: str
    path: str
    label: str | None
    stamp: str | None = None


class Batch(NamedTuple):
    """Checked items to be added: ids are unique, embeddings are points of the space."""

    vectors: Floats  # [N, D]
    items: list[Item]


class Items(NamedTuple):
    """All items of an index as columns, in the order they were added."""

    ids: list[str]
    paths: list[str]
    labels: list[str | None]


class Index(ABC):
    """Embeddings with paths and labels, searched by similarity. Every add and remove is a commit."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta  # dim, space, kind, run, fingerprint, created, recall, threshold, …
        self.dim: int = meta["dim"]
        self.space = Space(meta["space"])
        self.kind: Kind = check_kind(meta["kind"])

    @property
    def run(self) -> Path | None:
        """The folder of the run whose model made the embeddings, if known."""
        return Path(self.meta["run"]) if self.meta.get("run") else None

    def add(
        self,
        embeddings: ArrayLike,
        *,
        paths: Sequence[str],
        labels: Sequence[str | None],
        ids: Sequence[str] | None = None,
        stamps: Sequence[str | None] | None = None,
    ) -> None:
        """Add items, all or none, and replace those with the same id. Ids default to the paths."""
        ids = paths if ids is None else ids
        stamps = [None] * len(paths) if stamps is None else stamps
        vectors = points(embeddings, dim=self.dim, space=self.space)
        for name, column in (("paths", paths), ("labels", labels), ("ids", ids), ("stamps", stamps)):
            if len(column) != len(vectors):
                raise NearkinError(f"{len(vectors)} embeddings need {len(vectors)} {name}, not {len(column)}.")
        if len(set(ids)) < len(ids):
            twice = next(name for n, name in enumerate(ids) if name in ids[:n])
            raise NearkinError(f"The id {twice!r} occurs twice in one call: ids must be unique.")
        if len(vectors):
            self._add(Batch(vectors, list(map(Item, ids, paths, labels, stamps))))

    def search(
        self,
        queries: ArrayLike,
        k: int = 10,
        *,
        labels: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """The k nearest items of each query, best first: only those of `labels`, without the ids in `exclude`.

        `exact` compares with every item, whatever the kind of the index.
        """
        if k < 1:
            raise NearkinError(f"A search needs k of at least 1, not {k}.")
        vectors = points(np.atleast_2d(np.asarray(queries, dtype=np.float32)), dim=self.dim, space=self.space)
        if not len(vectors):
            return []
        wanted = None if labels is None else list(dict.fromkeys(labels))
        return self._search(vectors, k, labels=wanted, exclude=list(dict.fromkeys(exclude or ())), exact=exact)

    def item(self, id: str) -> Item:  # noqa: A002
        """The item with an id."""
        found = self._items([id])
        if not found:
            raise NoItem(f"There is no item {id!r} in the index.")
        return found[0]

    def remember(self, **changes: Any) -> None:
        """Change entries of `meta`, as a commit. Others keep what another process may have written."""
        self.meta = self._write_meta(changes)

    def save(self, where: str | Path, *, kind: str | None = None, store: str | None = None) -> "Index":
        """Copy the index to a new folder or store as one commit, optionally as another kind; returns the open copy.

        The index itself needs no saving: every add and remove is stored when it returns.
        """
        ids, paths, labels = self.items()
        stamps = self.stamps()
        copy = create_index(where, dim=self.dim, space=self.space, kind=kind or self.kind, store=store)
        copy.remember(**{name: self.meta[name] for name in ("run", "fingerprint", "created", "threshold")})
        copy.add(self.embeddings(ids), paths=paths, labels=labels, ids=ids, stamps=[stamps[name][1] for name in ids])
        copy.build()
        return copy

    @staticmethod
    def load(where: str | Path, *, store: str | None = None) -> "Index":
        """Open an index, as `open_index` does."""
        return open_index(where, store=store)

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _add(self, batch: Batch) -> None: ...

    @abstractmethod
    def _search(
        self, queries: Floats, k: int, *, labels: list[str] | None, exclude: list[str], exact: bool
    ) -> list[list[Hit]]: ...

    @abstractmethod
    def _items(self, ids: Sequence[str]) -> list[Item]: ...

    @abstractmethod
    def _write_meta(self, changes: Meta) -> Meta:
        """Merge changes into the stored meta, and return all of it."""

    @abstractmethod
    def remove(self, ids: Sequence[str]) -> int:
        """Remove items by id and return how many existed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def items(self) -> Items:
        """Ids, paths and labels of all items."""

    @abstractmethod
    def embeddings(self, ids: Sequence[str] | None = None) -> Floats:
        """The embeddings [N, D] of all items in the order of `items`, or of the given ids in their order."""

    def stamps(self, ids: Sequence[str] | None = None) -> dict[str, tuple[str | None, str | None]]:
        """The label and stamp by id of every item, or of those with the given ids.

        They tell whether an image must be embedded again.
        """
        return self._stamps() if ids is None else {i.id: (i.label, i.stamp) for i in self._items(ids)}

    @abstractmethod
    def _stamps(self) -> dict[str, tuple[str | None, str | None]]: ...

    @abstractmethod
    def label_names(self) -> list[str]:
        """All labels, sorted."""

    def build(self) -> None:
        """Bring an approximate index up to date with its items, and measure its recall.

        The search effort is raised until recall@10 against an exact search reaches 0.95, or to its maximum.
        """
        if self.kind == "exact" or not self._build():
            self.remember(recall=None)
            return
        truth = find_truth(self)
        for effort in EFFORTS:
            self.meta = {**self.meta, "effort": effort}
            value = recall(self, truth)
            if value >= RECALL_TARGET:
                break
        known = {"value": round(value, 4), "k": len(truth.hits[0]), "queries": len(truth.ids)}
        self.remember(effort=effort, recall=known)

    def check_build(self) -> None:  # noqa: B027 (most engines build by themselves)
        """Raise if a package that `build` needs is missing."""

    @abstractmethod
    def _build(self) -> bool:
        """Build what speeds up a search; False if an exact search is faster."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing open)
        """Close connections and files."""


def points(embeddings: ArrayLike, *, dim: int, space: Space) -> Floats:
    """Embeddings as float32 points [N, D] of the space, such as unit vectors for cosine."""
    v = np.asarray(embeddings, dtype=np.float32)
    if v.ndim != 2 or v.shape[1] != dim:
        raise NearkinError(f"The index holds embeddings of shape [N, {dim}], not {list(v.shape)}.")
    if not np.isfinite(v).all():
        row = int((~np.isfinite(v)).any(1).argmax())
        raise NearkinError(f"Embedding {row} is not finite: the model that made it is broken.")
    projected: Floats = space.project(torch.from_numpy(np.array(v, order="C"))).numpy()
    return projected


def create_index(
    where: str | Path,
    *,
    dim: int,
    space: str,
    kind: str = "exact",
    run: str | Path | None = None,
    store: str | None = None,
) -> Index:
    """Create an empty index in a folder or a store. `run` is the folder of the run whose model makes the embeddings.

    With both a folder and a store, the store holds the items, and the folder the store's URL without its password.
    """
    check_store(store)
    if dim < 1:
        raise NearkinError(f"An embedding has at least one dimension, not {dim}.")
    run = None if run is None else Path(os.path.abspath(run))
    meta: Meta = {
        "dim": dim,
        "space": Space(space).value,
        "kind": check_kind(kind),
        "run": None if run is None else str(run),
        "fingerprint": None if run is None else fingerprint(run),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "threshold": None,
        "recall": None,
        "effort": EFFORTS[0],
    }
    folder = None if is_url(where) else check_free(Path(where))
    place = store or where
    engine = engine_of(place)
    if kind not in engine.kinds:
        raise NearkinError(f"{engine.about} cannot be {kind}: choose {' or '.join(engine.kinds)}.")
    index: Index = engine.load().create(place, meta)
    if folder is not None and store is not None:
        write_pointer(folder, store)
    return index


def open_index(where: str | Path, *, store: str | None = None) -> Index:
    """Open the index at `where`. With a store, a new folder is made to point to it, and an old one must do so."""
    check_store(store)
    if is_url(where):
        found: Index = engine_of(where).load()(where)
        return found
    folder = Path(where)
    if store is not None and not holds_index(folder):
        index = open_index(store)
        write_pointer(check_free(folder), store)
        return index
    if not (folder / POINTER).exists():
        if store is not None:
            raise NearkinError(f"The items of {folder} are in that folder itself: leave --store out.")
        local: Index = engine_of(folder).load()(folder)
        return local
    known: str = read_json(folder / POINTER, needs={"store": str})["store"]
    if store is not None and without_password(store) != known:
        raise NearkinError(f"The items of {folder} are in {known}: leave --store out, or choose another folder.")
    return open_index(store or known)


class Truth(NamedTuple):
    """Items of the index as queries, and their exact nearest neighbours without themselves."""

    queries: Floats
    ids: list[str]
    hits: list[list[Hit]]


def find_truth(index: Index, *, k: int = 10, queries: int = RECALL_QUERIES) -> Truth:
    """Search exactly for some items of the index, always the same ones."""
    known = index.items().ids
    chosen = np.sort(np.random.default_rng(0).permutation(len(known))[:queries])
    ids = [known[row] for row in chosen.tolist()]
    vectors = index.embeddings(ids)
    found = index.search(vectors, k + 1, exact=True)
    return Truth(vectors, ids, [_without(hits, name, k) for hits, name in zip(found, ids, strict=True)])


def recall(index: Index, truth: Truth) -> float:
    """The fraction of the true neighbours, or of equally near items, that the index finds."""
    k = len(truth.hits[0])
    found = index.search(truth.queries, k + 1)
    shares = [
        sum(hit.similarity >= true[-1].similarity - TOLERANCE for hit in _without(hits, name, k)) / len(true)
        for hits, name, true in zip(found, truth.ids, truth.hits, strict=True)
    ]
    return float(np.mean(shares))


def _without(hits: list[Hit], name: str, k: int) -> list[Hit]:
    return [hit for hit in hits if hit.id != name][:k]
