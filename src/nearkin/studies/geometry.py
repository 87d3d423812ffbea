"""How classes lie in a space, as CCP's paper measures it, and how long the sub-problems of a run were.

Gürbüz, Can, Alatan (Deep Metric Learning with Chance Constraints, §V-B): k samples of a class cover its n samples with
a radius; the mean over k = 1 … n is the covering radius of the class, the mean over classes that of the embeddings.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.evaluation import evaluate_under, protocol_of
from nearkin.evaluation.scores import checked
from nearkin.files import read_json
from nearkin.methods.catalogue import method
from nearkin.methods.proxies import TAKEN, distances, farthest_first
from nearkin.methods.strategies.ccp import CCP, sub_problem_ends
from nearkin.report.charts import INK, PALETTE, figure_style, new_figure, panels, save_figure
from nearkin.report.maps import sample_per_class, tsne
from nearkin.space import Space
from nearkin.training.checkpoint import kept_epochs, open_snapshot
from nearkin.training.images import Embedded
from nearkin.training.measure_run import embed_test
from nearkin.training.model import load_untrained
from nearkin.training.run_folder import CHOSEN, RunFolder

_BLOCK = 2**24  # distances held in memory at a time
COLUMNS = 4  # maps side by side
POINTS = 1000  # test images on a map, at most


class Geometry(NamedTuple):
    """Measures of a set of embeddings."""

    radius: float  # mean covering radius
    inter_class: float  # mean distance of two samples of different classes


@torch.no_grad()
def geometry(embeddings: Tensor, labels: Tensor, *, space: str = "cosine") -> Geometry:
    """Covering radius and inter-class distance of embeddings [N, D], projected to a space."""
    x, y = checked(embeddings, labels, what="embeddings")
    points = Space(space).project(x)
    return Geometry(float(covering_radii(points, y).mean()), inter_class_distance(points, y))


def covering_radii(points: Tensor, labels: Tensor) -> Tensor:
    """Mean over k of the radius of a cover by k samples, for each class that has samples [classes].

    The first sample is the best one; more are added greedily, which at most doubles the optimal radius.
    """
    return torch.cat([_mean_radii(points[rows], present) for rows, present in _by_class(labels)])


def _by_class(labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of classes: rows [c, n], padded to the size of the largest class, and which of them are not padding."""
    _, codes, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    order, first = codes.argsort(stable=True), counts.cumsum(0) - counts
    n = int(counts.max())
    place = torch.arange(n, device=labels.device)
    for block in torch.split(torch.arange(len(counts), device=labels.device), max(1, _BLOCK // n**2)):
        present = place < counts[block][:, None]
        yield order[torch.where(present, first[block][:, None] + place, 0)], present


def _mean_radii(points: Tensor, present: Tensor) -> Tensor:
    between = distances(points, points)
    worst = torch.where(present[:, None], between, TAKEN).amax(2)
    radius, best = torch.where(present, worst, torch.inf).min(1)
    reached = between[torch.arange(len(best), device=best.device), best]
    nearest = torch.where(present, reached, TAKEN).scatter(1, best[:, None], TAKEN)
    _, radii = farthest_first(between, nearest, points.shape[1] - 1)
    return (radius + radii.sum(1)) / present.sum(1)  # the radius is 0 once all samples are chosen


def inter_class_distance(points: Tensor, labels: Tensor) -> float:
    """Mean distance of two samples of different classes; NaN if there is only one class."""
    total, pairs = 0.0, 0
    for rows in torch.split(torch.arange(len(labels), device=labels.device), max(1, _BLOCK // len(labels))):
        other = labels[rows][:, None] != labels
        total += float(torch.where(other, torch.cdist(points[rows], points), 0).sum(dtype=torch.float64))
        pairs += int(other.sum())
    return total / pairs if pairs else float("nan")


def proxy_spread(vectors: Tensor, labels: Tensor) -> float:
    """Mean distance of two proxies of the same class; NaN if no class has two."""
    same = (labels[:, None] == labels).fill_diagonal_(False)
    return float(torch.cdist(vectors, vectors)[same].mean())


@keep_images_open()
def geometry_rows(
    runs: Sequence[Path], *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table: each run's test embeddings before and after training."""
    cells = []
    for run in runs:
        for when, model in (("before training", load_untrained(run, device=device)), ("", None)):
            embedded = embed_test(run, data=data, device=device, reporter=reporter, model=model)
            cells.append([f"{run}, {when}" if when else f"{run}{_selection_note(run)}", *_measures(embedded)])
    return ["", "MAP@R", "covering radius", "inter-class distance"], cells


def _selection_note(run: Path) -> str:
    select = read_json(RunFolder(run).config)["plan"]["select"]
    return f", {CHOSEN[select]}" if select == "test" else ""


def _measures(embedded: Embedded) -> list[str]:
    x, images, model = embedded
    space, labels = model.embedder.space, images.labels.to(x.device)
    score = evaluate_under(protocol_of(images), x, labels, metrics=("MAP@R",), space=space)["MAP@R"]
    found = geometry(x, labels, space=space)
    return [f"{score:.2f}", f"{found.radius:.4f}", f"{found.inter_class:.4f}"]


@keep_images_open()
def draw_geometry(
    run: str | Path, out: Path, *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> Path | None:
    """Draw maps of test images at each saved epoch, with their measures; None for a run with fewer than two."""
    folder = RunFolder(run)
    epochs = [] if folder.parts() else list(kept_epochs(folder))
    if len(epochs) < 2:
        return None
    ends = list(itertools.accumulate(sub_problems(run) or ()))
    per_epoch = read_json(folder.config)["resolved"]["steps_per_epoch"]
    with figure_style():
        figure, grid = panels(-(-len(epochs) // COLUMNS), min(COLUMNS, len(epochs)), side=2.9)
        figure.suptitle("t-SNE of images of test classes, coloured by class", fontsize=9, color=INK)
        for axes in grid.flat:
            axes.axis("off")
        for axes, epoch in zip(grid.flat, epochs, strict=False):
            model = open_snapshot(folder, epoch, data=data, device=device).model
            embedded = embed_test(run, data=data, device=device, reporter=reporter, model=model)
            _draw_points(axes, embedded)
            ended = sum(end <= epoch * per_epoch for end in ends)
            of_ccp = f", {ended} sub-problem{'s' * (ended != 1)} ended" if ends else ""
            score, radius, apart = _measures(embedded)
            words = f"MAP@R {score}, radius {radius}, inter-class {apart}"
            axes.set_title(f"epoch {epoch}{of_ccp}\n{words}", fontsize=7)
    return save_figure(figure, out)


def _draw_points(axes: Any, embedded: Embedded) -> None:
    labels = embedded.images.labels
    rows = sample_per_class(labels, points=POINTS, classes=len(embedded.images.names), seed=0)
    points = embedded.model.embedder.space.project(embedded.x)[rows.to(embedded.x.device)]
    colours = [PALETTE[c % len(PALETTE)] for c in labels[rows].tolist()]
    axes.scatter(*tsne(points.double().cpu().numpy()).T, s=4, c=colours, linewidths=0)


def sub_problems(run: str | Path) -> list[int] | None:
    """Steps of each finished sub-problem of a CCP run, over all folds; None for another method."""
    folder = RunFolder(run)
    if folds := folder.parts():
        found = [sub_problems(fold.path) for fold in folds]
        return None if None in found else [length for lengths in found for length in lengths or ()]
    config = read_json(folder.config)
    trained = method(config["plan"]["method"], classes=2, dim=2)
    if not isinstance(trained, CCP):
        return None
    if trained.every:  # fixed length: the log may have no scores
        length = trained.every * config["resolved"]["check_every"]
        return [length] * (folder.read_result()["steps"] // length)
    checks = [event for event in folder.events() if event["event"] == "check"]
    over = sub_problem_ends([check["score"] for check in checks], trained.patience)
    steps = [0, *(checks[number - 1]["step"] for number in over)]
    return [after - before for before, after in itertools.pairwise(steps)]


def draw_sub_problems(lengths: Sequence[int], out: Path) -> str:
    """Write the histogram of steps per sub-problem; return a sentence about it."""
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        figure = new_figure(4.4, 2.9)
        plot = figure.subplots()
        plot.hist(lengths, bins=_edges(lengths), color=PALETTE[0], edgecolor="white", linewidth=0.8)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        plot.set_xlabel("steps per sub-problem")
        plot.set_ylabel("sub-problems")
    save_figure(figure, out)
    median = statistics.median(lengths)
    return f"{len(lengths)} sub-problems of {min(lengths)} to {max(lengths)} steps, median {median:g}: {out}"


def _edges(lengths: Sequence[int], most: int = 30) -> list[float]:
    """Bin edges such that no length, a multiple of the steps between checks, falls on an edge."""
    unit = math.gcd(*lengths)
    width = unit * max(1, math.ceil((max(lengths) - min(lengths) + unit) / (most * unit)))
    bars = (max(lengths) - min(lengths)) // width + 1
    return [min(lengths) - unit / 2 + width * number for number in range(bars + 1)]
