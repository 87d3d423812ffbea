"""Images that are there twice: the same file, or nearly the same picture.

Nearly the same: two pictures that are about as similar as a picture and a changed copy of itself (made smaller, cropped
a little, brightened, compressed again), in two ways: by embedding, and by the correlation of small grey thumbnails.
Both limits are calibrated on changed copies of a sample of the images. An embedding alone would not do: a well trained
one makes all images of a class similar.
"""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.pixels.decode import decode_file, pillow_pixels, resize
from nearkin.data.pixels.image_bytes import read_bytes
from nearkin.data.pixels.stores import Store
from nearkin.search.index.exact import search_exact
from nearkin.space import Space

THUMBNAIL = 24  # pixels: side of the grey thumbnails
BATCH = 256  # images read at once
CANDIDATES = 10  # nearest by thumbnail that may be copies of an image
SAMPLE = 100  # images whose copies calibrate the limits
FOUND = 0.99  # share of these copies that the limits let pass

Embed = Callable[[list[Tensor]], Tensor]  # pixels uint8 [C, H, W] of any size → points [N, D] of the space
Similarity = Callable[[Tensor, Tensor], Tensor]  # points [N, D], row by row → [N]


class Limits(NamedTuple):
    """From here on two pictures are nearly the same."""

    similarity: float
    correlation: float


class Pair(NamedTuple):
    """Two images that are the same, or nearly."""

    first: int
    second: int
    similarity: float
    exact: bool


def originals(images: Images) -> Tensor:
    """The first row with the same content, for each image [N]."""
    first: dict[bytes, int] = {}
    digests = (_digest(source) for source in images.sources)
    return torch.tensor([first.setdefault(digest, row) for row, digest in enumerate(digests)])


def _digest(source: Tensor | Path) -> bytes:
    data = source.cpu().contiguous().numpy().tobytes() if isinstance(source, Tensor) else read_bytes(source)
    return hashlib.sha256(data).digest()


def pixels_of(source: Tensor | Path, *, short_side: int) -> Tensor:
    """An image as uint8 [C, H, W], not enlarged."""
    return source.cpu() if isinstance(source, Tensor) else decode_file(source, short_side=short_side, enlarge=False)


def changed(pixels: Tensor, rng: np.random.Generator) -> Tensor:
    """A copy as people make them: cropped by up to 4 %, made smaller, a little brighter or darker, compressed again."""
    grey = len(pixels) == 1
    picture = Image.fromarray((pixels[0] if grey else pixels.permute(1, 2, 0)).contiguous().numpy())
    width, height = picture.size
    left, top, right, bottom = (rng.uniform(0, 0.02, 4) * (width, height, width, height)).round().astype(int)
    picture = picture.crop((left, top, width - right, height - bottom))
    smaller = rng.uniform(0.6, 0.9)
    picture = picture.resize((max(8, round(width * smaller)), max(8, round(height * smaller))))
    picture = ImageEnhance.Brightness(picture).enhance(rng.uniform(0.85, 1.15))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=int(rng.integers(60, 90)))
    buffer.seek(0)
    return pillow_pixels(Image.open(buffer))


def thumbnail(pixels: Tensor) -> Tensor:
    """A grey thumbnail [THUMBNAIL²] with mean 0 and norm 1, so that products are correlations."""
    grey = pixels.float().mean(0)[None, None]
    small = torch.nn.functional.interpolate(grey, size=(THUMBNAIL, THUMBNAIL), mode="bilinear", antialias=True)
    flat = small.flatten() - small.mean()
    unit: Tensor = flat / flat.norm().clamp_min(1e-6)
    return unit


def thumbnails_of(store: Store) -> Tensor:
    """The thumbnails [N, THUMBNAIL²] of all images of a store."""
    parts = []
    for _, pixels in store.read_batches(iter(torch.split(torch.arange(len(store)), BATCH)), read_ahead=2):
        sizes = zip(pixels.canvas.cpu(), pixels.size.tolist(), strict=True)
        parts += [thumbnail(canvas[:, :height, :width]) for canvas, (height, width) in sizes]
    return torch.stack(parts)


def calibrate_limits(
    images: Images, points: Tensor, thumbnails: Tensor, embed: Embed, similarity: Similarity, *, short_side: int
) -> Limits:
    """The limits that let FOUND of the changed copies of a sample pass, each on its own."""
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:SAMPLE]
    rng = np.random.default_rng(0)
    copies = [changed(pixels_of(images.sources[row], short_side=short_side), rng) for row in rows.tolist()]
    s = similarity(points[rows], embed(copies).to(points))
    small = torch.stack([thumbnail(resize(copy, short_side)) for copy in copies])
    correlations = (small * thumbnails[rows]).sum(-1)
    return Limits(float(s.quantile(1 - FOUND)), float(correlations.quantile(1 - FOUND)))


def find_pairs(
    images: Images, points: Tensor, thumbnails: Tensor, similarity: Similarity, limits: Limits
) -> list[Pair]:
    """All pairs of images that are the same, then those that are nearly the same, the most similar first.

    Of a group of images with the same content each is paired with the first one only.
    """
    first = originals(images)
    exact = [Pair(int(first[row]), row, 1.0, True) for row in range(len(images)) if first[row] != row]
    vectors = thumbnails.numpy()
    found, correlation = search_exact(vectors, vectors, CANDIDATES + 1, space=Space.COSINE)
    place, column = np.nonzero(correlation >= limits.correlation)
    ends = torch.unique(torch.stack([first[place], first[found[place, column]]]).sort(dim=0).values, dim=1)
    a, b = ends[:, ends[0] != ends[1]]
    s = similarity(points[a], points[b])
    near = [
        Pair(i, j, value, False)
        for i, j, value in zip(a.tolist(), b.tolist(), s.tolist(), strict=True)
        if value >= limits.similarity
    ]
    return exact + sorted(near, key=lambda pair: -pair.similarity)
