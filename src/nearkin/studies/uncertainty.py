"""How certain a run is of its training classes: `nearkin uncertainty RUN`.

For a method that keeps an uncertainty of every class (VCPA's σ̄): does it go with how far the class's images lie from
its proxies, which classes are the most and least certain, and which lie closest together and farthest apart.
"""
# MERGED: Pictures of how certain a run is of its classes: sheets of classes and of pairs, and a map with circles.

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.images import Images
from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import Floats
from nearkin.files import Json, read_json, whole_file, write_json
from nearkin.report.charts import INK, PALETTE
from nearkin.report.maps import layout, some_of_each
from nearkin.report.sheets import Picture, contact_sheet
from nearkin.space import Space
from nearkin.studies.proxy_pictures import STAR, open_training, panels, save, styled
from nearkin.training.checkpoint import KnownClasses, read_classes
from nearkin.training.model import load
from nearkin.training.run_folder import RunFolder

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
        mine = space.pairwise(x[labels == c], proxies[owners == c])
        if len(mine):
            values[c] = float(np.median(mine.amax(1).numpy()))
    return values


def pairs(proxies: Tensor, owners: Tensor, space: Space, *, count: int = 3) -> tuple[list[Pair], list[Pair]]:
    """The pairs of classes whose proxies are closest and farthest; of several proxies of a class, by their mean."""
    classes = int(owners.max()) + 1
    sums = torch.zeros(classes, proxies.shape[1]).index_add_(0, owners, proxies.float())
    means = space.project(sums / torch.bincount(owners, minlength=classes)[:, None])
    found: list[Pair] = []
    for start in range(0, classes, 1024):  # C × C numbers would be many
        s = space.pairwise(means[start : start + 1024], means)
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
    part = open_training(model, reporter=reporter)
    with reporter.bar("embedding") as progress:
        x = model.embed_store(part.store, progress=progress)
    space = model.embedder.space
    points, proxies = space.project(x).cpu(), space.project(known.proxies)
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


EACH = 8  # images of a class on a sheet
NAME = 48  # letters of a class's name in a picture
CERTAIN, UNCERTAIN = "#d7191c", "#7b3294"  # red and purple, as in the paper


def short_name(found: Certainty, c: int) -> str:
    """A class's name, cut where it is long."""
    name = found.images.names[c]
    return name if len(name) <= NAME else f"{name[: NAME - 1].rstrip()}…"


def _of_class(found: Certainty, c: int) -> list[Picture | None]:
    """Some images of a class, spread over it."""
    rows = (found.images.labels == c).nonzero().flatten()
    chosen = rows[torch.linspace(0, len(rows) - 1, min(EACH, len(rows))).round().long()].tolist()
    return [found.images.sources[row] for row in chosen] + [None] * (EACH - len(chosen))


