"""The oracle: every definition as a loop over one sorted list, in float64."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

METRICS = ("R@1", "R@3", "P@1", "P@5", "P@R", "MAP@R", "MAP@1", "MAP@7", "nDCG@1", "nDCG@4", "nDCG@100", "R@1000")
OF_ALL = ("MAP", "MRR", "MRR@1", "MRR@4", "MRR@1000")


def similarity(a: np.ndarray, b: np.ndarray, space: str) -> float:
    if space == "inner":
        return float(np.dot(a, b))
    if space == "euclidean":
        return -float(((a - b) ** 2).sum())
    if space == "cosine":
        return float(np.dot(a / np.linalg.norm(a), b / np.linalg.norm(b)))
    a, b = a / max(1.0, float(np.linalg.norm(a))), b / max(1.0, float(np.linalg.norm(b)))
    return float(np.dot(a, b)) if space == "ball_inner" else -float(np.linalg.norm(a - b))


def shares(a: Any, b: Any) -> bool:
    """Whether two items are relevant to each other: one class, or for sets of labels a label in both."""
    return any(label in b for label in a) if isinstance(a, set) else a == b


def hits(x: Tensor, y: Any, v: Tensor, z: Any, own: list[int], space: str) -> list[list[bool]]:
    """Per query: is the nearest relevant, the second nearest, …; among equals the relevant ones come last."""
    y, z = (labels.tolist() if isinstance(labels, Tensor) else labels for labels in (y, z))
    found = []
    for i in range(len(x)):
        ranking = []
        for j in range(len(v)):
            if j != own[i]:
                s = similarity(x[i].double().numpy(), v[j].double().numpy(), space)
                ranking.append((-s, shares(y[i], z[j])))
        found.append([relevant for _, relevant in sorted(ranking)])
    return found


def metric(name: str, hit: list[bool]) -> float:
    """Percent, from the list of one query; NaN if nothing in it is relevant."""
    total = sum(hit)
    if not total:
        return math.nan
    family, _, length = name.partition("@")
    k = {"R": total, "": len(hit)}.get(length) or int(length)
    first = hit[:k]
    if family == "R":
        return 100.0 * any(first)
    if family == "P":
        return 100.0 * sum(first) / k
    if family == "MRR":
        return next((100.0 / (i + 1) for i in range(len(first)) if hit[i]), 0.0)
    if name == "MAP":
        return 100.0 * sum(sum(hit[: i + 1]) / (i + 1) for i in range(len(hit)) if hit[i]) / total
    if family == "MAP":
        return 100.0 * sum(sum(hit[: i + 1]) / (i + 1) for i in range(len(first)) if hit[i]) / k
    gain = sum(1 / math.log2(i + 2) for i in range(len(first)) if hit[i])
    return 100.0 * gain / sum(1 / math.log2(i + 2) for i in range(min(total, k)))


def per_query(
    x: Tensor, y: Any, v: Tensor, z: Any, own: list[int], space: str, metrics: tuple[str, ...] = METRICS
) -> dict[str, Tensor]:
    found = hits(x, y, v, z, own, space)
    return {name: torch.tensor([metric(name, hit) for hit in found], dtype=torch.float64) for name in metrics}


def class_average(values: list[float], labels: list[Any]) -> float:
    """The mean over classes of the mean of a class's queries; NaN does not count; a query may be of several classes."""
    of_class: dict[Any, list[float]] = {}
    for value, label in zip(values, labels, strict=True):
        for c in label if isinstance(label, set) else {label}:
            if not math.isnan(value):
                of_class.setdefault(c, []).append(value)
    return sum(sum(v) / len(v) for v in of_class.values()) / len(of_class)
