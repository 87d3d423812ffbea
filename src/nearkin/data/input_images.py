"""Images in the forms in which a caller has them: one or many, files or pixels, with uint8 or float values."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearkin.data.image_files import list_images
from nearkin.data.pixels.open import ImageInputs
from nearkin.errors import NearkinError

AnyImages = ImageInputs | str | Path | Image.Image | Iterable[str | Path | Tensor | NDArray[Any] | Image.Image]
"""Several images as `ImageInputs`, one image, a folder of images or a csv table, or an iterator over images."""

CHUNK = 512
"""Images of an iterator that are in memory at a time."""


def in_chunks(images: AnyImages) -> Iterator[ImageInputs]:
    """Yield the images as uint8 pixels or files: all at once, or those of an iterator in chunks."""
    if isinstance(images, str | Path):
        yield _files(Path(images))
    elif isinstance(images, Image.Image):
        yield [images]
    elif isinstance(images, Tensor):
        yield as_bytes(images[None] if images.ndim == 3 else images)
    elif isinstance(images, np.ndarray):
        yield as_bytes(images)
    elif hasattr(images, "__len__"):
        yield [_single(image) for image in images]
    elif isinstance(images, Iterable):
        remaining = iter(images)
        first = list(itertools.islice(remaining, CHUNK))
        yield [_single(image) for image in first]
        while more := list(itertools.islice(remaining, CHUNK)):
            yield [_single(image) for image in more]
    else:
        raise NearkinError(f"Images are files, pixels or a folder, not {type(images).__name__}.")


def _files(path: Path) -> list[Path]:
    """The images in a folder or a table; a file itself, whatever its name."""
    if path.is_dir() or path.suffix.lower() == ".csv":
        return [Path(image.path) for image in list_images([path])]
    return [path]


def _single(image: Any) -> Any:
    if isinstance(image, tuple):
        raise NearkinError("These are tuples, perhaps of image and label: pass the images alone.")
    return as_bytes(image)


def as_bytes(pixels: Any) -> Any:
    """Return pixels as uint8, from floats between 0 and 1; other images unchanged."""
    if not isinstance(pixels, Tensor | np.ndarray):
        return pixels
    floats = pixels.is_floating_point() if isinstance(pixels, Tensor) else pixels.dtype.kind == "f"
    if not floats or 0 in pixels.shape:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # nor is NaN
        raise NearkinError(
            f"Float pixels must be from 0 to 1, not from {low:.3g} to {high:.3g}: undo a normalisation, or pass uint8."
        )
    if isinstance(pixels, Tensor):
        return (pixels.float() * 255).round().to(torch.uint8)
    return np.rint(pixels * 255).astype(np.uint8)
