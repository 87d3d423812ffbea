"""How classes lie in a space: how small a set of samples covers a class, and how far classes are apart.

As Gürbüz, Can, Alatan (Deep Metric Learning with Chance Constraints, §V-B) measure it: a class of n samples is covered
by k of them with a radius; the mean over k = 1 … n stands for the class, the mean over classes for the embeddings.
"""
# MERGED: The geometry of finished runs: how classes lie before and after training, and how long CCP's sub-problems were.

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.evaluation import evaluate_under, protocol_of
from nearkin.evaluation.scores import checked
from nearkin.files import read_json, whole_file
from nearkin.methods.build import method
from nearkin.methods.proxies import TAKEN, distances, farthest_first
from nearkin.methods.strategies.ccp import CCP, ends
from nearkin.report.charts import PALETTE, STYLE, rendered
from nearkin.space import Space
from nearkin.training.images import Embedded
from nearkin.training.measure_run import embed_test
from nearkin.training.model import load_untrained
from nearkin.training.run_folder import CHOSEN, RunFolder

_AT_ONCE = 2**24  # distances held in memory at a time


class Geometry(NamedTuple):
    """The numbers of a set of embeddings."""

    radius: float  # mean covering radius
    between: float  # mean distance of two samples of different classes


@torch.no_grad()
def geometry(embeddings: Tensor, labels: Tensor, *, space: str = "cosine") -> Geometry:
    """Covering radius and inter-class distance of embeddings [N, D] as points of a space."""
    x, y = checked(embeddings, labels, what="embeddings")
    points = Space(space).project(x)
    return Geometry(float(covering_radii(points, y).mean()), inter_class_distance(points, y))


def covering_radii(points: Tensor, labels: Tensor) -> Tensor:
    """Of each class that is there the mean over k of the radius of the best cover by k of its samples, [classes].

    The best one sample is found by trying all; more are added greedily, at most twice as bad as the best choice.
    """
    return torch.cat([_mean_radii(points[rows], present) for rows, present in _by_class(labels)])


def _by_class(labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [c, n] of some classes at a time, and which of them are there: classes are filled up to the largest's n."""
    _, codes, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    order, first = codes.argsort(stable=True), counts.cumsum(0) - counts
    n = int(counts.max())
    place = torch.arange(n, device=labels.device)
    for part in torch.split(torch.arange(len(counts), device=labels.device), max(1, _AT_ONCE // n**2)):
        present = place < counts[part][:, None]
        yield order[torch.where(present, first[part][:, None] + place, 0)], present


def _mean_radii(points: Tensor, present: Tensor) -> Tensor:
    between = distances(points, points)
    worst = torch.where(present[:, None], between, TAKEN).amax(2)
    radius, best = torch.where(present, worst, torch.inf).min(1)
    reached = between[torch.arange(len(best), device=best.device), best]
    nearest = torch.where(present, reached, TAKEN).scatter(1, best[:, None], TAKEN)
    _, radii = farthest_first(between, nearest, points.shape[1] - 1)
    return (radius + radii.sum(1)) / present.sum(1)  # once all samples are chosen the radius is 0


def inter_class_distance(points: Tensor, labels: Tensor) -> float:
    """The mean distance of two samples of different classes; NaN where there is one class only."""
    total, pairs = 0.0, 0
    for rows in torch.split(torch.arange(len(labels), device=labels.device), max(1, _AT_ONCE // len(labels))):
        other = labels[rows][:, None] != labels
        total += float(torch.where(other, torch.cdist(points[rows], points), 0).sum(dtype=torch.float64))
        pairs += int(other.sum())
    return total / pairs if pairs else float("nan")


def proxy_spread(vectors: Tensor, labels: Tensor) -> float:
    """The mean distance of two proxies of one class; NaN where no class has two."""
    own = (labels[:, None] == labels).fill_diagonal_(False)
    return float(torch.cdist(vectors, vectors)[own].mean())


@keep_images_open()
def geometry_rows(
    runs: Sequence[Path], *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table: each run's test embeddings before training and after."""
    cells = []
    for run in runs:
        for when, model in (("before training", load_untrained(run, device=device)), ("", None)):
            embedded = embed_test(run, data=data, device=device, reporter=reporter, model=model)
            cells.append([f"{run}, {when}" if when else f"{run}{_on_test(run)}", *_numbers(embedded)])
    return ["", "MAP@R", "covering radius", "inter-class distance"], cells


def _on_test(run: Path) -> str:
    select = read_json(RunFolder(run).config)["plan"]["select"]
    return f", {CHOSEN[select]}" if select == "test" else ""


def _numbers(embedded: Embedded) -> list[str]:
    x, images, model = embedded
    space, labels = model.embedder.space, images.labels.to(x.device)
    score = evaluate_under(protocol_of(images), x, labels, metrics=("MAP@R",), space=space)["MAP@R"]
    found = geometry(x, labels, space=space)
    return [f"{score:.2f}", f"{found.radius:.4f}", f"{found.between:.4f}"]


def sub_problems(run: str | Path) -> list[int]:
    """The steps of every sub-problem that ended in a run of CCP, in all its folds; none of another method."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return [length for part in parts for length in sub_problems(part.path)]
    config = read_json(folder.config)
    known = method(config["plan"]["method"], classes=2, dim=2)
    if not isinstance(known, CCP):
        return []
    if known.every:  # by count, so that there need be no scores in the log
        length = known.every * config["resolved"]["check_every"]
        return [length] * (read_json(folder.result)["steps"] // length)
    checks = [event for event in folder.events() if event["event"] == "check"]
    over = ends([check["score"] for check in checks], known.patience)
    steps = [0, *(checks[number - 1]["step"] for number in over)]
    return [after - before for before, after in pairwise(steps)]


def draw_sub_problems(lengths: Sequence[int], out: Path) -> str:
    """Write the histogram of steps per sub-problem, and say it in a sentence."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        plot = figure.subplots()
        plot.hist(lengths, bins=_edges(lengths), color=PALETTE[0], edgecolor="white", linewidth=0.8)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        plot.set_xlabel("steps of a sub-problem")
        plot.set_ylabel("sub-problems")
    with whole_file(out) as temporary:
        temporary.write_bytes(rendered(figure, "png"))
    middle = statistics.median(lengths)
    return f"{len(lengths)} sub-problems of {min(lengths)} to {max(lengths)} steps, the median {middle:g}: {out}"


def _edges(lengths: Sequence[int], most: int = 30) -> list[float]:
    """Edges of bars about the lengths, which are multiples of the steps between checks: none falls on an edge."""
    unit = math.gcd(*lengths)
    width = unit * max(1, math.ceil((max(lengths) - min(lengths) + unit) / (most * unit)))
    bars = (max(lengths) - min(lengths)) // width + 1
    return [min(lengths) - unit / 2 + width * number for number in range(bars + 1)]
