"""What does not fit in a labelled collection, read from the neighbours of each image.

A wrong label is contradicted by the image's neighbours, two classes that are one are each other's neighbours, and an
outlier is far from everything. Neighbours come without the image itself and without its copies, which would only
confirm what it says.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Neighbours(NamedTuple):
    """The nearest images of each image, nearest first."""

    rows: Tensor  # [N, k] int64; −1 where there are fewer than k
    s: Tensor  # [N, k] similarity; any value where the row is −1


class Votes(NamedTuple):
    """How the neighbours of each image vote on its label; shares of all votes, 0 to 1."""

    own: Tensor  # [N] for its own label
    other: Tensor  # [N] for the strongest other label; 0 if there is none
    label: Tensor  # [N] that label; the image's own if there is none


def label_votes(found: Neighbours, labels: Tensor) -> Votes:
    """Vote by similarity: a neighbour counts by how much nearer it is than the last one."""
    there = found.rows >= 0
    near = torch.where(there, labels[found.rows.clamp_min(0)], -1)
    weight = _weights(found)
    totals = ((near[:, :, None] == near[:, None, :]) * weight[:, None, :]).sum(-1)  # [N, k] of each neighbour's label
    own = ((near == labels[:, None]) * weight).sum(-1)
    others = totals.masked_fill((near == labels[:, None]) | ~there, -1)
    best, place = others.max(-1)
    label = torch.where(best > 0, near.gather(1, place[:, None]).squeeze(1), labels)
    return Votes(own, best.clamp_min(0), label)


def _weights(found: Neighbours) -> Tensor:
    """Weights [N, k] that sum to 1, or to 0 for an image without neighbours."""
    there = found.rows >= 0
    s = found.s.masked_fill(~there, torch.inf)
    least = s.amin(-1, keepdim=True).nan_to_num(posinf=0)
    above = torch.where(there, found.s - least, 0)
    weight = torch.where(there, above + 1e-3 + 0.1 * above.amax(-1, keepdim=True), 0)
    return weight / weight.sum(-1, keepdim=True).clamp_min(1e-12)


class ClassPair(NamedTuple):
    """Two classes whose images have each other's images as neighbours."""

    first: int
    second: int
    forth: float  # share of the first's votes that go to the second
    back: float

    @property
    def both_ways(self) -> float:
        """The smaller of the two shares."""
        return min(self.forth, self.back)


def confused_pairs(found: Neighbours, labels: Tensor, *, least: float) -> list[ClassPair]:
    """Pairs of classes with a share of at least `least` both ways, the most confused first."""
    classes = int(labels.max()) + 1
    there = found.rows >= 0
    codes = labels[:, None] * classes + labels[found.rows.clamp_min(0)]
    pairs, place = torch.unique(codes[there], return_inverse=True)
    totals = torch.zeros(len(pairs), dtype=found.s.dtype).index_add_(0, place, _weights(found)[there])
    shares = totals / torch.bincount(labels, minlength=classes)[pairs // classes]
    share = dict(zip(pairs.tolist(), shares.tolist(), strict=True))
    mixed = []
    for code, forth in share.items():
        a, b = divmod(code, classes)
        if a < b:
            mixed.append(ClassPair(a, b, forth, share.get(b * classes + a, 0.0)))
    return sorted((pair for pair in mixed if pair.both_ways >= least), key=lambda pair: -pair.both_ways)


def isolation(found: Neighbours) -> Tensor:
    """How far each image is from its neighbours [N], in robust standard deviations from the median image."""
    there = found.rows >= 0
    mean = torch.where(there, found.s, 0).sum(-1) / there.sum(-1).clamp_min(1)
    middle = mean.median()
    spread = 1.4826 * (mean - middle).abs().median()  # of a normal distribution: its standard deviation
    return torch.where(there.any(-1), (middle - mean) / spread.clamp_min(1e-6), 0)
