"""Fold frozen batch norms into the convolutions before them.

With its statistics frozen, batch norm is an affine map of channels: γ (W∗x − μ)/√(v + ε) + β = (aW)∗x + (β − aμ) with
a = γ/√(v + ε). Computed on weights instead of feature maps, it costs almost nothing. Parameters, their names and their
gradients stay the same. In train mode a batch norm runs as usual.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nearkin.networks.eval_mode import evaluating
from nearkin.networks.fused_convolution import (
    convolve,
    convolve_by_one_dnn,
    fits_kernels,
    fits_one_dnn,
    kernel_kind,
)

BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def fold_batch_norms(net: nn.Module, example: Tensor) -> int:
    """Fold every batch norm that directly follows a convolution; return how many. Call it once per network.

    If another module uses the convolution's output too, as the shortcut around some stems does, folding would change
    the network: then nothing is folded.
    """
    with evaluating(net):
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
    return len(pairs) if same else 0


def compile_kernels(
    net: nn.Module, device: torch.device, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Compile the kernels that a network needs on a GPU, in threads; its first step would compile them one by one.

    `context` is the one in which a step calls the network. Weights and gradients stay as they are.
    """

    def run(job: tuple[nn.Conv2d, Any, Tensor]) -> None:
        conv, norm, x = job
        weights = [p for p in (conv.weight, norm.weight, norm.bias) if p is not None]
        with torch.cuda.device(device), torch.enable_grad(), context():
            out = convolve(conv, norm, x.requires_grad_(), _activations(norm))
            with torch.autograd.set_multithreading_enabled(False):  # in this thread, not in the one that all share
                torch.autograd.grad(out.float().sum(), [x, *weights])

    different: dict[Hashable, tuple[nn.Conv2d, Any, Tensor]] = {}
    for conv in net.modules():
        folded: Any = getattr(conv, "folded", None)
        if isinstance(conv, nn.Conv2d) and folded is not None:
            x = torch.zeros(2, conv.in_channels, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
            acts = _activations(folded[0])
            if fits_kernels(conv, x, acts):
                different.setdefault(kernel_kind(conv, acts), (conv, folded[0], x))
    for job in (first := list(different.values())[:1]):
        run(job)  # alone, since the others need most of its kernels, too
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, list(different.values())[len(first) :]))


def _flat(output: Any) -> Tensor:
    return output.flatten() if isinstance(output, Tensor) else torch.cat([o.flatten() for o in output])


@contextmanager
def _random_norms(norms: list[Any]) -> Iterator[None]:
    """Give batch norms random statistics within this context; new ones are close to the identity."""
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
    """Find convolutions followed by batch norms: run once, and match outputs of one with inputs of the other."""
    source: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # holding the tensor keeps its id unique
    pairs: list[tuple[nn.Conv2d, Any]] = []

    def after_conv(module: nn.Module, _inputs: object, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            source[id(output)] = (module, output)

    def before_norm(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, BatchNorm) and module.track_running_stats and id(inputs[0]) in source:
            pairs.append((source[id(inputs[0])][0], module))

    hooks = [m.register_forward_hook(after_conv) for m in net.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(before_norm) for m in net.modules() if isinstance(m, BatchNorm)]
    net(example)
    for hook in hooks:
        hook.remove()
    return [pair for pair in pairs if _exclusive(pair, pairs)]


def _exclusive(pair: tuple[nn.Conv2d, Any], pairs: list[tuple[nn.Conv2d, Any]]) -> bool:
    """Whether neither module is in another pair; shared modules are not folded."""
    return sum(conv is pair[0] or norm is pair[1] for conv, norm in pairs) == 1


def _fold(conv: nn.Conv2d, norm: Any) -> None:
    bare = copy.copy(conv)  # the same type of convolution, to be called with other weights
    bare._parameters = {"weight": conv._parameters["weight"], "bias": nn.Parameter(torch.zeros(len(conv.weight)))}
    # In a tuple, so that it is not registered as a submodule and keeps its place and name in the network.
    conv.folded = (norm, bare)  # type: ignore[assignment]
    # A class, not a function on the instance: a compiled network then serves the next one of the same type too.
    conv.__class__ = _folded_conv(type(conv))  # type: ignore[arg-type]  # a class is hashable
    norm.__class__ = _folded_norm(type(norm))  # type: ignore[arg-type]


def _unfold(conv: nn.Conv2d, norm: Any) -> None:
    conv.__class__, norm.__class__ = type(conv).__bases__[0], type(norm).__bases__[0]
    del conv.folded


def _activations(norm: Any) -> list[nn.Module]:
    return [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]  # timm's include them


@cache
def _folded_conv(kind: type[nn.Conv2d]) -> type[nn.Conv2d]:
    """Derive a convolution that includes its batch norm, and the activation of that, while it is frozen."""

    def forward(conv: Any, x: Tensor) -> Tensor:
        norm, bare = conv.folded
        if norm.training:
            return kind.forward(conv, x)
        acts = _activations(norm)
        if fits_kernels(conv, x, acts):
            return convolve(conv, norm, x, acts)
        a = (norm.running_var + norm.eps).rsqrt()
        a = a if norm.weight is None else a * norm.weight
        b = (-norm.running_mean if conv.bias is None else conv.bias - norm.running_mean) * a
        b = b if norm.bias is None else b + norm.bias
        weight = conv.weight * a[:, None, None, None]
        if fits_one_dnn(conv, x, acts) and (weight.sum() + b.sum()).isfinite():  # its clamp makes NaN a number
            return convolve_by_one_dnn(conv, weight, b, x, acts)
        out: Tensor = functional_call(bare, {"weight": weight, "bias": b}, (x,))
        for act in acts:
            out = act(out)
        return out

    return type(f"Folded{kind.__name__}", (kind,), {"forward": forward})


@cache
def _folded_norm(kind: type[Any]) -> type[Any]:
    """Derive a batch norm that leaves all to its convolution while it is frozen."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        return kind.forward(norm, x) if norm.training else x

    return type(f"Folded{kind.__name__}", (kind,), {"forward": forward})
