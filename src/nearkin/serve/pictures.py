"""Decode uploads within limits, and make thumbnails of indexed pictures.

Thumbnails are always encoded from decoded pixels, so a file that is not a picture can never be sent.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torch import Tensor

from nearkin.data.pixels.decode import Storage, decode, decode_file
from nearkin.data.pixels.formats import FORMATS
from nearkin.data.pixels.image_bytes import BadImage, BoundedFile, TooManyParts
from nearkin.serve.guard import Refused

SCANS = 100
"""Maximum scans of a progressive JPEG: a small file with more is an attack on the processor."""

LARGE = 16_000_000
"""Pixels above which pictures are decoded one at a time, so that they do not delay smaller ones."""

THUMBNAILS = (64, 256, 768)
"""Short sides of thumbnails."""


def decode_upload(data: bytes, *, storage: Storage, channels: int, limit: int) -> Tensor:
    """Decode an uploaded picture as a file would be: uint8 [channels, h, w]. Call `check_upload` first."""
    try:
        return decode(data, Path("picture"), **storage._asdict(), channels=channels, limit=limit)
    except BadImage as error:
        raise Refused(400, f"This picture cannot be used: {error.reason}.") from None


def check_upload(data: bytes, *, limit: int) -> int:
    """The number of pixels of an upload. Refuses other files and costly ones by their header alone."""
    try:
        with Image.open(BoundedFile(data), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise Refused(413, f"This picture has far more than {limit:,} pixels, the limit.") from None
    except TooManyParts as error:
        raise Refused(400, f"This picture cannot be used: {error}.") from None
    except Exception:  # Pillow's readers raise whatever a mangled header leads them into
        raise Refused(415, f"This is not a picture of a known format: {', '.join(FORMATS)}.") from None
    if width * height > limit:
        raise Refused(413, f"This picture has {width:,} × {height:,} pixels; the limit is {limit:,}.")
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > SCANS:  # within a scan, a byte ff is always followed by 00
        raise Refused(400, "This JPEG file has too many scans.")
    return width * height


def thumbnail(path: Path, side: int) -> tuple[bytes, str]:
    """A thumbnail of short side `side`, or less for a smaller file, and its media type. It has no metadata."""
    try:
        pixels = decode_file(path, short_side=side, enlarge=False)
    except BadImage as error:
        raise Refused(404, f"The picture cannot be shown: {error.reason}.") from None
    kind = "PNG" if min(pixels.shape[1:]) <= THUMBNAILS[0] else "JPEG"  # small ones without loss
    out = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(out, kind, quality=85)
    return out.getvalue(), f"image/{kind.lower()}"


class Cache:
    """The most recent thumbnails, up to a number of bytes."""

    def __init__(self, make: Callable[[Path, int], tuple[bytes, str]], *, limit: int = 64 * 2**20) -> None:
        self.make, self.limit, self.held = make, limit, 0
        self.kept: OrderedDict[tuple[Path, int], tuple[bytes, str]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, path: Path, side: int) -> tuple[bytes, str]:
        """The thumbnail of a file, from the cache or made now."""
        key = (path, side)
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        made = self.make(path, side)  # outside the lock: making one twice is rare and harmless
        with self.lock:
            if key not in self.kept:
                self.kept[key] = made
                self.held += len(made[0])
            while self.held > self.limit and len(self.kept) > 1:
                _, (old, _) = self.kept.popitem(last=False)
                self.held -= len(old)
        return made
