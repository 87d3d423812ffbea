"""Batch norm over the images of all ranks, on CPU and GPU alike (`nn.SyncBatchNorm` refuses CPU tensors)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nearkin import ranks


@contextmanager
def own_pass(model: nn.Module, device: torch.device, *seeds: int) -> Iterator[None]:
    """The context of a pass of a network over this rank's rows of a batch; on one rank it changes nothing.

    Batch norms that train take the statistics of the whole batch. Random draws, such as dropout, are of a stream that
    the seeds and the rank choose.
    """
    if ranks.size() == 1:
        yield
        return
    trains = any(norm.training for norm in batch_norms(model))
    with RankBatchNorm() if trains else nullcontext(), ranks.own_draws(device, *seeds):
        yield


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms of a model, including timm's variants."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


class RankBatchNorm(TorchFunctionMode):
    """A context in which batch norms in train mode take their statistics over all ranks, whatever their class."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def batch_norm(
    input: Tensor,  # noqa: A002 (the names of F.batch_norm)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` of the rows of all ranks; each has the result of its own."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    n, mean, var = statistics(input.detach())
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * n / (n - 1).clamp_min(1)).to(running_var.dtype), momentum)
    out: Tensor = _BatchNorm.apply(input, weight, bias, n, mean, var, eps)  # type: ignore[no-untyped-call]
    return out


def _sums(t: Tensor) -> Tensor:
    return t.flatten(2).sum((0, 2)) if t.ndim > 2 else t.sum(0)


def _precise(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of values per channel, mean and variance [C] of [B, C, …] over all ranks."""
    x = _precise(x)
    n = x.numel() // x.shape[1]
    mean = _sums(x) / n
    spread = _sums((x - _channels(mean, x)).square())  # around the own mean, then moved: sums of squares would cancel
    parts = ranks.gather(torch.stack([torch.full_like(mean, n), mean, spread])[None])  # [W, 3, C]
    counts, means, spreads = parts.unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    return total, mean, (spreads + counts * (means - mean).square()).sum(0) / total


def _channels(t: Tensor, like: Tensor) -> Tensor:
    return t.view(1, -1, *[1] * (like.ndim - 2))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        n: Tensor,  # noqa: ARG004
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        x, weight, bias, n, mean, var, eps = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, n, mean, (var + eps).rsqrt())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, n, mean, inverse = ctx.saved_tensors
        g, centred = _precise(gradient), _precise(x) - _channels(mean, x)
        by_bias, by_product = _sums(g), _sums(g * centred)
        by_weight = by_product * inverse
        whole = ranks.total(torch.stack([by_bias, by_product])) / n
        scale = inverse if weight is None else inverse * weight
        slope = whole[1] * inverse.square()
        dx = (g - _channels(whole[0], x) - centred * _channels(slope, x)) * _channels(scale, x)
        return dx.to(x.dtype), None if weight is None else by_weight, by_bias if ctx.has_bias else None, *[None] * 4
