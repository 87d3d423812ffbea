"""Pictures of how certain a run is of its classes: sheets of classes and of pairs, and a map with circles."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluate.statistics import Floats
from nearkin.report.charts import INK, PALETTE
from nearkin.report.maps import layout, some_of_each
from nearkin.report.proxy_pictures import STAR, panels, save, styled
from nearkin.report.sheets import Picture, contact_sheet
from nearkin.runs import whole_file
from nearkin.uncertainty import Certainty

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
