"""Two Inception networks that timm does not have, with the state-dict keys of their public weight files.

`BNInception` (Ioffe & Szegedy, Batch Normalization, ICML 2015) reads bn_inception-52deb4733.pth; most papers in
metric learning build on it. `GoogLeNet` (Szegedy et al., Going Deeper with Convolutions, CVPR 2015; with batch norm)
reads torchvision's googlenet-1378be20.pth. Both end in the last feature map, without classifier.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(NamedTuple):
    """Output channels of one Inception block of BN-Inception."""

    one: int  # 1×1; 0 in a block that halves the map: it has no 1×1, and appends its pooled input
    three: tuple[int, int]  # 1×1 reduction, 3×3
    double: tuple[int, int]  # 1×1 reduction, both 3×3
    pool: Literal["avg", "max"]
    project: int  # 1×1 after the pooling; 0 in a block that halves the map


BLOCKS: dict[str, Block] = {
    "inception_3a": Block(64, (64, 64), (64, 96), "avg", 32),
    "inception_3b": Block(64, (64, 96), (64, 96), "avg", 64),
    "inception_3c": Block(0, (128, 160), (64, 96), "max", 0),
    "inception_4a": Block(224, (64, 96), (96, 128), "avg", 128),
    "inception_4b": Block(192, (96, 128), (96, 128), "avg", 128),
    "inception_4c": Block(160, (128, 160), (128, 160), "avg", 128),
    "inception_4d": Block(96, (128, 192), (160, 192), "avg", 128),
    "inception_4e": Block(0, (128, 192), (192, 256), "max", 0),
    "inception_5a": Block(352, (192, 320), (160, 224), "avg", 128),
    "inception_5b": Block(352, (192, 320), (192, 224), "max", 128),
}


class BNInception(nn.Module):
    """Images [B, 3, H, W] (BGR, 0 to 255 less the mean) → map [B, 1024, h, w], 7 × 7 at 224.

    The public code uses a batch-norm momentum of 0.9, which keeps little but the last batch; ours is 0.1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        width = 192
        for name, block in BLOCKS.items():
            width = self._add_block(name, width, block)

    def _add(self, name: str, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(outputs))

    def _add_block(self, name: str, width: int, block: Block) -> int:
        stride = 1 if block.project else 2
        if block.project:
            self._add(f"{name}_1x1", width, block.one, 1)
            self._add(f"{name}_pool_proj", width, block.project, 1)
        self._add(f"{name}_3x3_reduce", width, block.three[0], 1)
        self._add(f"{name}_3x3", *block.three, 3, stride=stride)
        self._add(f"{name}_double_3x3_reduce", width, block.double[0], 1)
        self._add(f"{name}_double_3x3_1", *block.double, 3)
        self._add(f"{name}_double_3x3_2", block.double[1], block.double[1], 3, stride=stride)
        return block.one + block.three[1] + block.double[1] + (block.project or width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map of the last block."""
        x = F.max_pool2d(self._conv(x, "conv1_7x7_s2"), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self._conv(x, "conv2_3x3_reduce", "conv2_3x3"), 3, 2, ceil_mode=True)
        for name, block in BLOCKS.items():
            x = self._block(x, name, block)
        return x

    def _conv(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(x)), inplace=True)
        return x

    def _block(self, x: Tensor, name: str, block: Block) -> Tensor:
        three = self._conv(x, f"{name}_3x3_reduce", f"{name}_3x3")
        double = self._conv(x, *(f"{name}_double_3x3_{part}" for part in ("reduce", "1", "2")))
        if not block.project:
            odd = (x.shape[-2] % 2, x.shape[-1] % 2)  # padding for odd maps, on which the public code fails
            return torch.cat([three, double, F.max_pool2d(x, 3, 2, padding=odd, ceil_mode=True)], 1)
        pooled = F.max_pool2d(x, 3, 1, 1) if block.pool == "max" else F.avg_pool2d(x, 3, 1, 1)
        return torch.cat([self._conv(x, f"{name}_1x1"), three, double, self._conv(pooled, f"{name}_pool_proj")], 1)


def flat_batch_norms(state: Mapping[str, Tensor], _net: nn.Module) -> dict[str, Tensor]:
    """Reshape the batch-norm vectors of BN-Inception's public file from [1, C] to [C]."""
    return {key: v.squeeze(0) if "_bn." in key and v.ndim == 2 else v for key, v in state.items()}


class ConvUnit(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same size, or half of it."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class GoogLeNetBlock(nn.Module):
    """Four branches; the third, 5 × 5 in the paper, is 3 × 3 in torchvision's weights."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], project: int) -> None:
        super().__init__()
        self.branch1 = ConvUnit(inputs, one, 1)
        self.branch2 = nn.Sequential(ConvUnit(inputs, three[0], 1), ConvUnit(*three, 3))
        self.branch3 = nn.Sequential(ConvUnit(inputs, five[0], 1), ConvUnit(*five, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvUnit(inputs, project, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The branches side by side."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """Images [B, 3, H, W] (RGB, mean = std = 0.5) → map [B, 1024, h, w], 7 × 7 at 224.

    torchvision turns ImageNet's mean and std into 0.5 inside the network (`transform_input`); here the input comes so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvUnit(3, 64, 7, stride=2)
        self.conv2 = ConvUnit(64, 64, 1)
        self.conv3 = ConvUnit(64, 192, 3)
        self.inception3a = GoogLeNetBlock(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = GoogLeNetBlock(256, 128, (128, 192), (32, 96), 64)
        self.inception4a = GoogLeNetBlock(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = GoogLeNetBlock(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = GoogLeNetBlock(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = GoogLeNetBlock(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = GoogLeNetBlock(528, 256, (160, 320), (32, 128), 128)
        self.inception5a = GoogLeNetBlock(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = GoogLeNetBlock(832, 384, (192, 384), (48, 128), 128)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map of the last block."""
        x = F.max_pool2d(self.conv1(x), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.conv3(self.conv2(x)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.inception3b(self.inception3a(x)), 3, 2, ceil_mode=True)
        x = self.inception4d(self.inception4c(self.inception4b(self.inception4a(x))))
        x = F.max_pool2d(self.inception4e(x), 2, 2, ceil_mode=True)
        y: Tensor = self.inception5b(self.inception5a(x))
        return y
