"""Frozen batch norm as part of the convolution before it.

With its statistics frozen, batch norm is an affine map of channels: γ (W∗x − μ)/√(v + ε) + β = (aW)∗x + (β − aμ) with
a = γ/√(v + ε). Computed so, on weights instead of feature maps, it costs nothing, while the parameters, their names and
their gradients stay what they are. In train mode a batch norm runs as ever.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def fold_batch_norms(net: nn.Module, example: Tensor) -> int:
    """Fold every batch norm that takes a convolution's output as it is; returns how many. Once a network.

    Where something else takes that output too, as the shortcut around some stems, folding would change the network:
    then nothing is folded.
    """
    modes = [(m, m.training) for m in net.modules()]
    net.eval()
    pairs = _pairs(net, example)
    with _random_norms([norm for _, norm in pairs]):
        x = torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
        before = _flat(net(x))
        for conv, norm in pairs:
            _fold(conv, norm)
        same = (_flat(net(x)) - before).abs().max() <= 1e-3 * before.abs().max()
    if not same:
        for conv, norm in pairs:
            _unfold(conv, norm)
    for module, mode in modes:
        module.training = mode
    return len(pairs) if same else 0


def _flat(output: Any) -> Tensor:
    return output.flatten() if isinstance(output, Tensor) else torch.cat([o.flatten() for o in output])


@contextmanager
def _random_norms(norms: list[Any]) -> Iterator[None]:
    """Batch norms with statistics that show a difference, for a moment; fresh ones are next to the identity."""
    kept = [{name: t.clone() for name, t in norm.state_dict(keep_vars=False).items()} for norm in norms]
    rng = torch.Generator().manual_seed(1)
    for norm in norms:
        for t, low in ((norm.running_mean, -0.5), (norm.running_var, 0.5), (norm.weight, 0.5), (norm.bias, -0.5)):
            if t is not None:
                t.copy_(low + torch.rand(t.shape, generator=rng))
    try:
        yield
    finally:
        for norm, state in zip(norms, kept, strict=True):
            norm.load_state_dict(state)


def _pairs(net: nn.Module, example: Tensor) -> list[tuple[nn.Conv2d, Any]]:
    """Who feeds whom, seen in one pass in eval mode: the very tensor a convolution gave is what the batch norm gets."""
    source: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # the tensor is kept, so that its id stays its own
    pairs: list[tuple[nn.Conv2d, Any]] = []

    def gave(module: nn.Module, _inputs: object, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            source[id(output)] = (module, output)

    def got(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, BatchNorm) and module.track_running_stats and id(inputs[0]) in source:
            pairs.append((source[id(inputs[0])][0], module))

    hooks = [m.register_forward_hook(gave) for m in net.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(got) for m in net.modules() if isinstance(m, BatchNorm)]
    net(example)
    for hook in hooks:
        hook.remove()
    return [pair for pair in pairs if _alone(pair, pairs)]


def _alone(pair: tuple[nn.Conv2d, Any], pairs: list[tuple[nn.Conv2d, Any]]) -> bool:
    """Whether neither side has another partner (modules that are shared stay as they are)."""
    return sum(conv is pair[0] or norm is pair[1] for conv, norm in pairs) == 1


def _fold(conv: nn.Conv2d, norm: Any) -> None:
    bare = copy.copy(conv)  # the same kind of convolution, to be called with other weights
    bare._parameters = {"weight": conv._parameters["weight"], "bias": nn.Parameter(torch.zeros(len(conv.weight)))}
    # A tuple, which no module looks into: the batch norm stays where it is in the network and under its name.
    conv.folded = (norm, bare)  # type: ignore[assignment]
    # A kind, not a function on the instance: a compiled network then serves the next network of the same kind too.
    conv.__class__ = _convolution(type(conv))  # type: ignore[arg-type]  # a class is hashable
    norm.__class__ = _finisher(type(norm))  # type: ignore[arg-type]


def _unfold(conv: nn.Conv2d, norm: Any) -> None:
    conv.__class__, norm.__class__ = type(conv).__bases__[0], type(norm).__bases__[0]
    del conv.folded


@cache
def _convolution(kind: type[nn.Conv2d]) -> type[nn.Conv2d]:
    """That kind of convolution, which does its batch norm's work too where that is frozen."""

    def forward(conv: Any, x: Tensor) -> Tensor:
        norm, bare = conv.folded
        if norm.training:
            return kind.forward(conv, x)
        a = (norm.running_var + norm.eps).rsqrt()
        a = a if norm.weight is None else a * norm.weight
        b = (-norm.running_mean if conv.bias is None else conv.bias - norm.running_mean) * a
        b = b if norm.bias is None else b + norm.bias
        out: Tensor = functional_call(bare, {"weight": conv.weight * a[:, None, None, None], "bias": b}, (x,))
        return out

    return type(f"Folded{kind.__name__}", (kind,), {"forward": forward})


@cache
def _finisher(kind: type[Any]) -> type[Any]:
    """That kind of batch norm, of which, where it is frozen, only what follows is left."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        if norm.training:
            out: Tensor = kind.forward(norm, x)
            return out
        for name in ("drop", "act"):  # timm's batch norms carry their activation
            if hasattr(norm, name):
                x = getattr(norm, name)(x)
        return x

    return type(f"Folded{kind.__name__}", (kind,), {"forward": forward})
