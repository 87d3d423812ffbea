"""How certain a run is of its training classes: `nearkin uncertainty RUN`.

For a method that stores an uncertainty per class (VCPA's σ̄): its correlation with the distance of the class's images
from its proxies, the most and least certain classes, and the closest and farthest pairs of classes.
"""

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
from nearkin.files import Json, atomic_file, read_json, write_json
from nearkin.report.charts import INK, PALETTE, figure_style, panels, save_figure
from nearkin.report.maps import sample_per_class, tsne
from nearkin.report.picture_sheets import Picture, contact_sheet, save_sheet
from nearkin.space import Space
from nearkin.studies.proxies import STAR_COLOUR, open_training
from nearkin.training.checkpoint import KnownClasses, read_classes
from nearkin.training.model import load
from nearkin.training.run_folder import RunFolder

COLUMN = "uncertainty"
"""Key of the uncertainty in a method's `class_values`."""


class ClassPair(NamedTuple):
    """Two classes and the similarity of their proxies."""

    a: int
    b: int
    similarity: float


class ClassUncertainty(NamedTuple):
    """The training classes of a run with their uncertainty."""

    images: Images
    x: Tensor  # [N, D] embeddings of the images, projected to the space
    proxies: Tensor  # [P, D] projected to the space
    proxy_labels: Tensor  # [P]
    uncertainty: Tensor  # [C]
    similarity: Tensor  # [C] median over a class's images of their similarity to its proxies
    closest: list[ClassPair]  # pairs with the most similar proxies, and with the least similar
    farthest: list[ClassPair]

    @property
    def correlation(self) -> float:
        """Pearson correlation of uncertainty and similarity over classes; NaN if either is constant."""
        both = torch.stack([self.uncertainty, self.similarity]).double()
        return float(torch.corrcoef(both)[0, 1])

    @property
    def order(self) -> list[int]:
        """The classes, most certain first."""
        return [int(c) for c in self.uncertainty.argsort(stable=True)]


def median_similarity(x: Tensor, labels: Tensor, proxies: Tensor, proxy_labels: Tensor, space: Space) -> Tensor:
    """Median similarity [C] of a class's points to the nearest of its proxies; NaN for a class without points."""
    classes = int(proxy_labels.max()) + 1
    values = torch.full((classes,), torch.nan)
    for c in range(classes):
        s = space.pairwise(x[labels == c], proxies[proxy_labels == c])
        if len(s):
            values[c] = float(np.median(s.amax(1).numpy()))
    return values


