"""Equal vectors in a gallery: the rows that repeat an earlier one."""

import torch
from torch import Tensor


def find_copies(points: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that repeat an earlier row, and the row that each repeats."""
    rough = fingerprint(points[:, :4])  # most vectors already differ in their first numbers
    _, number, times = torch.unique(rough, return_inverse=True, return_counts=True)
    suspects = (times[number] > 1).nonzero().flatten()
    keys = torch.cat([fingerprint(points[part]) for part in torch.split(suspects, 4096)])
    sorted_keys, order = keys.sort(stable=True)
    first = torch.searchsorted(sorted_keys, sorted_keys)  # of each run of equal keys
    again = first != torch.arange(len(keys), device=keys.device)
    return suspects[order[again]], suspects[order[first[again]]]


def fingerprint(points: Tensor) -> Tensor:
    """A 64-bit hash of each row's bits [G], from integer sums, so independent of device and order of summation."""
    points = points + 0.0  # -0.0 becomes 0.0
    if points.dtype == torch.float64:
        bits = points.view(torch.int64)
        bits = bits ^ (bits >> 32)  # mix the high half into the low one, as sign extension does for int32
    else:
        bits = points.view(torch.int32).long()
    salt = torch.arange(1, points.shape[1] + 1, device=points.device) * 0x2545F4914F6CDD1D
    mixed = (bits ^ salt) * 0x369DEA0F31A53F85
    return ((mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D).sum(1)
