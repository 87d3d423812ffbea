"""Greedy k-center: points that cover a set well, for many sets at once and without a loop over them.

A set's covering radius is how far its worst point lies from the nearest chosen one. Choosing the farthest point again
and again is at most twice as bad as the best choice.
"""

import torch
from torch import Tensor

TAKEN = -1.0
"""The distance of a point that is chosen, or is no point at all: below every distance, so never the farthest."""


def distances(u: Tensor, v: Tensor) -> Tensor:
    """Euclidean distances [C, n, m] of points [C, n, D] and [C, m, D]; by differences, so equal points are at 0."""
    return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist")


def farthest_first(between: Tensor, nearest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose `count` points of each set, always the farthest from all that is chosen; of equals the first.

    `between` [C, n, n] are distances within each set, `nearest` [C, n] those to what is chosen already: infinite where
    nothing is, TAKEN where there is no point. Gives the choice [C, count] and the radius after each [C, count].
    """
    picks = nearest.new_empty(len(nearest), count, dtype=torch.int64)
    radii = nearest.new_empty(len(nearest), count)
    for number in range(count):
        q = nearest.argmax(1, keepdim=True)  # [C, 1]
        reached = between.gather(1, q[:, :, None].expand(-1, 1, between.shape[2])).squeeze(1)
        nearest = torch.minimum(nearest, reached).scatter(1, q, TAKEN)
        picks[:, number] = q.squeeze(1)
        radii[:, number] = nearest.amax(1).clamp_min(0)
    return picks, radii


def k_center(points: Tensor, seeds: Tensor, count: int) -> Tensor:
    """Numbers [C, count] of the points [C, n, D] that, added one by one to the seeds [C, S, D], reduce the radius most.

    No point is chosen twice; `count` is at most n.
    """
    nearest = distances(points, seeds).amin(2)
    return farthest_first(distances(points, points), nearest, count)[0]
