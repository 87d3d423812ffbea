"""Time and quality of k-means for NMI and F1, beside faiss's k-means if it is installed.

Synthetic data of the size of Stanford Online Products' test set (60,502 × 512, 11,316 classes). Times are wall
clock, processor seconds, and multiples of one product [items × clusters]; an iteration of k-means needs one.

    python benchmarks/cluster_speed.py                                    # the full size: minutes on 2 cores
    python benchmarks/cluster_speed.py --items 5924 --classes 100         # CUB's
    python benchmarks/cluster_speed.py --no-faiss --out FILE.json
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate_speed import SOP_CLASSES, SOP_ITEMS, made, peak_memory
from numpy.typing import NDArray
from sklearn.metrics import normalized_mutual_info_score
from timing import source

from nearkin.evaluation.clustering import k_means, pairwise_f1, starts_for
from nearkin.files import write_json

Clusters = NDArray[Any]


def product(points: NDArray[Any], clusters: int, rows: int = 512) -> None:
    """The product of all points with one centre per cluster, block by block."""
    for begin in range(0, len(points), rows):
        points[begin : begin + rows] @ points[:clusters].T


def by_faiss(points: NDArray[Any], clusters: int) -> Clusters:
    import faiss

    model = faiss.Kmeans(
        points.shape[1], clusters, niter=25, seed=1, min_points_per_centroid=1, max_points_per_centroid=len(points)
    )
    model.train(points)
    return np.asarray(model.index.search(points, 1)[1][:, 0])


def measure(work: Callable[[], Clusters | None], labels: NDArray[Any]) -> dict[str, float]:
    with peak_memory() as peak:
        clock, processors = time.perf_counter(), time.process_time()
        clusters = work()
        figures = {
            "seconds": time.perf_counter() - clock,
            "processor_seconds": time.process_time() - processors,
        }
    figures["extra_memory_mb"] = peak[0] / 1e6
    if clusters is not None:
        figures["NMI"] = 100 * float(normalized_mutual_info_score(labels, clusters))
        figures["F1"] = 100 * pairwise_f1(labels, clusters)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=SOP_ITEMS, help="number of embeddings (default %(default)s)")
    parser.add_argument("--classes", type=int, help="number of classes (default: in proportion to the items)")
    parser.add_argument("--dim", type=int, default=512, help="dimensions (default %(default)s)")
    parser.add_argument("--no-faiss", action="store_true", help="without faiss")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    classes = options.classes or max(2, options.items * SOP_CLASSES // SOP_ITEMS)

    x, y = made(options.items, classes, options.dim)
    points, labels = x.numpy(), y.numpy()
    works: dict[str, Callable[[], Clusters | None]] = {
        "product": lambda: product(points, classes),
        "ours": lambda: k_means(points, classes, seed=0),
    }
    if not options.no_faiss and importlib.util.find_spec("faiss"):
        works["faiss"] = lambda: by_faiss(points, classes)
    threads, starts = torch.get_num_threads(), starts_for(options.items, classes)
    print(f"{options.items:,} x {options.dim} into {classes:,} clusters, {starts} starts, {threads} threads")
    result: dict[str, Any] = {"items": options.items, "classes": classes, "dim": options.dim}
    result |= {"threads": threads, "starts": starts}
    for name, work in works.items():
        figures = result[name] = measure(work, labels)
        figures["products"] = figures["processor_seconds"] / result["product"]["processor_seconds"]
        print(f"{name}: " + ", ".join(f"{what} {value:.2f}" for what, value in figures.items()), flush=True)
    if options.out:
        write_json(options.out, {**result, **source()})


if __name__ == "__main__":
    main()
