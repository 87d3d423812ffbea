"""How certain a run is of its training classes: `nearkin uncertainty RUN`.

For a method that keeps an uncertainty of every class (VCPA's σ̄): does it go with how far the class's images lie from
its proxies, which classes are the most and least certain, and which lie closest together and farthest apart.
"""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.classes import KnownClasses, read_classes
from nearkin.data.images import Images
from nearkin.data.shared import Opener
from nearkin.data.stores import open_store
from nearkin.errors import NearkinError
from nearkin.model import load
from nearkin.report.progress import Reporter
from nearkin.report.proxy_pictures import open_training
from nearkin.runs import Json, RunFolder, read_json, whole_file, write_json
from nearkin.similarity import Space, pairwise, project

COLUMN = "uncertainty"
"""What a method calls it among its `class_values`."""


class Pair(NamedTuple):
    """Two classes and the similarity of their proxies."""

    a: int
    b: int
    similarity: float


class Certainty(NamedTuple):
    """The training classes of a run with how certain it is of them."""

    images: Images
    x: Tensor  # [N, D] embeddings of the images, points of the space
    proxies: Tensor  # [P, D] points of the space
    owners: Tensor  # [P] class of a proxy
    uncertainty: Tensor  # [C]
    similarity: Tensor  # [C] median over a class's images of their similarity to its proxies
    closest: list[Pair]  # classes whose proxies are most alike, and the others
    farthest: list[Pair]

    @property
    def correlation(self) -> float:
        """Pearson's, of uncertainty and similarity over classes; NaN where either is the same for all."""
        both = torch.stack([self.uncertainty, self.similarity]).double()
        return float(torch.corrcoef(both)[0, 1])

    @property
    def order(self) -> list[int]:
        """The classes, the most certain first."""
        return [int(c) for c in self.uncertainty.argsort(stable=True)]


def median_similarity(x: Tensor, labels: Tensor, proxies: Tensor, owners: Tensor, space: Space) -> Tensor:
    """Median [C] over a class's points of their similarity to its nearest own proxy; NaN for a class without points."""
    classes = int(owners.max()) + 1
    values = torch.full((classes,), torch.nan)
    for c in range(classes):
        mine = pairwise(x[labels == c], proxies[owners == c], space)
        if len(mine):
            values[c] = float(np.median(mine.amax(1).numpy()))
    return values


