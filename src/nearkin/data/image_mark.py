"""The mark of a data set's images, so that results made with other images of the same name are not mixed."""

import hashlib
import os
from typing import NamedTuple

from torch import Tensor

from nearkin.data.image_files import file_size
from nearkin.data.images import Dataset, Images


class ImageMark(NamedTuple):
    """What a data set consists of; the same on every machine, however it is split and wherever it is."""

    images: int
    bytes: int
    digest: str  # of class, file name and file size of every image


def image_mark(data: Dataset) -> ImageMark:
    """Return the mark of all images of a data set. Files are not read, only their sizes."""
    rows = [row for part in (data.train, data.test) for row in _rows(part)]
    lines = sorted(f"{name}\t{file}\t{size}\n" for name, file, size in rows)
    digest = hashlib.blake2b("".join(lines).encode(errors="surrogateescape"), digest_size=6).hexdigest()
    return ImageMark(len(rows), sum(size for *_, size in rows), digest)


def _rows(images: Images) -> list[tuple[str, str, int]]:
    names = [images.names[label] for label in images.labels.tolist()]
    if isinstance(images.sources, Tensor):
        pixels = [image.cpu().contiguous().numpy().tobytes() for image in images.sources]
        files = [(hashlib.blake2b(data, digest_size=6).hexdigest(), len(data)) for data in pixels]
    else:
        files = [(os.path.basename(str(path)), max(0, file_size(path))) for path in images.sources]
    return [(name, *file) for name, file in zip(names, files, strict=True)]
