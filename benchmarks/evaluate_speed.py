"""Time and memory of `nearkin.evaluate`, beside faiss, the matrix product alone and pytorch-metric-learning.

With --shapes, a table of several sizes: the time of R@1, P@R and MAP@R per query beside that of faiss finding as many
neighbours as these metrics need (the size of the largest class), for some queries. It is processor time of one thread,
the median of alternating rounds. Without it, synthetic data of the size of Stanford Online Products' test set (60,502 ×
512, 11,316 classes) on all threads. Three figures:

1. time of all metrics relative to the block-wise matrix product of the same size alone, on all cores, by NumPy or
   torch, whichever is faster. Half of the product runs before and half after, since a machine's speed drifts;
2. time of pytorch-metric-learning's three metrics, with its own nearest neighbours, relative to ours;
3. our peak memory beyond that of embeddings and labels.

With --million, growing sizes up to a million items of 50,000 classes × 128, on a device, the default metrics: seconds
beside those of the bare product, the products and the top of each row alone, peak memory, and whether some queries'
values are those of a plain sort. The file is written after each size.

    python benchmarks/evaluate_speed.py                           # the full size: some five minutes on 2 cores
    python benchmarks/evaluate_speed.py --shapes                  # instead, the table of shapes
    python benchmarks/evaluate_speed.py --items 12000 --no-pml    # a quick check
    python benchmarks/evaluate_speed.py --items 5924 --classes 100
    python benchmarks/evaluate_speed.py --million --device cuda --out benchmarks/results/evaluate_million.json
    python benchmarks/evaluate_speed.py --million --items 20000    # only up to this size
"""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from timing import alternating, milliseconds, source
from torch import Tensor

from nearkin.errors import first_line
from nearkin.evaluation import DEFAULT_METRICS, Protocol, evaluate, evaluate_under
from nearkin.files import Json, write_json

METRICS = ("R@1", "R@10", "R@100", "R@1000", "P@R", "MAP@R", "nDCG@100")
PML = {"precision_at_1": "R@1", "r_precision": "P@R", "mean_average_precision_at_r": "MAP@R"}
SOP_ITEMS, SOP_CLASSES = 60_502, 11_316


class Shape(NamedTuple):
    """Items of some classes: all search each other, of which faiss some, or the first `queries` search the others."""

    name: str
    items: int
    classes: int
    dim: int
    queries: int
    apart: bool = False


SHAPES = (
    Shape("many items", 200_000, 20_000, 128, 2_000),
    Shape("two classes", 20_000, 2, 128, 1_000),
    Shape("Stanford Online Products", SOP_ITEMS, SOP_CLASSES, 512, 2_000),
    Shape("CUB", 5_924, 100, 512, 5_924),
    Shape("In-Shop's gallery", 14_612, 3_985, 512, 2_000, apart=True),
)


def made(items: int, classes: int, dim: int, *, seed: int = 0, noise: float = 2.2) -> tuple[Tensor, Tensor]:
    """Points around class centres, at least two per class; the noise gives scores like those of a trained model."""
    rng = torch.Generator().manual_seed(seed)
    extra = torch.randint(classes, (items - 2 * classes,), generator=rng)
    labels = torch.cat([torch.arange(classes).repeat(2), extra])[torch.randperm(items, generator=rng)]
    x = torch.randn(classes, dim, generator=rng)[labels]
    x += noise * torch.randn(items, dim, generator=rng)
    return torch.nn.functional.normalize(x, dim=1), labels


