"""t-SNE maps: the layout of points in the plane, and the map of a test set with the proxies of the training classes.

The same points give the same map on the same machine.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluation.statistics import Floats
from nearkin.report.html import escape
from nearkin.report.measured_runs import MeasuredRun

POINTS, CLASSES, PROXIES = 1_000, 100, 200  # at most
SIDE, MARGIN = 380, 10  # of the drawing, in SVG units


def tsne(vectors: Floats) -> Floats:
    """t-SNE positions [N, 2], started from the principal components; fewer than 5 vectors keep two coordinates."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if len(vectors) < 5 or not vectors.std():
        wide = np.pad(vectors, ((0, 0), (0, max(0, 2 - vectors.shape[1]))))
        return np.asarray(wide[:, :2])
    if min(vectors.shape) > 50:  # further components cost time and hardly change the neighbours
        vectors = PCA(50, random_state=0).fit_transform(vectors)
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    init = "pca" if vectors.shape[1] > 1 else "random"
    return np.asarray(TSNE(perplexity=perplexity, init=init, random_state=0, n_jobs=1).fit_transform(vectors))


def sample_per_class(labels: Tensor, *, points: int, classes: int, seed: int) -> Tensor:
    """Rows of at most `points` images: an equal number from each of at most `classes` random classes."""
    rng = torch.Generator().manual_seed(seed)
    count = int(labels.max()) + 1
    chosen = torch.randperm(count, generator=rng)[: min(classes, points)].sort().values
    each = max(1, points // len(chosen))
    order = torch.randperm(len(labels), generator=rng)
    return torch.cat([order[labels[order] == c][:each] for c in chosen])


class Map(NamedTuple):
    """Positions of images and proxies; coordinates from 0 to 1."""

    rows: Tensor  # [P] of the test set
    positions: Floats  # [P, 2]
    proxies: Floats  # [M, 2]
    proxy_count: int  # of the run; at most PROXIES are drawn


def make_map(run: MeasuredRun, *, points: int = POINTS, seed: int = 0) -> Map:
    """Lay out a sample of the test images together with a sample of the proxies."""
    rows = sample_per_class(run.images.labels, points=points, classes=CLASSES, seed=seed)
    records = run.class_records
    proxies = torch.empty(0, run.points.shape[1])
    total = 0
    if records is not None and records.proxies is not None and records.labels is not None:
        total = len(records.proxies)
        chosen = torch.linspace(0, total - 1, min(total, PROXIES)).round().long()
        proxies = run.space.project(records.proxies[chosen].float())
    both = torch.cat([run.points[rows].float(), proxies]).numpy().astype(np.float64)
    positions = _fit_unit_square(tsne(both))
    return Map(rows, positions[: len(rows)], positions[len(rows) :], total)


def _fit_unit_square(positions: Floats) -> Floats:
    low, high = positions.min(axis=0), positions.max(axis=0)
    extent = float((high - low).max()) or 1.0
    return np.asarray((positions - (low + high) / 2) / extent + 0.5, dtype=np.float64)


# The drawing has one path per class, so that the SVG of a thousand points stays small.

_SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",  # circle
    "m-2.6-2.6h5.2v5.2h-5.2z",  # square
    "m0-3.4l3.2 5.6h-6.4z",  # triangle
    "m0-3.7l3.3 3.7l-3.3 3.7l-3.3-3.7z",  # diamond
)
_STAR = "m-4.5 0h9m-4.5-4.5v9m-3.2-7.7l6.4 6.4m0-6.4l-6.4 6.4"
COLOURS = 7  # of the page's palette


def map_svg(found: Map, labels: Tensor, names: Sequence[str], *, title: str) -> str:
    """The map as SVG in the colours of the page; each class is a group that the page can highlight."""
    row_labels = labels[found.rows].numpy()
    groups = []
    for number, c in enumerate(np.unique(row_labels).tolist()):
        shape = _SHAPES[number // COLOURS % len(_SHAPES)]
        drawn = "".join(_paths(found.positions[row_labels == c], shape))
        groups.append(
            f'<g class="class f{number % COLOURS}" data-class="{c}"><title>{escape(names[c])}</title>'
            f'<path d="{drawn}"/></g>'
        )
    if len(found.proxies):
        stars = "".join(_paths(found.proxies, _STAR))
        groups.append(f'<g class="proxies"><title>proxies of training classes</title><path d="{stars}"/></g>')
    return (
        f'<svg class="map" viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{escape(title)}">{"".join(groups)}</svg>'
    )


def _paths(positions: Floats, shape: str) -> Iterator[str]:
    scale = SIDE - 2 * MARGIN
    for x, y in positions:
        yield f"M{MARGIN + x * scale:.1f} {MARGIN + (1 - y) * scale:.1f}{shape}"