def extreme_pairs(
    proxies: Tensor, proxy_labels: Tensor, space: Space, *, count: int = 3
) -> tuple[list[ClassPair], list[ClassPair]]:
    """The pairs of classes whose mean proxies are closest, and farthest apart."""
    classes = int(proxy_labels.max()) + 1
    sums = torch.zeros(classes, proxies.shape[1]).index_add_(0, proxy_labels, proxies.float())
    means = space.project(sums / torch.bincount(proxy_labels, minlength=classes)[:, None])
    found: list[ClassPair] = []
    for start in range(0, classes, 1024):  # the full C × C matrix may not fit into memory
        s = space.pairwise(means[start : start + 1024], means)
        upper = torch.arange(classes) > torch.arange(start, start + len(s))[:, None]
        for sign in (1, -1):
            top = torch.where(upper, sign * s, -torch.inf).flatten().topk(min(count, s.numel()))
            for value, place in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if value > -torch.inf:
                    found.append(ClassPair(start + place // classes, place % classes, sign * value))
    ordered = sorted(set(found), key=lambda pair: (-pair.similarity, pair.a, pair.b))
    return ordered[:count], ordered[::-1][:count]


def _class_records(run: RunFolder) -> KnownClasses:
    """What a run stored about its classes; an error if there is no uncertainty in it."""
    if parts := run.parts():
        raise NearkinError(f"{run.path} is several models: name one of them, for example {parts[0].path}.")
    run.read_result()  # raises if the run is not finished
    records = read_classes(run.classes)
    if records is None or records.proxies is None or records.labels is None or COLUMN not in records.columns:
        trained = read_json(run.config)["method"]
        if "sample=False" in trained:
            raise NearkinError(
                f"{run.path} was trained by {trained.partition('(')[0]} with sample=False, so its proxies have no "
                "uncertainty: train without that option."
            )
        name = trained.partition("(")[0]
        raise NearkinError(f"{run.path} was trained with {name}, which stores no uncertainty per class: use vcpa.")
    return records


def measure_uncertainty(
    run: str | Path,
    *,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> ClassUncertainty:
    """Embed a run's training images, and compare them with the uncertainty of their classes."""
    reporter = reporter or Reporter()
    records = _class_records(RunFolder(run))
    assert records.proxies is not None
    assert records.labels is not None
    model = load(run, device=device)
    if data:
        model.plan = dataclasses.replace(model.plan, data=data)
    opened = open_training(model, reporter=reporter)
    with reporter.bar("embedding") as progress:
        x = model.embed_store(opened.store, progress=progress)
    space = model.embedder.space
    points, proxies = space.project(x).cpu(), space.project(records.proxies)
    similarity = median_similarity(points, opened.images.labels, proxies, records.labels, space)
    closest, farthest = extreme_pairs(proxies, records.labels, space)
    uncertainty = records.columns[COLUMN].float()
    return ClassUncertainty(opened.images, points, proxies, records.labels, uncertainty, similarity, closest, farthest)


def summary(found: ClassUncertainty) -> Json:
    """The results as JSON."""
    names, order = found.images.names, found.order

    def about(c: int) -> Json:
        return {"class": names[c], "uncertainty": float(found.uncertainty[c]), "similarity": float(found.similarity[c])}

    def about_pair(pair: ClassPair) -> Json:
        return {"classes": [names[pair.a], names[pair.b]], "similarity": pair.similarity}

    return {
        "correlation": found.correlation,
        "classes": len(names),
        "images": len(found.images),
        "most_certain": [about(c) for c in order[:3]],
        "least_certain": [about(c) for c in order[::-1][:3]],
        "closest": [about_pair(pair) for pair in found.closest],
        "farthest": [about_pair(pair) for pair in found.farthest],
    }


def class_rows(found: ClassUncertainty, *, count: int = 3) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table of the most and the least certain classes."""
    count = min(count, len(found.order) // 2)
    counts = torch.bincount(found.images.labels, minlength=len(found.images.names))
    cells = [
        [found.images.names[c], str(int(counts[c])), f"{found.uncertainty[c]:.4f}", f"{found.similarity[c]:.3f}"]
        for c in found.order[:count] + found.order[len(found.order) - count :]
    ]
    return ["class", "images", "uncertainty", "similarity"], cells


def write_table(found: ClassUncertainty, path: Path) -> Path:
    """Write all classes as CSV, most certain first."""
    counts = torch.bincount(found.images.labels, minlength=len(found.images.names))
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
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
) -> tuple[ClassUncertainty, Sequence[Path]]:
    """Write table, summary and pictures of a run's uncertainty into a folder (default: RUN/uncertainty)."""
    reporter = reporter or Reporter()
    where = Path(out) if out else RunFolder(run).path / "uncertainty"
    found = measure_uncertainty(run, data=data, device=device, reporter=reporter)
    reporter.note("Drawing the map")
    written = [
        write_table(found, where / "classes.csv"),
        where / "summary.json",
        class_sheet(found, where / "classes.png"),
        pair_sheet(found, where / "pairs.png"),
        draw_correlation(found, where / "correlation.png"),
        draw_map(found, where / "map.png", points=points),
    ]
    write_json(where / "summary.json", summary(found))
    return found, written


PER_CLASS = 8  # images on a sheet
NAME_LENGTH = 48  # characters of a class name in a picture
CERTAIN, UNCERTAIN = "#d7191c", "#7b3294"  # red and purple, as in the paper
MULTIPLES = (1, 2, 3)  # of σ̄, at which circles are drawn


def truncated_name(found: ClassUncertainty, c: int) -> str:
    """The name of a class, cut if it is long."""
    name = found.images.names[c]
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1].rstrip()}…"


def _examples(found: ClassUncertainty, c: int) -> list[Picture | None]:
    """Images of a class, spread evenly over its rows."""
    rows = (found.images.labels == c).nonzero().flatten()
    chosen = rows[torch.linspace(0, len(rows) - 1, min(PER_CLASS, len(rows))).round().long()].tolist()
    return [found.images.sources[row] for row in chosen] + [None] * (PER_CLASS - len(chosen))


def _sheet(found: ClassUncertainty, classes: list[int], labels: list[str], title: str, path: Path) -> Path:
    pictures = [picture for c in classes for picture in _examples(found, c)]
    sheet = contact_sheet(pictures, row_labels=labels, title=title, columns=PER_CLASS)
    return save_sheet(sheet, path)


def class_sheet(found: ClassUncertainty, path: Path, *, count: int = 3) -> Path:
    """A sheet of the most certain classes above the least certain ones."""
    count = min(count, len(found.order) // 2)
    classes = found.order[:count] + found.order[::-1][:count][::-1]
    labels = [f"{found.images.names[c]} (σ̄={found.uncertainty[c]:.3g})" for c in classes]
    return _sheet(found, classes, labels, f"The {count} most certain classes and the {count} least certain", path)


def pair_sheet(found: ClassUncertainty, path: Path) -> Path:
    """A sheet of the closest pairs of classes above the farthest ones, two rows per pair."""
    classes, labels = [], []
    for kind, pairs in (("closest", found.closest), ("farthest", found.farthest)):
        for pair in pairs:
            classes += [pair.a, pair.b]
            names = found.images.names
            labels += [f"{names[pair.a]} ({kind}, {pair.similarity:.2f})", f"and {names[pair.b]}"]
    return _sheet(found, classes, labels, "Pairs of classes whose proxies are closest, and farthest apart", path)


def draw_correlation(found: ClassUncertainty, path: Path) -> Path:
    """A scatter plot of uncertainty over median similarity of images and proxies, one dot per class."""
    with figure_style():
        figure, grid = panels(1, 1, side=4.2)
        axes = grid[0][0]
        axes.scatter(found.similarity, found.uncertainty, s=14, color=PALETTE[0], linewidths=0, alpha=0.8)
        for c, colour in ((found.order[0], CERTAIN), (found.order[-1], UNCERTAIN)):
            place = float(found.similarity[c]), float(found.uncertainty[c])
            axes.scatter(*place, s=24, color=colour)
            right = place[0] > float(found.similarity.min() + found.similarity.max()) / 2
            shift, side = ((-6, 4), "right") if right else ((6, 4), "left")
            name = truncated_name(found, c)
            axes.annotate(name, place, xytext=shift, ha=side, textcoords="offset points", fontsize=7, color=colour)
        axes.set(xlabel="median similarity of images and proxy", ylabel="uncertainty σ̄")
        axes.margins(0.08)
        title = f"Training classes: Pearson correlation {found.correlation:.2f}"
        axes.set_title(title, fontsize=9, loc="left", color=INK)
    return save_figure(figure, path)


class UncertaintyMap(NamedTuple):
    """Positions of images and proxies of some classes, with a radius per proxy."""

    images: Floats  # [N, 2]
    labels: Tensor  # [N]
    proxies: Floats  # [P, 2]
    proxy_labels: Tensor  # [P]
    radii: Floats  # [P] of the circle at σ̄


def standardise(x: Tensor) -> Tensor:
    """Vectors shifted to mean 0 and scaled to mean squared norm 1."""
    x = x.double() - x.double().mean(0)
    return x / x.square().sum(1).mean().sqrt().clamp_min(1e-12)


def make_map(found: ClassUncertainty, *, points: int) -> UncertaintyMap:
    """t-SNE of images and proxies; radii proportional to σ̄.

    Images and proxies are standardised separately; otherwise their different means would separate the two. σ̄ has no
    length on a t-SNE map, so one factor scales all radii: the radius at the median σ̄ is the median over classes of the
    median distance of a class's images from their centre. It is smaller if the circles at 3σ̄ would then reach more
    than half the way to the next proxy, again in the median: on maps of diffuse or many classes they would cover all.
    """
    rows = sample_per_class(found.images.labels, points=points, classes=max(1, points // 3), seed=0)
    labels = found.images.labels[rows]
    shown = torch.isin(found.proxy_labels, labels)
    positions = tsne(torch.cat([standardise(found.x[rows]), standardise(found.proxies[shown])]).numpy())
    images, proxies, proxy_labels = positions[: len(rows)], positions[len(rows) :], found.proxy_labels[shown]
    classes = torch.unique(labels)
    clusters = [images[labels.numpy() == c] for c in classes.tolist()]
    radii = [np.median(np.linalg.norm(cluster - np.median(cluster, axis=0), axis=1)) for cluster in clusters]
    radius = min(float(np.median(radii)), _half_way(proxies) / max(MULTIPLES))
    factor = radius / float(np.median(found.uncertainty[classes].numpy()))
    return UncertaintyMap(images, labels, proxies, proxy_labels, found.uncertainty[proxy_labels].numpy() * factor)


def _half_way(proxies: Floats) -> float:
    """Half the distance of a proxy from the next one, in the median; infinite for a single proxy."""
    if len(proxies) < 2:
        return float("inf")
    apart = np.linalg.norm(proxies[:, None] - proxies, axis=2)
    np.fill_diagonal(apart, np.inf)
    return float(np.median(apart.min(axis=1))) / 2


def draw_map(found: ClassUncertainty, path: Path, *, points: int = 1500) -> Path:
    """The map with circles at σ̄, 2σ̄ and 3σ̄ about each proxy.

    The most and the least certain class are highlighted, the closest and the farthest pair of classes joined by lines.
    """
    drawn = make_map(found, points=points)
    shown = set(drawn.proxy_labels.tolist())
    order = [c for c in found.order if c in shown]
    with figure_style():
        figure, grid = panels(1, 1, side=7)
        axes = grid[0][0]
        colours = [PALETTE[c % len(PALETTE)] for c in drawn.labels.tolist()]
        axes.scatter(*drawn.images.T, s=5, c=colours, linewidths=0)
        for centre, label, radius in zip(drawn.proxies, drawn.proxy_labels.tolist(), drawn.radii, strict=True):
            _circles(axes, centre, radius, PALETTE[label % len(PALETTE)], 0.6)
        axes.scatter(*drawn.proxies.T, s=12, marker="*", c=STAR_COLOUR, linewidths=0)
        extremes = ((order[0], CERTAIN, "-", "most certain"), (order[-1], UNCERTAIN, "--", "least certain"))
        for c, colour, dashes, word in extremes:
            of_class = drawn.proxy_labels.numpy() == c
            for centre, radius in zip(drawn.proxies[of_class], drawn.radii[of_class], strict=True):
                _circles(axes, centre, radius, colour, 2.0, dashes)
            own = drawn.images[drawn.labels.numpy() == c]
            axes.scatter(*own.T, s=26, facecolors="none", edgecolors=colour, linewidths=1.2)
            label = f"{word}: {truncated_name(found, c)} (its images are ringed)"
            axes.plot([], [], dashes, color=colour, linewidth=2.0, label=label)
        for pairs, dashes, word in ((found.closest, "-", "closest"), (found.farthest, ":", "farthest")):
            _join_pair(axes, found, drawn, pairs, dashes, word)
        low = np.minimum(drawn.images.min(0), (drawn.proxies - 3 * drawn.radii[:, None]).min(0))
        high = np.maximum(drawn.images.max(0), (drawn.proxies + 3 * drawn.radii[:, None]).max(0))
        low, high = low - 0.01 * (high - low), high + 0.01 * (high - low)  # room for the dots at the border
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.axis("off")
        width, height = high - low
        figure.set_figheight(figure.get_figwidth() * min(height / width, 2) + 0.9)  # inches; 0.9: heading and legend
        heading = (
            f"t-SNE of training images (dots) and proxies (stars) of {len(shown)} classes, standardised separately;\n"
            "circles at σ̄, 2σ̄, 3σ̄: compare them with each other, not with distances"
        )
        figure.suptitle(heading, fontsize=8, color=INK)
        figure.legend(loc="outside lower left", fontsize=8, handlelength=4)
    return save_figure(figure, path)


def _join_pair(
    axes: Any, found: ClassUncertainty, drawn: UncertaintyMap, pairs: Sequence[ClassPair], dashes: str, word: str
) -> None:
    """A line between the classes of the first pair that is on the map, from centre to centre of their proxies."""
    labels = drawn.proxy_labels.numpy()
    pair = next((pair for pair in pairs if (labels == pair.a).any() and (labels == pair.b).any()), None)
    if pair is None:
        return
    ends = np.stack([drawn.proxies[labels == c].mean(axis=0) for c in (pair.a, pair.b)])
    names = " and ".join(truncated_name(found, c) for c in (pair.a, pair.b))
    label = f"{word} proxies: {names} ({pair.similarity:.2f})"
    axes.plot(*ends.T, dashes, color=INK, linewidth=1.4, marker="o", markersize=7, markerfacecolor="none", label=label)


def _circles(axes: Any, centre: Floats, radius: float, colour: str, width: float, dashes: str = "-") -> None:
    """Circles at 1, 2 and 3 radii: the inner one tinted, the outer ones thinner."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Circle

    for times in MULTIPLES:
        inner = times == MULTIPLES[0]
        style = {"linewidth": width if inner else width / 2, "linestyle": dashes}
        face = to_rgba(colour, 0.18) if inner else "none"
        axes.add_patch(Circle(tuple(centre), times * radius, facecolor=face, edgecolor=colour, **style))