def pairs(proxies: Tensor, owners: Tensor, space: Space, *, count: int = 3) -> tuple[list[Pair], list[Pair]]:
    """The pairs of classes whose proxies are closest and farthest; of several proxies of a class, by their mean."""
    classes = int(owners.max()) + 1
    sums = torch.zeros(classes, proxies.shape[1]).index_add_(0, owners, proxies.float())
    means = project(sums / torch.bincount(owners, minlength=classes)[:, None], space)
    found: list[Pair] = []
    for start in range(0, classes, 1024):  # C × C numbers would be many
        s = pairwise(means[start : start + 1024], means, space)
        upper = torch.arange(classes) > torch.arange(start, start + len(s))[:, None]
        for sign in (1, -1):
            top = torch.where(upper, sign * s, -torch.inf).flatten().topk(min(count, s.numel()))
            for value, place in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if value > -torch.inf:
                    found.append(Pair(start + place // classes, place % classes, sign * value))
    ordered = sorted(set(found), key=lambda pair: (-pair.similarity, pair.a, pair.b))
    return ordered[:count], ordered[::-1][:count]


def known_classes(run: RunFolder) -> KnownClasses:
    """What a run keeps of its classes, if an uncertainty is part of it."""
    if parts := run.parts():
        raise NearkinError(f"{run.path} is several models: look at one of them, as in {parts[0].path}.")
    read_json(run.result)  # says so where there is no finished run
    known = read_classes(run.classes)
    if known is None or known.proxies is None or known.labels is None or COLUMN not in known.columns:
        method = read_json(run.config)["method"].partition("(")[0]
        raise NearkinError(f"{run.path} was trained with {method}, which keeps no uncertainty of classes: use vcpa.")
    return known


def certainty_of(
    run: str | Path,
    *,
    data: str | None = None,
    device: str = "auto",
    opener: Opener = open_store,
    reporter: Reporter | None = None,
) -> Certainty:
    """Embed a run's training images, and put what its method knew of their classes beside them."""
    reporter = reporter or Reporter()
    known = known_classes(RunFolder(run))
    assert known.proxies is not None
    assert known.labels is not None
    model = load(run, device=device)
    if data:
        model.plan = dataclasses.replace(model.plan, data=data)
    part = open_training(model, opener=opener, reporter=reporter)
    with reporter.bar("embedding") as progress:
        x = model.embed_store(part.store, progress=progress)
    space = model.embedder.space
    points, proxies = project(x, space).cpu(), project(known.proxies, space)
    similarity = median_similarity(points, part.images.labels, proxies, known.labels, space)
    closest, farthest = pairs(proxies, known.labels, space)
    uncertainty = known.columns[COLUMN].float()
    return Certainty(part.images, points, proxies, known.labels, uncertainty, similarity, closest, farthest)


def summary(found: Certainty) -> Json:
    """The findings in numbers and names."""
    names, order = found.images.names, found.order

    def of(c: int) -> Json:
        return {"class": names[c], "uncertainty": float(found.uncertainty[c]), "similarity": float(found.similarity[c])}

    def of_pair(pair: Pair) -> Json:
        return {"classes": [names[pair.a], names[pair.b]], "similarity": pair.similarity}

    return {
        "correlation": found.correlation,
        "classes": len(names),
        "images": len(found.images),
        "most_certain": [of(c) for c in order[:3]],
        "least_certain": [of(c) for c in order[::-1][:3]],
        "closest": [of_pair(pair) for pair in found.closest],
        "farthest": [of_pair(pair) for pair in found.farthest],
    }


def class_rows(found: Certainty, *, count: int = 3) -> tuple[list[str], list[list[str]]]:
    """The most and the least certain classes as a table: header and cells."""
    count = min(count, len(found.order) // 2)
    counts = torch.bincount(found.images.labels, minlength=len(found.images.names))
    cells = [
        [found.images.names[c], str(int(counts[c])), f"{found.uncertainty[c]:.4f}", f"{found.similarity[c]:.3f}"]
        for c in found.order[:count] + found.order[len(found.order) - count :]
    ]
    return ["class", "images", "uncertainty", "similarity"], cells


def write_table(found: Certainty, path: Path) -> Path:
    """All classes as CSV, the most certain first."""
    counts = torch.bincount(found.images.labels, minlength=len(found.images.names))
    with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["class", "images", "uncertainty", "median_similarity"])
        for c in found.order:
            values = (f"{float(found.uncertainty[c]):.6f}", f"{float(found.similarity[c]):.6f}")
            rows.writerow([found.images.names[c], int(counts[c]), *values])
    return path


def write_uncertainty(
    run: str | Path,
    *,
    out: str | Path | None = None,
    points: int = 1500,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> tuple[Certainty, Sequence[Path]]:
    """Write table, summary and pictures of a run's uncertainty into a folder (default: the run's own)."""
    from nearkin.report.uncertainty import draw_correlation, draw_map, pair_sheet, range_sheet

    reporter = reporter or Reporter()
    where = Path(out) if out else RunFolder(run).path / "uncertainty"
    found = certainty_of(run, data=data, device=device, reporter=reporter)
    reporter.note("Drawing the map")
    written = [
        write_table(found, where / "classes.csv"),
        where / "summary.json",
        range_sheet(found, where / "classes.png"),
        pair_sheet(found, where / "pairs.png"),
        draw_correlation(found, where / "correlation.png"),
        draw_map(found, where / "map.png", points=points),
    ]
    write_json(where / "summary.json", summary(found))
    return found, written
