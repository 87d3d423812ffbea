"""Approximate search through faiss: an HNSW graph, or inverted lists with product quantisation (IVF-PQ).

It covers the items that existed when it was built. The few newer ones are searched exactly beside it, and all
candidates are scored again with their vectors.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.errors import NearkinError
from nearkin.files import atomic_file, os_error
from nearkin.search.index.base import Floats, Meta
from nearkin.search.index.engines import Kind
from nearkin.search.index.exact import Ints, Mask
from nearkin.search.index.segments import Rows
from nearkin.space import Space

MIN_ITEMS = 1000  # with fewer, an exact search is faster
LINKS = 32  # neighbours per HNSW node; twice as many on the bottom layer
BUILD_EFFORT = 100  # candidates examined for a new node's neighbours
REFINE = 16  # times k candidates of IVF-PQ are scored again, since their codes are coarse
BLOCK = 2**16  # vectors added to a graph at once
PROBES = 8  # HNSW effort that costs about as much as reading one inverted list
FEW = 0.1  # fraction of items below which a filtered search is exact
OUTGROWN = 4  # growth after which inverted lists are trained again


class Graph(NamedTuple):
    """A faiss index over the keys of items."""

    faiss: Any
    kind: Kind
    last: int  # the largest key in it

    def search(self, queries: Floats, k: int, *, effort: int, rows: Rows, wanted: Mask) -> Ints:
        """Rows [Q, m] of candidates among the wanted ones, -1 if there are fewer."""
        faiss = import_faiss()
        inner = faiss.downcast_index(self.faiss.index)
        selector, share = self._selector(rows, wanted)
        if self.kind == "hnsw":
            # faiss keeps only wanted candidates on its way, so a search among few must visit more nodes.
            parameters = faiss.SearchParametersHNSW(efSearch=max(k, round(effort / share)), sel=selector)
        else:
            k *= REFINE
            probes = max(1, round(effort / share / PROBES))
            parameters = faiss.SearchParametersIVF(nprobe=min(inner.nlist, probes), sel=selector)
        with _threads(faiss, len(queries)):
            keys = _search(self.faiss, queries, min(k, self.faiss.ntotal), parameters)
        place = np.minimum(np.searchsorted(rows.keys, keys), len(rows) - 1)
        found: Ints = np.where(rows.keys[place] == keys, place, -1)
        return found

    def _selector(self, rows: Rows, wanted: Mask) -> tuple[Any, float]:
        """A faiss selector of the wanted keys, None if all are wanted, and the fraction of items wanted."""
        keys = rows.keys[wanted & (rows.keys <= self.last)]
        share = max(len(keys), 1) / self.faiss.ntotal
        if len(keys) == self.faiss.ntotal:
            return None, share
        bits = np.zeros(self.last + 1, np.bool_)
        bits[keys] = True
        return import_faiss().IDSelectorBitmap(np.packbits(bits, bitorder="little")), share


def _search(index: Any, queries: Floats, k: int, parameters: Any) -> Ints:
    """The keys [Q, k] that a faiss index finds.

    faiss.contrib.torch_utils, which pytorch-metric-learning imports, replaces faiss's search by one without parameters
    and keeps the original as search_numpy. Other replaced methods still take arrays.
    """
    search = getattr(index, "search_numpy", index.search)
    keys: Ints = search(queries, k, params=parameters)[1]
    return keys


@contextmanager
def _threads(faiss: Any, limit: int) -> Iterator[None]:
    """Use no more faiss threads than queries: the others would only wait."""
    usual = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(min(usual, limit))
    try:
        yield
    finally:
        faiss.omp_set_num_threads(usual)


def import_faiss() -> Any:
    """Import faiss, or say how to install it."""
    try:
        import faiss
    except ImportError:
        raise NearkinError("An approximate index needs faiss: pip install 'nearkin[search]'.") from None
    return faiss


def make_graph(kind: Kind, rows: Rows, *, space: Space, old: Graph | None = None) -> Graph:
    """Build a graph over all rows, or extend a copy of an old one by the newer rows."""
    faiss = import_faiss()
    wanted = np.flatnonzero(rows.alive)
    if old is not None:
        wanted = wanted[rows.keys[wanted] > old.last]
        index = faiss.clone_index(old.faiss)
    else:
        index = faiss.IndexIDMap(_empty(faiss, kind, rows, wanted, space))
    for numbers, vectors in rows.vectors.blocks_of(wanted, BLOCK):
        index.add_with_ids(vectors, rows.keys[numbers])
    return Graph(index, kind, rows.last_key)


def _empty(faiss: Any, kind: Kind, rows: Rows, wanted: Ints, space: Space) -> Any:
    count, dim = len(wanted), rows.dim
    metric = faiss.METRIC_L2 if space.is_monotone_in_distance else faiss.METRIC_INNER_PRODUCT
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, LINKS, metric)
        index.hnsw.efConstruction = BUILD_EFFORT
        return index
    lists = max(1, min(round(4 * count**0.5), count // 39))
    coarse = faiss.IndexFlatL2(dim) if space.is_monotone_in_distance else faiss.IndexFlatIP(dim)
    index = faiss.IndexIVFPQ(coarse, dim, lists, code_bytes(dim), 8, metric)
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1  # else faiss prints warnings
    sample = np.random.default_rng(0).permutation(count)[: max(100_000, 64 * lists)]
    index.train(rows.vectors.take(wanted[np.sort(sample)]))
    return index


def code_bytes(dim: int) -> int:
    """Bytes of the code of a vector in IVF-PQ: one for four dimensions, or for more if they cannot be cut so."""
    return max(c for c in range(1, max(1, dim // 4) + 1) if dim % c == 0)


def write_graph(folder: Path, generation: int, graph: Graph) -> Meta:
    """Write a graph and return its manifest entry."""
    name = f"graph-{generation:08d}.faiss"
    with atomic_file(folder / name) as temporary:
        try:
            import_faiss().write_index(graph.faiss, str(temporary))
        except RuntimeError as error:  # faiss's own for a disk that is full
            raise os_error(error) from None
        digest = _digest(temporary)
    return {"file": name, "last": graph.last, "items": graph.faiss.ntotal, "sha256": digest}


def read_graph(folder: Path, known: Meta, kind: Kind) -> Graph | None:
    """Read the graph that the manifest names; None if its file is missing, which only makes searches slower."""
    path = folder / known["file"]
    if not path.exists():
        return None
    if _digest(path) != known["sha256"]:
        raise NearkinError(f"{path} is damaged: delete it, and nearkin index rebuilds it; no item is lost.")
    return Graph(import_faiss().read_index(str(path)), kind, known["last"])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
