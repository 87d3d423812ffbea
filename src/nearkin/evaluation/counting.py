"""How many items of other classes score at least as high as each relevant item, counted in a block of scores."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BEYOND = 2**40
"""Added to the rank of an item below the requested depth: larger than any gallery."""

FEW = 4
"""Up to this many further relevant items, counting for each is cheaper on a CPU than finding the top of the row."""

FOLDS = 64
"""A row is folded into at most this many layers to find a low bound of its top."""

TILE = 64, 4096
"""Rows, at most 255, and columns of a part of the block that stays in a CPU's cache."""


def above_on_gpu(block: Tensor, scores: Tensor, deepest: int) -> Tensor:
    """The number of items in the block that score at least as high as each score, at most `deepest`."""
    top = block.topk(deepest, dim=1).values
    return torch.searchsorted(-top, -scores, right=True)


def above_in_rows(block: Tensor, scores: Tensor, bound: Tensor) -> Tensor:
    """The same on a CPU by NumPy, which counts several times faster than torch; BEYOND below the bound."""
    above = torch.full(scores.shape, BEYOND)
    rows = zip(block.numpy(), scores.numpy(), bound.tolist(), above.numpy(), strict=True)
    for row, wanted, last, result in rows:
        wanted = wanted[wanted > -np.inf][:last]
        for place, score in enumerate(wanted):
            if place == 1 and len(wanted) > 1 + FEW:
                top = _top(row, last)
                result[1 : len(wanted)] = len(top) - np.searchsorted(top, wanted[1:])
                break
            result[place] = np.count_nonzero(row >= score)
            if result[place] + place >= last:  # it is below the bound, and so are the rest
                break
    return above


def _top(row: NDArray[Any], count: int) -> NDArray[Any]:
    """The `count` highest scores of a row in ascending order, and perhaps some more.

    A long row is folded into layers. The count-th highest of the maxima across them is at most that of the row, and
    only what reaches it is sorted. That takes two passes over the row, and a partition many.
    """
    count = min(count, len(row))
    layers = min(FOLDS, len(row) // (8 * count))
    if layers < 2:
        top = np.partition(row, -count)[-count:]
    else:
        width = len(row) // layers
        highest = row[: layers * width].reshape(layers, width).max(axis=0)
        top = row[row >= np.partition(highest, -count)[-count]]
    top.sort()
    return top


def above_in_columns(block: Tensor, scores: Tensor) -> Tensor:
    """The number of rows of the block [B, G] that score at least as high as each score [G, W] of its column.

    Scores of a column end with −inf, of which nothing is counted if all columns near by have it.
    """
    height, width = TILE
    above, hit = np.zeros(scores.shape[::-1], np.int64), np.empty(TILE, bool)
    for left in range(0, len(scores), width):
        columns = slice(left, left + width)
        wanted = np.ascontiguousarray(scores[columns].numpy().T)
        wanted = wanted[(wanted > -np.inf).any(axis=1)]
        for top in range(0, len(block), height):
            tile = block[top : top + height, columns].numpy()
            for score, result in zip(wanted, above[:, columns], strict=False):
                found = np.greater_equal(tile, score, out=hit[: tile.shape[0], : tile.shape[1]])
                result += np.add.reduce(found.view(np.uint8), axis=0, dtype=np.uint8)
    return torch.from_numpy(above.T)
