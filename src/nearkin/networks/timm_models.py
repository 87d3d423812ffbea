"""Networks from timm: an import that survives a torchvision that does not fit torch, and any model by its name."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.networks.weights import one_line
from nearkin.spec import nearest

_DECLARED: list[torch.library.Library] = []  # an operator is declared for as long as its library object lives


def import_timm() -> Any:
    """timm, imported only when a network of it is built."""
    _mend_torchvision()
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise NearkinError(
            f"This backbone needs timm and torchvision: pip install timm torchvision ({error})."
        ) from error


def _mend_torchvision() -> None:
    """Let torchvision be imported where its compiled part does not fit the installed torch.

    timm needs only Python parts of torchvision, yet the import stops at two operators that the compiled part would have
    brought. Their names are declared, without a body, and the import is tried again. Where torchvision works, or is not
    there, nothing is done.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            operators.define(schema)  # type: ignore[no-untyped-call]
        _DECLARED.append(operators)
        _forget("torchvision")
        importlib.import_module("torchvision")


def _forget(package: str) -> None:
    """Drop what a failed import left behind: half of a package would be taken for the whole."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def timm_config(name: str, others: Iterable[str]) -> Any:
    """timm's record of a model (input size, mean, std, classifier), or an error that names the nearest known name."""
    timm = import_timm()
    model, dot, tag = name.partition(".")
    known = timm.list_models()
    if model not in known:
        tagged = timm.list_models(pretrained=True) if dot else []
        hint = nearest(name, [*others, *known, *tagged])
        raise NearkinError(
            f"There is no backbone {name!r}.{hint} There are: {', '.join(others)}, and timm's models by name."
        )
    tags = [full.partition(".")[2] for full in timm.list_models(f"{model}.*", pretrained=True)]
    if dot and tag not in tags:
        there = f"It has: {', '.join(tags)}." if tags else "It has none."
        raise NearkinError(f"timm's {model} has no pretrained weights {tag!r}.{nearest(tag, tags)} {there}")
    return timm.models.get_pretrained_cfg(name)


def build_timm(name: str, size: int, pretrained: bool) -> nn.Module:
    """A timm model that ends in its feature map, or, where it has none (tokens), in its own pooled vector."""
    timm = import_timm()
    config = timm.models.get_pretrained_cfg(name)
    resized = {"img_size": size} if config.fixed_input_size and size != config.input_size[-1] else {}
    try:
        net = timm.create_model(name, pretrained=pretrained, num_classes=0, **resized)
    except Exception as error:  # the hub, the disk, the network and the model itself each have errors of their own
        if not pretrained:
            raise NearkinError(f"timm cannot build {name} for {size}-pixel images: {one_line(error)}") from error
        raise NearkinError(
            f"The pretrained weights of {name} cannot be fetched ({one_line(error)}): "
            "give the path of a weights file, or weights='none' for random ones."
        ) from error
    features = blank_pass(net.forward_features, net, channels=config.input_size[0], size=size)
    if isinstance(features, Tensor) and features.ndim == 4:
        with suppress(AssertionError):  # a head that pools in any case: then its pooled vector is what there is
            net.reset_classifier(0, "")
    return cast("nn.Module", net)


def set_drop_path(net: nn.Module, rate: float) -> None:
    """Stochastic depth, as timm spreads it: of n residual blocks, block i is skipped at rate · i/n in training."""
    blocks = [m for m in net.modules() if hasattr(m, "drop_path")]
    if not blocks:
        raise NearkinError("This backbone has no residual blocks to skip: leave drop_path at 0.")
    kind = import_timm().layers.DropPath
    for i, block in enumerate(blocks):
        block.drop_path = kind(rate * i / len(blocks))


def timm_layout(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """A file's tensors as timm itself would load them: its filter knows other layouts and fits position embeddings."""
    adapt = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return dict(state) if adapt is None else dict(adapt(dict(state), net))


@torch.no_grad()
def blank_pass(function: Callable[[Tensor], Any], net: nn.Module, *, channels: int, size: int) -> Any:
    """What a function of the network gives for one blank image, in eval mode."""
    net.eval()
    try:
        return function(torch.zeros(1, channels, size, size))
    except Exception as error:  # each network has its own way to refuse a size
        kind = type(net).__name__
        raise NearkinError(
            f"{kind} cannot take images of {size} × {size} pixels, choose another --size ({one_line(error)})."
        ) from error
    finally:
        net.train()