def product_seconds(x: Tensor, block: Tensor, parts: list[slice], *, library: str) -> float:
    """The product of these rows with all rows, which every exact evaluation needs."""
    start = time.perf_counter()
    for part in parts:
        out = block[: part.stop - part.start]
        if library == "numpy":
            np.dot(x[part].numpy(), x.numpy().T, out=out.numpy())
        else:
            torch.mm(x[part], x.T, out=out)
    return time.perf_counter() - start


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """A list that holds, after the block, the peak memory in bytes beyond that before."""
    import psutil

    process, stop, seen = psutil.Process(), threading.Event(), [0.0]
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.01):
            seen[0] = max(seen[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def measure_ours(x: Tensor, y: Tensor, rows: int = 512) -> dict[str, object]:
    """Scores, seconds, the seconds of the product alone, and the peak memory."""
    evaluate(x[:256], torch.arange(256) // 2, metrics=METRICS)  # imports
    block = torch.ones(min(rows, len(x)), len(x))  # written, so that its pages are allocated before measuring
    parts = [slice(i, min(i + rows, len(x))) for i in range(0, len(x), rows)]
    halves = parts[::2], parts[1::2]
    product = {library: product_seconds(x, block, halves[0], library=library) for library in ("numpy", "torch")}
    with peak_memory() as peak:
        start = time.perf_counter()
        scores = evaluate(x, y, metrics=METRICS)
        seconds = time.perf_counter() - start
    for library in product:
        product[library] += product_seconds(x, block, halves[1], library=library)
    return {
        "scores": dict(scores),
        "seconds": seconds,
        "product_seconds": product,
        "ratio_to_product": seconds / min(product.values()),
        "extra_memory_mb": peak[0] / 1e6,
    }


def measure_pml(x: Tensor, y: Tensor) -> dict[str, object]:
    """The same for pytorch-metric-learning's AccuracyCalculator."""
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    calculator = AccuracyCalculator(include=tuple(PML), k="max_bin_count", device=torch.device("cpu"))
    with peak_memory() as peak:
        start = time.perf_counter()
        scores = calculator.get_accuracy(x, y)
        seconds = time.perf_counter() - start
    return {
        "scores": {PML[name]: 100 * value for name, value in scores.items()},
        "seconds": seconds,
        "extra_memory_mb": peak[0] / 1e6,
    }


def beside_faiss(shape: Shape, rounds: int) -> dict[str, object]:
    """Median milliseconds of processor time per query of both on one thread, and the median ratio."""
    import faiss

    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)

    x, y = made(shape.items, shape.classes, shape.dim)
    query, gallery = torch.arange(shape.queries), torch.arange(shape.queries if shape.apart else 0, shape.items)
    ours = query if shape.apart else gallery  # items that search each other need half of the products
    protocol = Protocol(ours, gallery)
    nearest = int(y[gallery].bincount().max())
    index = faiss.IndexFlatIP(shape.dim)
    index.add(x[gallery].numpy())
    works = [
        lambda: evaluate_under(protocol, x, y, metrics=("R@1", "P@R", "MAP@R")),
        lambda: index.search(x[query].numpy(), nearest),
    ]
    a, b = alternating(works, rounds=rounds, device=torch.device("cpu"), processors=True)
    return {
        **shape._asdict(),
        "nearest": nearest,
        "ours_ms_per_query": median(a) / len(ours),
        "faiss_ms_per_query": median(b) / len(query),
        "ratio": median(p / q for p, q in zip(a, b, strict=True)) * len(query) / len(ours),
    }


def table_of_shapes(rounds: int) -> list[dict[str, object]]:
    rows = []
    for shape in SHAPES:
        row = beside_faiss(shape, rounds)
        rows.append(row)
        print(
            f"{shape.name}: {shape.queries:,} queries, {shape.items:,} x {shape.dim}, {shape.classes:,} classes: "
            f"{row['ratio']:.2f} times faiss's top {row['nearest']:,} ({row['ours_ms_per_query']:.2f} and "
            f"{row['faiss_ms_per_query']:.2f} ms per query)",
            flush=True,
        )
    return rows


GOAL = 60.0
"""Seconds that a million items may take on an H200."""

MILLION, LARGE_DIM, CLASS_SIZE = 10**6, 128, 20
SIZES = (20_000, 100_000, 300_000)
CHECKED = 100
"""Queries whose values are compared with those of a plain sort."""


def measure_large(items: int, device: torch.device) -> Json:
    """Seconds of `evaluate`, and of what it cannot do without, at this size."""
    x, y = (t.to(device) for t in made(items, items // CLASS_SIZE, LARGE_DIM, noise=1.6))
    evaluate(x[:4096], torch.arange(4096, device=device) // 2)  # imports, and the first use of each kernel
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[dict[str, Tensor]] = []
    seconds = milliseconds(lambda: found.append(evaluate(x, y, per_query=True)), device) / 1e3
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    rows, deepest = 128, int(y.bincount().max())
    block = torch.empty(rows, items, device=device)
    blocks = items / rows

    def product() -> None:
        torch.mm(x[:rows], x.T, out=block)

    def top() -> None:
        block.topk(deepest, dim=1)

    times = 20 if device.type == "cuda" else 1
    alone = {w.__name__: milliseconds(w, device, times=times) / 1e3 * blocks for w in (product, top, product, top)}
    return {
        "items": items,
        "classes": items // CLASS_SIZE,
        "dim": LARGE_DIM,
        "seconds": seconds,
        "goal_seconds": GOAL if items == MILLION and device.type == "cuda" else None,
        "alone_seconds": alone,
        "peak_bytes": peak,
        "scores": {name: float(value.nanmean()) for name, value in found[0].items()},
        "differs_from_sort": difference_from_sort(x, y, found[0]),
    }


def difference_from_sort(x: Tensor, y: Tensor, values: dict[str, Tensor]) -> float:
    """The largest difference of R@1 and P@R of some queries from what a sort of all scores in float64 gives."""
    some = torch.linspace(0, len(x) - 1, CHECKED, device=x.device).long()
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    worst = 0.0
    for query in some.tolist():
        scores = unit @ unit[query]
        scores[query] = -torch.inf
        relevant = y == y[query]
        count = int(relevant.sum()) - 1
        hits = relevant[scores.topk(count).indices].double()
        for name, value in (("R@1", hits[0]), ("P@R", hits.mean())):
            worst = max(worst, abs(float(values[name][query]) - 100 * float(value)))
    return worst


def large_sizes(items: int, device: torch.device, out: Path | None) -> None:
    """Measure sizes up to this one; record also one that fails."""
    rows: list[Json] = []
    for size in sorted({size for size in SIZES if size < items} | {items}):
        try:
            row = measure_large(size, device)
        except RuntimeError as error:
            row = {"items": size, "error": first_line(error)}
        rows.append(row)
        print(row, flush=True)
        if out:
            write_json(out, {"device": str(device), "metrics": DEFAULT_METRICS, "sizes": rows, **source()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, help=f"number of embeddings (default {SOP_ITEMS}; --million: {MILLION})")
    parser.add_argument("--classes", type=int, help="number of classes (default: in proportion to the items)")
    parser.add_argument("--dim", type=int, default=512, help="dimensions (default %(default)s)")
    parser.add_argument("--no-pml", action="store_true", help="without pytorch-metric-learning")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the table of shapes (default %(default)s)")
    parser.add_argument("--shapes", action="store_true", help="the table of shapes instead")
    parser.add_argument("--million", action="store_true", help="growing sizes up to a million items instead")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, of --million")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    if options.million:
        large_sizes(options.items or MILLION, torch.device(options.device), options.out)
        return
    options.items = options.items or SOP_ITEMS
    classes = options.classes or max(2, options.items * SOP_CLASSES // SOP_ITEMS)
    if options.items < 2 * classes:
        parser.error("there must be at least two items a class")

    if options.shapes:
        shapes = table_of_shapes(options.rounds)
        if options.out:
            write_json(options.out, {"shapes": shapes, **source()})
        return
    x, y = made(options.items, classes, options.dim)
    ours = measure_ours(x, y)
    result: dict[str, object] = {
        "items": options.items,
        "classes": classes,
        "dim": options.dim,
        "threads": torch.get_num_threads(),
        "ours": ours,
    }
    print(f"{options.items:,} x {options.dim}, {classes:,} classes, {torch.get_num_threads()} threads")
    print("scores:", ", ".join(f"{name} {value:.2f}" for name, value in ours["scores"].items()))
    product = ", ".join(f"{name} {s:.1f} s" for name, s in ours["product_seconds"].items())
    print(
        f"1. all metrics / bare product: {ours['ratio_to_product']:.2f} ({ours['seconds']:.1f} s; product: {product})"
    )
    if not options.no_pml:
        theirs = result["pml"] = measure_pml(x, y)
        result["times_faster_than_pml"] = theirs["seconds"] / ours["seconds"]
        worst = max(abs(value - ours["scores"][name]) for name, value in theirs["scores"].items())
        print(
            f"2. pytorch-metric-learning / ours: {result['times_faster_than_pml']:.1f} ({theirs['seconds']:.1f} s, "
            f"{theirs['extra_memory_mb']:.0f} MB; its scores differ by {worst:.1e} at most)"
        )
    print(f"3. peak extra memory: {ours['extra_memory_mb']:.0f} MB")
    if options.out:
        write_json(options.out, {**result, **source()})


if __name__ == "__main__":
    main()
