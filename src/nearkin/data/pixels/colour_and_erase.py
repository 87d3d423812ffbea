"""Augmentations of what another one shows: changed colours, and an erased box. They run on the device, as the views do.

Pixels are [B, C, size, size] in 0 … 255. Each image depends only on itself and its row of uniform draws.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from nearkin.data.pixels.tiles import Pixels
from nearkin.errors import NearkinError

LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue are seen


class Augmentation(Protocol):
    """An augmentation: pixels [B, C, size, size] in 0 … 255 from a batch and `draws` uniform numbers per image."""

    draws: int

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Augment a batch; each image depends only on itself and its row of draws."""


class Jitter:
    """Multiply brightness, contrast and saturation of a view by random factors, each within 1 ± its option."""

    def __init__(
        self, inner: Augmentation, *, brightness: float = 0.25, contrast: float = 0.25, saturation: float = 0.25
    ) -> None:
        self.inner, self.draws = inner, inner.draws + 3
        self.most = (brightness, contrast, saturation)
        if min(self.most) < 0 or max(self.most) > 1:
            raise NearkinError(f"jitter needs brightness, contrast and saturation from 0 to 1, not {self.most}.")

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Change the colours of the view inside."""
        x = self.inner.apply(pixels, draws[:, :-3]).float()
        most = torch.stack([torch.full_like(draws[:, 0], each) for each in self.most], 1)
        factor = 1 + most * (2 * draws[:, -3:] - 1)
        brightness, contrast, saturation = factor[:, :, None, None, None].unbind(1)  # [B, 1, 1, 1] each
        x = (brightness * x).clamp(0, 255)
        x = (_grey(x).mean((2, 3), keepdim=True) * (1 - contrast) + contrast * x).clamp(0, 255)
        return (_grey(x) * (1 - saturation) + saturation * x).clamp(0, 255)


class Erase:
    """Fill a random box of a view with the image's mean colour: at a rate of `rate`, an area within `scale`."""

    def __init__(
        self,
        inner: Augmentation,
        *,
        rate: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.25),
        ratio: tuple[float, float] = (0.3, 3.3),
    ) -> None:
        self.inner, self.draws = inner, inner.draws + 5
        self.rate, self.scale, self.ratio = rate, scale, ratio
        if not 0 <= rate <= 1 or not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise NearkinError(
                f"erase needs a rate from 0 to 1, 0 < low ≤ high ≤ 1 as scale and 0 < low ≤ high as ratio, not {rate}, "
                f"{scale} and {ratio}."
            )

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Fill a box of the view inside; a box that is longer than the view ends at its border."""
        x = self.inner.apply(pixels, draws[:, :-5]).float()
        chosen, area, shape, *corner = draws[:, -5:].unbind(1)
        low, high = (math.log(each) for each in self.ratio)
        shape = (low + (high - low) * shape).exp()
        area = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        inside = (chosen < self.rate)[:, None, None]
        for axis, (length, place) in enumerate(zip([area / shape, area * shape], corner, strict=True)):
            count = x.shape[2 + axis]
            extent = (length.sqrt() * count).round().clamp(max=count)
            start = (place * (count - extent + 1)).floor()
            at = torch.arange(count, device=x.device) - start[:, None]  # [B, count]
            inside = inside & ((at >= 0) & (at < extent[:, None])).unsqueeze(2 - axis)
        return torch.where(inside[:, None], x.mean((2, 3), keepdim=True), x)


def _grey(x: Tensor) -> Tensor:
    """The brightness of each pixel [B, 1, H, W]."""
    if x.shape[1] != len(LUMA):
        return x.mean(1, keepdim=True)
    red, green, blue = (x[:, channel, None] for channel in range(3))
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
