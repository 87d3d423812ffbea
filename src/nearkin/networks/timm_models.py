"""Models from timm by their names, imported even if the installed torchvision does not fit torch."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError, first_line
from nearkin.spec import nearest

_DECLARED: list[torch.library.Library] = []  # an operator is declared for as long as its library object lives


def import_timm() -> Any:
    """Import timm; called only when one of its networks is built."""
    _repair_torchvision()
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise NearkinError(
            f"This backbone needs timm and torchvision: pip install timm torchvision ({error})."
        ) from error


def _repair_torchvision() -> None:
    """Make torchvision importable if its compiled part does not fit the installed torch.

    timm needs only Python parts of torchvision, but the import fails at two operators of the compiled part. This
    declares their names, without a body, and imports again. It does nothing if torchvision works or is missing.
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
        _unload("torchvision")
        importlib.import_module("torchvision")


def _unload(package: str) -> None:
    """Remove the modules that a failed import left behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def timm_config(name: str, others: Iterable[str]) -> Any:
    """Return timm's record of a model (input size, mean, std, classifier)."""
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
        choices = f"It has: {', '.join(tags)}." if tags else "It has none."
        raise NearkinError(f"timm's {model} has no pretrained weights {tag!r}.{nearest(tag, tags)} {choices}")
    return timm.models.get_pretrained_cfg(name)


def build_timm(name: str, size: int, pretrained: bool) -> nn.Module:
    """Build a timm model that returns its feature map, or its pooled vector if it has no map (tokens)."""
    timm = import_timm()
    config = timm.models.get_pretrained_cfg(name)
    resized = {"img_size": size} if config.fixed_input_size and size != config.input_size[-1] else {}
    try:
        net = timm.create_model(name, pretrained=pretrained, num_classes=0, **resized)
    except Exception as error:  # hub, disk, network and model each raise their own errors
        if not pretrained:
            raise NearkinError(f"timm cannot build {name} for {size}-pixel images: {first_line(error)}") from error
        raise NearkinError(
            f"The pretrained weights of {name} cannot be fetched ({first_line(error)}): "
            "give the path of a weights file, or weights='none' for random ones."
        ) from error
    features = run_blank_image(net.forward_features, net, channels=config.input_size[0], size=size)
    if isinstance(features, Tensor) and features.ndim == 4:
        with suppress(AssertionError):  # a head that always pools: use its pooled vector
            net.reset_classifier(0, "")
    return cast("nn.Module", net)


def set_drop_path(net: nn.Module, rate: float) -> None:
    """Set stochastic depth as timm does: of n residual blocks, block i is skipped at rate · i/n in training."""
    blocks = [m for m in net.modules() if hasattr(m, "drop_path")]
    if not blocks:
        raise NearkinError("This backbone has no residual blocks to skip: leave drop_path at 0.")
    kind = import_timm().layers.DropPath
    for i, block in enumerate(blocks):
        block.drop_path = kind(rate * i / len(blocks))


def timm_layout(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Convert the tensors of a file as timm would: its filter knows other layouts and resizes position embeddings."""
    adapt = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return dict(state) if adapt is None else dict(adapt(dict(state), net))


@torch.no_grad()
def run_blank_image(function: Callable[[Tensor], Any], net: nn.Module, *, channels: int, size: int) -> Any:
    """Return the output of a function of the network for one blank image, in eval mode."""
    net.eval()
    try:
        return function(torch.zeros(1, channels, size, size))
    except Exception as error:  # networks fail in different ways on a wrong size
        kind = type(net).__name__
        raise NearkinError(
            f"{kind} cannot take images of {size} × {size} pixels; choose another --size ({first_line(error)})."
        ) from error
    finally:
        net.train()
