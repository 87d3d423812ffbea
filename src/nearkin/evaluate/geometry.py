"""How classes lie in a space: how small a set of samples covers a class, and how far classes are apart.

As Gürbüz, Can, Alatan (Deep Metric Learning with Chance Constraints, §V-B) measure it: a class of n samples is covered
by k of them with a radius; the mean over k = 1 … n stands for the class, the mean over classes for the embeddings.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.covering import TAKEN, distances, farthest_first
from nearkin.evaluate.score import checked
from nearkin.similarity import Space, check_space, project

_AT_ONCE = 2**24  # distances held in memory at a time


class Geometry(NamedTuple):
    """The numbers of a set of embeddings."""

    radius: float  # mean covering radius
    between: float  # mean distance of two samples of different classes


@torch.no_grad()
def geometry(embeddings: Tensor, labels: Tensor, *, space: Space = "cosine") -> Geometry:
    """Covering radius and inter-class distance of embeddings [N, D] as points of a space."""
    x, y = checked(embeddings, labels, what="embeddings")
    points = project(x, check_space(space))
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
