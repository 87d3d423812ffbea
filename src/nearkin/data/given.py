"""Images as a caller has them, files or pixels in memory, turned into a store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearkin.data.decode import picture
from nearkin.data.images import Images, Progress
from nearkin.data.pixels import Packed, first_tiles
from nearkin.data.resident import Resident
from nearkin.data.stores import Store, open_store, pack_tensor
from nearkin.errors import NearkinError

Given = Sequence[str | Path] | Sequence[Tensor | NDArray[Any] | Image.Image] | Tensor | NDArray[Any]
"""Files; or uint8 pixels: a tensor [N, C, H, W], an array [N, H, W, C] or [N, H, W], or a list of single ones."""


def store_of(images: Given, *, short: int, channels: int, device: torch.device, progress: Progress = None) -> Store:
    """The store of some images; one that cannot be used is a sentence."""
    if isinstance(images, str | Path | Image.Image) or not hasattr(images, "__len__"):
        raise NearkinError("Images are given together: a list of files or of pixels, a tensor or an array.")
    if not len(images):
        raise NearkinError("There is nothing to embed: no image was given.")
    if isinstance(images, Tensor | np.ndarray):
        if images.ndim not in (3, 4) or (isinstance(images, Tensor) and images.ndim != 4):
            shape = list(images.shape)
            raise NearkinError(f"Pixels are a tensor [N, C, H, W] or an array [N, H, W, C] or [N, H, W], not {shape}.")
        tensor = images if isinstance(images, Tensor) else _channels_first(images)
        packed = pack_tensor(tensor, short=short, channels=channels)
    elif paths := [Path(image) for image in images if isinstance(image, str | Path)]:
        if len(paths) < len(images):
            raise NearkinError("A list holds files or pixels, not both: embed them one after the other.")
        return _of_files(paths, short, channels, device, progress)
    else:
        singles = [_single(image) for image in images]
        packed = _together([pack_tensor(i[None], short=short, channels=channels) for i in singles], channels)
    return Resident(Packed(*(part.to(device) for part in packed)), short=short, channels=channels, device=device)


def _of_files(paths: list[Path], short: int, channels: int, device: torch.device, progress: Progress) -> Store:
    given = Images(paths, torch.zeros(len(paths), dtype=torch.int64), ("",))
    store, _, bad = open_store(given, short=short, channels=channels, device=device, progress=progress)
    if bad:
        raise NearkinError(f"{len(bad)} of {len(paths)} images cannot be embedded, the first: {bad[0]}")
    return store


def _channels_first(array: NDArray[Any]) -> Tensor:
    """Arrays [N, H, W, C] or [N, H, W], as other libraries have them, as a tensor [N, C, H, W]."""
    last = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(last, -1, 1)))


def _single(image: Any) -> Tensor:
    """One image as a tensor [C, H, W]."""
    if isinstance(image, Image.Image):
        return picture(image)
    pixels = image if isinstance(image, Tensor) else np.asarray(image)
    if pixels.ndim not in (2, 3):
        raise NearkinError(
            f"One image is a tensor [C, H, W] or an array [H, W, C] or [H, W], not {list(pixels.shape)}."
        )
    if isinstance(pixels, Tensor):
        return pixels if pixels.ndim == 3 else pixels[None]
    return _channels_first(pixels[None])[0]


def _together(parts: list[Packed], channels: int) -> Packed:
    """Packed images as one pack: their tiles one after the other behind one blank tile."""
    size = torch.cat([part.size for part in parts])
    tiles = torch.cat([parts[0].tiles[:1], *(part.tiles[1:] for part in parts)])
    return Packed(tiles, first_tiles(size, channels), size)
