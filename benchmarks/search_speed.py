"""Speed of search over a million embeddings, beside bare faiss, in one run.

    python benchmarks/search_speed.py            1,000,000 × 128 float32; needs about 5 GB of memory and 3 GB of disk
    python benchmarks/search_speed.py --small    the same table of small sizes, in seconds: its ratios mean nothing

Exact search is the whole way from queries to paths, labels and similarities, against faiss's IndexFlatIP, which gives
row numbers: in turn, the least of all rounds. The approximate index is built through faiss and tells its recall; its
latency stands beside that of the exact search. The data are made: classes in families, as far from each other and as
spread as those of a trained model, with queries that are not in the index.
"""

import argparse
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

from nearkin.index import Index, create_index
from nearkin.index.recall import Truth, recall
from nearkin.runs import provenance, write_json

Floats = NDArray[np.float32]

K = 10
BATCHES = (1, 16, 256)


class Size(NamedTuple):
    items: int
    dim: int
    classes: int
    families: int


FULL = Size(1_000_000, 128, 20_000, 500)
SMALL = Size(5_000, 32, 200, 20)


class Row(NamedTuple):
    what: str
    ours: str
    other: str
    ratio: float
    goal: str
    reached: bool | None


def normed(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make(size: Size, queries: int) -> tuple[Floats, Floats]:
    """Items and queries on the sphere: kin at a cosine of about 0.7, families at 0.4, strangers around 0."""
    rng = np.random.default_rng(0)

    def noise(count: int) -> Floats:
        return rng.standard_normal((count, size.dim), dtype=np.float32) / size.dim**0.5

    family = noise(size.families)
    centre = normed(family[rng.integers(size.families, size=size.classes)] + 0.8 * noise(size.classes))
    label = rng.integers(size.classes, size=size.items + queries)
    x = normed(centre[label] + 0.65 * noise(size.items + queries))
    return x[: size.items], x[size.items :]


def in_turn(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """The least time of each in milliseconds, run in turn, so that a busy machine is busy for all."""
    best = [float("inf")] * len(steps)
    for turn in range(rounds + 1):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if turn:  # the first warms up
                best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def fill(folder: Path, x: Floats, kind: str) -> tuple[Index, float]:
    """An index of the items, and the seconds that committing them took."""
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
        asked = queries[:count]
        ours, theirs = in_turn([lambda q=asked: index.search(q, K), lambda q=asked: flat.search(q, K)], rounds)
        what = f"exact, {count} at once, per query"
        ratio = ours / theirs
        cells = (f"{ours / count:.2f} ms", f"{theirs / count:.2f} ms")
        rows.append(Row(what, *cells, ratio, "at most 1.2 × faiss", ratio <= 1.2))
    found = [[int(hit.id[7:14]) for hit in hits] for hits in index.search(queries, K)]
    same = float((np.array(found) == flat.search(queries, K)[1]).mean())
    what = "exact, the same items in the same places"
    return [*rows, Row(what, f"{same:.4f}", "1", same, "at least 0.999", same >= 0.999)]


def approximate_rows(index: Index, queries: Floats, rounds: int) -> list[Row]:
    start = time.perf_counter()
    index.build()
    built = time.perf_counter() - start
    truth = Truth(queries, [""] * len(queries), index.search(queries, K, exact=True))
    known, effort = index.meta["recall"], index.meta["effort"]
    value = recall(index, truth)
    name = index.kind
    rows = [
        Row(f"{name}, build and measure", f"{built:.0f} s", "", built, "", None),
        Row(f"{name}, recall@{K} it says (effort {effort})", f"{known['value']:.3f}", "", known["value"], "", None),
        Row(f"{name}, recall@{K} of unseen queries", f"{value:.3f}", "", value, "at least 0.95", value >= 0.95),
    ]
    for count in BATCHES:
        asked = queries[:count]
        quick, slow = in_turn(
            [lambda q=asked: index.search(q, K), lambda q=asked: index.search(q, K, exact=True)], rounds
        )
        what = f"{name}, {count} at once, per query, beside our exact search"
        rows.append(Row(what, f"{quick / count:.2f} ms", f"{slow / count:.2f} ms", quick / slow, "", None))
    return rows


def measure(size: Size, *, kinds: list[str], rounds: int) -> list[Row]:
    x, queries = make(size, max(BATCHES))
    with tempfile.TemporaryDirectory(prefix="nearkin-speed-") as folder:
        index, seconds = fill(Path(folder) / "exact", x, "exact")
        rows = [Row("committing, per 1,000 items", f"{1e6 * seconds / len(x):.1f} ms", "", seconds, "", None)]
        rows += exact_rows(index, x, queries, rounds)
        del index
        for kind in kinds:
            rows += approximate_rows(fill(Path(folder) / kind, x, kind)[0], queries, rounds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="cores for either side (default 2)")
    parser.add_argument("--kinds", default="hnsw", help="approximate indexes, as hnsw,ivfpq (default hnsw)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures and where they come from")
    args = parser.parse_args()
    size = SMALL if args.small else FULL
    faiss.omp_set_num_threads(args.threads)
    with threadpool_limits(args.threads):
        rows = measure(size, kinds=[kind for kind in args.kinds.split(",") if kind], rounds=args.rounds)
    title = f"{size.items:,} × {size.dim} float32, {args.threads} threads"
    table = Table("what", "nearkin", "other", "ratio", "goal", "reached", title=title)
    for row in rows:
        reached = "" if args.small or row.reached is None else "yes" if row.reached else "no"
        table.add_row(row.what, row.ours, row.other, f"{row.ratio:.2f}" if row.other else "", row.goal, reached)
    Console(width=160).print(table)
    if args.out:
        record = {"size": size._asdict(), "threads": args.threads, "rows": [r._asdict() for r in rows]}
        write_json(args.out, {**record, **provenance()})


if __name__ == "__main__":
    main()
