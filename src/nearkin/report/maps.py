"""A map of the test set: t-SNE of its embeddings, with the proxies of the training classes where the run kept them.

The same points give the same map on the same machine. At most `points` images are drawn, as many of each class.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluation.statistics import Floats
from nearkin.report.measured_runs import Study
from nearkin.space import project

POINTS, CLASSES, PROXIES = 1_000, 100, 200  # at most
SIDE = 380  # of the drawing, in its own units


class Map(NamedTuple):
    """Places of images and proxies, 0 … 1 both ways."""

    rows: Tensor  # [P] of the test set
    places: Floats  # [P, 2]
    proxies: Floats  # [M, 2]
    all_proxies: int  # how many there are


def make_map(study: Study, *, points: int = POINTS, seed: int = 0) -> Map:
    """Lay out some of the test images and of the proxies together."""
    rows = some_of_each(study.images.labels, points=points, classes=CLASSES, seed=seed)
    known = study.known
    proxies = torch.empty(0, study.points.shape[1])
    total = 0
    if known is not None and known.proxies is not None and known.labels is not None:
        total = len(known.proxies)
        chosen = torch.linspace(0, total - 1, min(total, PROXIES)).round().long()
        proxies = project(known.proxies[chosen].float(), study.space)
    both = torch.cat([study.points[rows].float(), proxies]).numpy().astype(np.float64)
    places = _spread(layout(both))
    return Map(rows, places[: len(rows)], places[len(rows) :], total)


def some_of_each(labels: Tensor, *, points: int, classes: int, seed: int) -> Tensor:
    """Rows of at most `points` images: of some classes, as many of each as there are or as there is room for."""
    rng = torch.Generator().manual_seed(seed)
    count = int(labels.max()) + 1
    chosen = torch.randperm(count, generator=rng)[: min(classes, points)].sort().values
    each = max(1, points // len(chosen))
    order = torch.randperm(len(labels), generator=rng)
    rows = [order[labels[order] == c][:each] for c in chosen]
    return torch.cat(rows)


def layout(vectors: Floats) -> Floats:
    """t-SNE in two dimensions, from the principal components; too few points lie on those themselves."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if len(vectors) < 5 or not vectors.std():
        wide = np.pad(vectors, ((0, 0), (0, max(0, 2 - vectors.shape[1]))))
        return np.asarray(wide[:, :2])
    if min(vectors.shape) > 50:  # what is beyond hardly moves neighbours, and costs time
        vectors = PCA(50, random_state=0).fit_transform(vectors)
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    init = "pca" if vectors.shape[1] > 1 else "random"
    return np.asarray(TSNE(perplexity=perplexity, init=init, random_state=0, n_jobs=1).fit_transform(vectors))


def _spread(places: Floats) -> Floats:
    low, high = places.min(axis=0), places.max(axis=0)
    reach = float((high - low).max()) or 1.0
    return np.asarray((places - (low + high) / 2) / reach + 0.5, dtype=np.float64)


# The drawing: one path a class, so that a thousand points stay small.

_SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",  # circle
    "m-2.6-2.6h5.2v5.2h-5.2z",  # square
    "m0-3.4l3.2 5.6h-6.4z",  # triangle
    "m0-3.7l3.3 3.7l-3.3 3.7l-3.3-3.7z",  # diamond
)
_STAR = "m-4.5 0h9m-4.5-4.5v9m-3.2-7.7l6.4 6.4m0-6.4l-6.4 6.4"
COLOURS = 7  # of the page's palette


def map_svg(found: Map, labels: Tensor, names: Sequence[str], *, title: str) -> str:
    """The map as SVG whose colours are the page's; every class is a group that can be picked out."""
    from nearkin.report.html import escape

    margin = 10
    scale = SIDE - 2 * margin

    def paths(places: Floats, shape: str) -> Iterator[str]:
        for x, y in places:
            yield f"M{margin + x * scale:.1f} {margin + (1 - y) * scale:.1f}{shape}"

    of = labels[found.rows].numpy()
    groups = []
    for number, c in enumerate(np.unique(of).tolist()):
        shape = _SHAPES[number // COLOURS % len(_SHAPES)]
        drawn = "".join(paths(found.places[of == c], shape))
        groups.append(
            f'<g class="class f{number % COLOURS}" data-class="{c}"><title>{escape(names[c])}</title>'
            f'<path d="{drawn}"/></g>'
        )
    if len(found.proxies):
        stars = "".join(paths(found.proxies, _STAR))
        groups.append(f'<g class="proxies"><title>proxies of training classes</title><path d="{stars}"/></g>')
    return (
        f'<svg class="map" viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{escape(title)}">{"".join(groups)}</svg>'
    )
