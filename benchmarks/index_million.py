"""Indexes of a million embeddings from disk: commits, opening, memory, search, and the search page's first answer.

    python benchmarks/index_million.py                        1,000,000 × 128 float32; about 5 GB of memory and of disk
    python benchmarks/index_million.py --small                small sizes, to check that it runs
    … --only lance                                            only the stores with this in their names

Commits are of 512 new items each, with 100,000 items in the index and again with all. Opening and the page are measured
in new processes, after their imports: what opening adds to the resident memory of the process, and the seconds from
opening to the first answers of the page's server, an item's neighbours and the map. Recall is what `build` measures,
by 200 items of the index. A store's figures are written as soon as they are known.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from search_speed import FULL, SMALL, Floats, Size, make
from timing import source

from nearkin.files import Json, read_json, write_json
from nearkin.search.index import Index, create_index, open_index

RESULTS = Path(__file__).parent / "results" / "index_million.json"
FILL = 10_000  # items per commit while an index is filled
COMMIT, COMMITS = 512, 40
QUERIES, K = 64, 10


class Store(NamedTuple):
    name: str
    kind: str
    address: str


STORES = (
    Store("folder, exact", "exact", "{folder}/exact"),
    Store("folder, ivfpq", "ivfpq", "{folder}/ivfpq"),
    Store("lance, ivfpq", "ivfpq", "lance://{folder}/table"),
)

OPEN = """
import json, sys, time
import psutil
from nearkin.search.index import open_index
from nearkin.search.index.engines import engine_of

where, rows = sys.argv[1], json.load(sys.stdin)
engine_of(where).load()
process = psutil.Process()
before, start = process.memory_info().rss, time.perf_counter()
index = open_index(where)
opened, after = time.perf_counter(), process.memory_info().rss
for query in rows[:1]:
    index.search([query], 10)
searched, held = time.perf_counter(), process.memory_info().rss
found = {"open_s": opened - start, "open_mb": (after - before) / 1e6}
print(json.dumps({**found, "first_search_s": searched - opened, "searched_mb": (held - before) / 1e6}))
"""

PAGE = """
import json, sys, time
from starlette.testclient import TestClient
from nearkin.search.index import open_index
from nearkin.search.index.engines import engine_of
from nearkin.serve.app import make_app

where, item = sys.argv[1:]
engine_of(where).load()
start = time.perf_counter()
index = open_index(where)
client = TestClient(make_app(index, None, why="no model"))
assert client.get("/api/about").json()["items"] == len(index)
answered = time.perf_counter()
assert len(client.get("/api/search", params={"id": item, "k": 10}).json()["hits"]) == 10
searched = time.perf_counter()
shown = len(client.get("/api/map").json()["x"])
print(json.dumps({
    "page_s": answered - start, "page_search_s": searched - answered, "map_s": time.perf_counter() - searched,
    "map_points": shown,
}))
"""


def in_new_process(program: str, *arguments: str, given: Any = None) -> Json:
    """What a program prints as JSON."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def add(index: Index, x: Floats, first: int, count: int) -> None:
    """Add items from one number on, as one commit."""
    names = [f"images/{n:08d}.jpg" for n in range(first, first + count)]
    index.add(
        x[first : first + count], paths=names, labels=[f"class {n % 20_000}" for n in range(first, first + count)]
    )


def fill(index: Index, x: Floats, first: int, end: int) -> None:
    for start in range(first, end, FILL):
        add(index, x, start, min(FILL, end - start))


def commits(index: Index, x: Floats, first: int) -> Json:
    """Median, mean and longest milliseconds of a commit."""
    took = []
    for number in range(COMMITS):
        start = time.perf_counter()
        add(index, x, first + COMMIT * number, COMMIT)
        took.append(1e3 * (time.perf_counter() - start))
    return {"median": statistics.median(took), "mean": statistics.fmean(took), "longest": max(took)}


def measure(store: Store, folder: Path, size: Size) -> Json:
    """All figures of one store."""
    x, queries = make(size, QUERIES)
    where, early = store.address.format(folder=folder), size.items // 10
    found: Json = {"store": store.name, "kind": store.kind}
    with create_index(where, dim=size.dim, space="cosine", kind=store.kind) as index:
        start = time.perf_counter()
        fill(index, x, 0, early)
        found["commit_ms_early"] = commits(index, x, early)
        fill(index, x, early + COMMIT * COMMITS, size.items - COMMIT * COMMITS)
        found["commit_ms_late"] = commits(index, x, size.items - COMMIT * COMMITS)
        found |= {"items": len(index), "fill_s": time.perf_counter() - start}
        start = time.perf_counter()
        index.build()
        found |= {"build_s": time.perf_counter() - start, "recall": index.meta["recall"]}
    place = Path(where.removeprefix("lance://"))
    found["disk_gb"] = sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 1e9
    found |= in_new_process(OPEN, where, given=queries[:1].tolist())
    with open_index(where) as index:
        took = []
        for query in queries:
            start = time.perf_counter()
            index.search(query[None], K)
            took.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        truth = index.search(queries, K, exact=True)
        exact_ms = 1e3 * (time.perf_counter() - start) / len(queries)
        near = [{hit.id for hit in hits} for hits in index.search(queries, K)]
        share = np.mean([len({hit.id for hit in hits} & found) / K for hits, found in zip(truth, near, strict=True)])
    found |= {"search_ms": statistics.median(took), "exact_64_at_once_ms_each": exact_ms, "recall_new_queries": share}
    found |= in_new_process(PAGE, where, f"images/{size.items // 2:08d}.jpg")
    shutil.rmtree(place)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--only", default="", help="only the stores with this in their names")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the figures (default %(default)s)")
    args = parser.parse_args()
    size = SMALL._replace(items=60_000) if args.small else FULL
    with tempfile.TemporaryDirectory() as folder:
        for store in STORES:
            if args.only in store.name:
                row = measure(store, Path(folder), size)
                before = read_json(args.out)["rows"] if args.out.exists() else []
                rows = [known for known in before if known["store"] != store.name]
                write_json(args.out, {"size": size._asdict(), "small": args.small, "rows": [*rows, row], **source()})
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
