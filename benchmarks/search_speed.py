"""Speed of search over a million embeddings, beside bare faiss, in one run.

    python benchmarks/search_speed.py            1,000,000 × 128 float32; needs about 5 GB of memory and 3 GB of disk
    python benchmarks/search_speed.py --small    the same table for small sizes, in seconds: ratios are meaningless

Exact search goes from queries to paths, labels and similarities; faiss's IndexFlatIP gives row numbers only. They
alternate, and the minimum over rounds counts, each over several batches of different queries. The approximate index is
built by faiss; its recall and latency are shown beside the exact search. The data are synthetic: classes in families,
with distances and spread as in a trained model, and queries that are not in the index.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from timing import source

from nearkin.files import write_json
from nearkin.search.index import Index, create_index
from nearkin.search.index.base import Truth, recall

Floats = NDArray[np.float32]

K = 10
BATCHES = (1, 16, 256)  # queries at once
QUERIES = 512
PARTS = 16  # most batches timed together; a repeated query would find a warm cache


class Size(NamedTuple):
    items: int
    dim: int
    classes: int
    families: int


FULL = Size(1_000_000, 128, 20_000, 500)
SMALL = Size(5_000, 32, 200, 20)


class Row(NamedTuple):
    what: str
    ours: float
    unit: str = ""
    other: float | None = None
    goal: str = ""
    reached: bool | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.other is None else self.ours / self.other

    def record(self) -> dict[str, object]:
        return {**self._asdict(), "ratio": self.ratio}


def normed(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make(size: Size, queries: int) -> tuple[Floats, Floats]:
    """Items and queries on the sphere: cosine about 0.7 in a class, 0.4 in a family of classes, 0 elsewhere."""
    rng = np.random.default_rng(0)

    def noise(count: int) -> Floats:
        return rng.standard_normal((count, size.dim), dtype=np.float32) / size.dim**0.5

    family = noise(size.families)
    centre = normed(family[rng.integers(size.families, size=size.classes)] + 0.8 * noise(size.classes))
    label = rng.integers(size.classes, size=size.items + queries)
    x = normed(centre[label] + 0.65 * noise(size.items + queries))
    return x[: size.items], x[size.items :]


def in_turn(searches: list[Callable[[Floats], object]], queries: Floats, count: int, rounds: int) -> list[float]:
    """Minimal milliseconds per query of each search, `count` at once, in alternating rounds."""
    parts = [queries[start : start + count] for start in range(0, len(queries), count)][:PARTS]
    best = [float("inf")] * len(searches)
    for turn in range(rounds + 1):
        for i, search in enumerate(searches):
            start = time.perf_counter()
            for part in parts:
                search(part)
            if turn:  # the first round warms up
                best[i] = min(best[i], 1e3 * (time.perf_counter() - start) / (count * len(parts)))
    return best


def one_by_one(search: Callable[[Floats], object], queries: Floats) -> NDArray[np.float64]:
    """Milliseconds of each query, one at a time."""
    taken = []
    for query in queries:
        start = time.perf_counter()
        search(query[None])
        taken.append(1e3 * (time.perf_counter() - start))
    return np.array(taken)


def fill(folder: Path, x: Floats, kind: str) -> tuple[Index, float]:
    """An index of the items, and the seconds of committing them."""
    index = create_index(folder, dim=x.shape[1], space="cosine", kind=kind)
    start = time.perf_counter()
    part = max(1, len(x) // 10)
    for first in range(0, len(x), part):
        names = [f"images/{n:07d}.jpg" for n in range(first, min(first + part, len(x)))]
        index.add(x[first : first + part], paths=names, labels=[name[-7:-4] for name in names])
    return index, time.perf_counter() - start


def exact_rows(index: Index, x: Floats, queries: Floats, rounds: int) -> list[Row]:
    flat = faiss.IndexFlatIP(x.shape[1])
    flat.add(x)
    rows = []
    for count in BATCHES:
        searches = [lambda q: index.search(q, K), lambda q: flat.search(q, K)]
        ours, theirs = in_turn(searches, queries, count, rounds)
        what = f"exact, {count} at once, per query, beside bare faiss"
        rows.append(Row(what, ours, "ms", theirs, "at most 1.2 × faiss", ours <= 1.2 * theirs))
    found = [[int(hit.id[7:14]) for hit in hits] for hits in index.search(queries, K)]
    same = float((np.array(found) == flat.search(queries, K)[1]).mean())
    return [
        *rows,
        Row("exact, part of the items in the place where faiss has them", same, "", None, "≥ 0.999", same >= 0.999),
    ]


def approximate_rows(index: Index, queries: Floats, rounds: int) -> list[Row]:
    start = time.perf_counter()
    index.build()
    built = time.perf_counter() - start
    truth = Truth(queries, [""] * len(queries), index.search(queries, K, exact=True))
    known, effort = index.meta["recall"], index.meta["effort"]
    value = recall(index, truth)
    name = index.kind
    rows = [
        Row(f"{name}, build and measure", built, "s"),
        Row(f"{name}, recall@{K} it says (effort {effort})", known["value"]),
        Row(
            f"{name}, recall@{K} of {len(queries)} queries that are not in it", value, "", None, "≥ 0.95", value >= 0.95
        ),
    ]
    for count in BATCHES:
        searches = [lambda q: index.search(q, K), lambda q: index.search(q, K, exact=True)]
        quick, slow = in_turn(searches, queries, count, rounds)
        rows.append(Row(f"{name}, {count} at once, per query, beside our exact search", quick, "ms", slow))
    taken = one_by_one(searches[0], queries)
    return [
        *rows,
        Row(f"{name}, one at a time, median of {len(queries)}", float(np.median(taken)), "ms"),
        Row(f"{name}, one at a time, 99th percentile", float(np.quantile(taken, 0.99)), "ms"),
    ]


def measure(size: Size, *, kinds: list[str], rounds: int) -> list[Row]:
    x, queries = make(size, QUERIES)
    with tempfile.TemporaryDirectory(prefix="nearkin-speed-") as folder:
        index, seconds = fill(Path(folder) / "exact", x, "exact")
        rows = [Row("committing, per 1,000 items", 1e6 * seconds / len(x), "ms")]
        rows += exact_rows(index, x, queries, rounds)
        del index
        for kind in kinds:
            rows += approximate_rows(fill(Path(folder) / kind, x, kind)[0], queries, rounds)
    return rows


def cells(row: Row, judged: bool) -> list[str]:
    digits = 0 if row.unit == "s" else 3
    numbers = ["" if value is None else f"{value:.{digits}f} {row.unit}".strip() for value in (row.ours, row.other)]
    reached = "" if row.reached is None or not judged else "yes" if row.reached else "no"
    return [row.what, *numbers, "" if row.ratio is None else f"{row.ratio:.2f}", row.goal, reached]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="cores for either side (default 2)")
    parser.add_argument("--kinds", default="hnsw", help="approximate indexes, as hnsw,ivfpq (default hnsw)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    faiss.omp_set_num_threads(args.threads)
    loaded = source()  # of the code as it was loaded
    load = [os.getloadavg()[0]]  # other load makes all times longer
    with threadpool_limits(args.threads):
        rows = measure(size, kinds=[kind for kind in args.kinds.split(",") if kind], rounds=args.rounds)
    load.append(os.getloadavg()[0])
    title = f"{size.items:,} × {size.dim} float32, {args.threads} threads"
    table = Table("what", "nearkin", "other", "ratio", "goal", "reached", title=title)
    for row in rows:
        table.add_row(*cells(row, judged=not args.small))
    Console(width=160).print(table)
    if args.out:
        about = {"size": size._asdict(), "threads": args.threads}
        about["load_before_and_after"] = load
        write_json(args.out, {**about, "faiss": faiss.__version__, "rows": [r.record() for r in rows], **loaded})


if __name__ == "__main__":
    main()
