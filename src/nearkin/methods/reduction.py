"""From the losses of samples to one number: reductions, and weights of samples and classes."""

from typing import Literal, get_args

import torch
from torch import Tensor

from nearkin.errors import NearkinError

Reduction = Literal["mean", "mean_nonzero", "sum", "none"]


def check_reduction(reduction: str) -> None:
    """Refuse an unknown name."""
    if reduction not in get_args(Reduction):
        raise NearkinError(f"reduction is one of {', '.join(get_args(Reduction))}, not {reduction!r}.")


def reduce(losses: Tensor, reduction: Reduction, weights: Tensor | None) -> Tensor:
    """Multiply the losses [B] by weights [B] and take their mean, the mean of those not zero, their sum, or nothing."""
    losses = losses if weights is None else weights * losses
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    n = (losses != 0).sum().clamp_min(1) if reduction == "mean_nonzero" else max(len(losses), 1)
    return losses.sum() / n


def sample_weights(y: Tensor, by_sample: Tensor | None, by_class: Tensor | None) -> Tensor | None:
    """The weights [B] of samples with labels y [B], from weights of samples [B], of classes [C], or both."""
    if by_sample is not None and by_sample.shape != y.shape:
        raise NearkinError(f"sample_weights has one number per sample, {list(y.shape)}; got {list(by_sample.shape)}.")
    if by_class is None:
        return by_sample
    if by_class.ndim != 1:
        raise NearkinError(f"class_weights has one number per class; got {list(by_class.shape)}.")
    if not (y.is_cuda or torch.compiler.is_compiling()) and int(y.long().max()) >= len(by_class):
        raise NearkinError(f"class_weights has {len(by_class)} numbers, but a label is {int(y.long().max())}.")
    weights = by_class[y.long()]
    return weights if by_sample is None else by_sample * weights