def _sheet(found: Certainty, classes: list[int], labels: list[str], title: str, path: Path) -> Path:
    pictures = [picture for c in classes for picture in _of_class(found, c)]
    sheet = contact_sheet(pictures, row_labels=labels, title=title, columns=EACH)
    with whole_file(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def range_sheet(found: Certainty, path: Path, *, count: int = 3) -> Path:
    """The most certain classes above the least certain ones."""
    count = min(count, len(found.order) // 2)
    classes = found.order[:count] + found.order[::-1][:count][::-1]
    labels = [f"{found.images.names[c]} (σ̄={found.uncertainty[c]:.3g})" for c in classes]
    return _sheet(found, classes, labels, f"The {count} most certain classes and the {count} least certain", path)


def pair_sheet(found: Certainty, path: Path) -> Path:
    """The closest pairs of classes above the farthest ones, a pair in two rows."""
    classes, labels = [], []
    for kind, pairs in (("closest", found.closest), ("farthest", found.farthest)):
        for pair in pairs:
            classes += [pair.a, pair.b]
            names = found.images.names
            labels += [f"{names[pair.a]} ({kind}, {pair.similarity:.2f})", f"… and {names[pair.b]}"]
    return _sheet(found, classes, labels, "Pairs of classes whose proxies are closest, and farthest apart", path)


def draw_correlation(found: Certainty, path: Path) -> Path:
    """Uncertainty of every class over the median similarity of its images to its proxies."""
    with styled():
        figure, grid = panels(1, 1, side=4.2)
        axes = grid[0][0]
        axes.scatter(found.similarity, found.uncertainty, s=14, color=PALETTE[0], linewidths=0, alpha=0.8)
        for c, colour in ((found.order[0], CERTAIN), (found.order[-1], UNCERTAIN)):
            place = float(found.similarity[c]), float(found.uncertainty[c])
            axes.scatter(*place, s=24, color=colour)
            right = place[0] > float(found.similarity.min() + found.similarity.max()) / 2
            shift, side = ((-6, 4), "right") if right else ((6, 4), "left")
            name = short_name(found, c)
            axes.annotate(name, place, xytext=shift, ha=side, textcoords="offset points", fontsize=7, color=colour)
        axes.set(xlabel="median similarity of images and proxy", ylabel="uncertainty σ̄")
        axes.margins(0.08)
        title = f"Training classes: Pearson's correlation {found.correlation:.2f}"
        axes.set_title(title, fontsize=9, loc="left", color=INK)
    return save(figure, path)


class Circles(NamedTuple):
    """A map of images and proxies of some classes, with a radius for each proxy."""

    places: Floats  # [N, 2] of images
    labels: Tensor  # [N]
    centres: Floats  # [P, 2] of proxies
    owners: Tensor  # [P]
    radii: Floats  # [P] of the circle at σ̄


def centred(x: Tensor) -> Tensor:
    """A cloud of vectors moved to its mean and scaled to unit spread."""
    x = x.double() - x.double().mean(0)
    return x / x.square().sum(1).mean().sqrt().clamp_min(1e-12)


def make_circles(found: Certainty, *, points: int) -> Circles:
    """t-SNE of images and proxies; radii proportional to σ̄.

    Both clouds are centred and scaled first: what all images have in common, and no proxy, would else part the two.
    σ̄ has no length on such a map, so one factor for all classes gives it one: the circle at the median σ̄ has the
    radius of the median class's cloud, that is, the median distance of its images from their middle.
    """
    rows = some_of_each(found.images.labels, points=points, classes=max(1, points // 3), seed=0)
    labels = found.images.labels[rows]
    shown = torch.isin(found.owners, labels)
    places = layout(torch.cat([centred(found.x[rows]), centred(found.proxies[shown])]).numpy())
    images, centres, owners = places[: len(rows)], places[len(rows) :], found.owners[shown]
    there = torch.unique(labels)
    clouds = [images[labels.numpy() == c] for c in there.tolist()]
    reach = [np.median(np.linalg.norm(cloud - np.median(cloud, axis=0), axis=1)) for cloud in clouds]
    factor = float(np.median(reach)) / float(np.median(found.uncertainty[there].numpy()))
    return Circles(images, labels, centres, owners, found.uncertainty[owners].numpy() * factor)


def draw_map(found: Certainty, path: Path, *, points: int = 1500) -> Path:
    """The map with circles at σ̄, 2σ̄ and 3σ̄ about each proxy; the most and the least certain class stand out."""
    circles = make_circles(found, points=points)
    there = set(circles.owners.tolist())
    order = [c for c in found.order if c in there]
    with styled():
        figure, grid = panels(1, 1, side=7)
        axes = grid[0][0]
        colours = [PALETTE[c % len(PALETTE)] for c in circles.labels.tolist()]
        axes.scatter(*circles.places.T, s=4, c=colours, linewidths=0)
        for centre, owner, radius in zip(circles.centres, circles.owners.tolist(), circles.radii, strict=True):
            _circle(axes, centre, radius, PALETTE[owner % len(PALETTE)], 0.4)
        axes.scatter(*circles.centres.T, s=16, marker="*", c=STAR, linewidths=0)
        for c, colour, word in ((order[0], CERTAIN, "most certain"), (order[-1], UNCERTAIN, "least certain")):
            mine = circles.owners.numpy() == c
            for centre, radius in zip(circles.centres[mine], circles.radii[mine], strict=True):
                _circle(axes, centre, radius, colour, 1.6)
            axes.plot([], [], color=colour, linewidth=1.6, label=f"{word}: {short_name(found, c)}")
        low = np.minimum(circles.places.min(0), (circles.centres - 3 * circles.radii[:, None]).min(0))
        high = np.maximum(circles.places.max(0), (circles.centres + 3 * circles.radii[:, None]).max(0))
        low, high = low - 0.01 * (high - low), high + 0.01 * (high - low)  # room for the dots at the border
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.axis("off")
        across, down = high - low
        figure.set_figheight(figure.get_figwidth() * min(down / across, 2) + 0.9)  # inches; 0.9: heading and legend
        heading = (
            "t-SNE of training images (dots, by class) and proxies (stars), each cloud centred; circles at σ̄, 2σ̄, 3σ̄:\n"
            "radii are proportional to σ̄: at its median, the radius of the median class's cloud of images"
        )
        figure.suptitle(heading, fontsize=8, color=INK)
        figure.legend(loc="outside lower left", fontsize=8)
    return save(figure, path)


def _circle(axes: Any, centre: Floats, radius: float, colour: str, width: float) -> None:
    from matplotlib.patches import Circle

    for times in (1, 2, 3):
        axes.add_patch(Circle(tuple(centre), times * radius, fill=False, edgecolor=colour, linewidth=width))
