"""Name → trunk, with the mean, std, size and width it was made for; `Embedder` = trunk + pooling + projection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.data.augment import Normalise
from nearkin.efficientnet_lite import packaged_weights, timm_names
from nearkin.errors import NearkinError
from nearkin.folding import fold_batch_norms
from nearkin.inception import BNInception, GoogLeNet, flat_batch_norms
from nearkin.similarity import at_least_float32, check_space, project
from nearkin.spec import check_options, look_up, parse
from nearkin.timm_models import blank_pass, build_timm, timm_config, timm_layout
from nearkin.weights import load_weights, one_line, read_weights

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


def average(x: Tensor) -> Tensor:
    """Mean over the map, in float32 at least: [B, W, h, w] → [B, W]."""
    return x.mean((-2, -1), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def maximum(x: Tensor) -> Tensor:
    """Maximum over the map."""
    # Not amax: its gradient looks for equal values, which a compiled network, rounding otherwise, may not find (0/0).
    return at_least_float32(x.flatten(-2).max(-1).values)


def average_and_maximum(x: Tensor) -> Tensor:
    """Both, summed."""
    return average(x) + maximum(x)


class GeM(nn.Module):
    """Generalised mean over the map, (mean xᵖ)^(1/p) of values at least `eps`: p = 1 is the mean, p → ∞ the maximum."""

    def __init__(self, *, p: float = 3.0, learn: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        if p <= 0 or eps <= 0:
            raise NearkinError(f"gem needs p and eps above 0, not p={p}, eps={eps}.")
        self.p = nn.Parameter(torch.tensor(float(p))) if learn else float(p)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[B, W, h, w] → [B, W]."""
        return at_least_float32(x).clamp_min(self.eps).pow(self.p).mean((-2, -1)).pow(1 / self.p)


POOLS: dict[str, Callable[..., Pool]] = {
    "avg": lambda: average,
    "max": lambda: maximum,
    "avg+max": lambda: average_and_maximum,
    "gem": GeM,
}


def make_pool(text: str) -> Pool:
    """A pooling by its name: avg, max, avg+max (summed), gem or gem(p=3, learn=True)."""
    if text in POOLS:
        return POOLS[text]()
    call = parse(text)
    entry = look_up(call.name, POOLS, what="pooling")
    return entry(**check_options(call, entry))


class Head(nn.Module):
    """Feature map [B, W, h, w] → pooled [B, W] → layer norm, where asked → linear, unless dim is 0 → [B, dim or W].

    The linear map begins as in Proxy-Anchor's code.
    """

    def __init__(self, width: int, dim: int, *, pool: Pool, bias: bool, layer_norm: bool) -> None:
        super().__init__()
        self.pool = pool
        self.norm = (
            nn.LayerNorm(width, elementwise_affine=False) if layer_norm else None
        )  # the linear map has the affine part
        self.linear = nn.Linear(width, dim, bias=bias) if dim else None
        if self.linear is not None:
            nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")
            if bias:
                nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The vectors before they are put into a space."""
        v = self.pool(x)
        if self.norm is not None:
            v = self.norm(v)
        if self.linear is None:
            return v
        out: Tensor = self.linear(v.to(self.linear.weight.dtype))
        return out


class Embedder(nn.Module):
    """Trunk, head, and the projection into the space: normalised images → points [B, dim], float32 at least."""

    def __init__(
        self,
        trunk: Trunk,
        *,
        dim: int = 512,
        pool: str = "avg+max",
        bias: bool = True,
        layer_norm: bool = False,
        space: str = "cosine",
    ) -> None:
        super().__init__()
        if dim < 0:
            raise NearkinError(f"An embedding has at least one dimension (0: those of the trunk), not {dim}.")
        pooling = make_pool(pool)  # checked also where it is not needed
        self.dim, self.space = dim or trunk.width, check_space(space)
        self.trunk = trunk
        pooling = average if trunk.pooled else pooling
        self.head = Head(trunk.width, dim, pool=pooling, bias=bias, layer_norm=layer_norm)

    def features(self, x: Tensor) -> Tensor:
        """The trunk's own features [B, width], pooled, without the head: the baseline."""
        return self.head.pool(self.trunk(x))

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings [B, dim]."""
        return project(self.head(self.trunk(x)), self.space)
