"""Pictures in and out: uploads decoded within limits, and thumbnails of what is in the index.

What goes out is always encoded anew from decoded pixels, so a file that is no picture can never leave the machine.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torch import Tensor

from nearkin.data.pixels.decode import BadImage, BoundedFile, TooManyParts, decode, decode_file
from nearkin.serve.guard import Refused

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is read from strangers; Pillow knows many more, some of which start other programs."""

SCANS = 100
"""Passes over a progressive JPEG file beyond which its few bytes are meant to keep a processor busy."""

LARGE = 16_000_000
"""Pixels beyond which a picture waits for others of its size, one decoded at a time, and holds up no smaller one."""

THUMBNAILS = (64, 256, 768)
"""The short sides at which pictures are sent."""


def decode_upload(data: bytes, *, short_side: int, channels: int, limit: int) -> Tensor:
    """Decode an uploaded picture as a file would be: uint8 [channels, h, w]. Call `check_upload` first."""
    try:
        return decode(data, Path("picture"), short_side=short_side, channels=channels, limit=limit, formats=FORMATS)
    except BadImage as error:
        raise Refused(400, f"This picture cannot be used: {error.reason}.") from None


def check_upload(data: bytes, *, limit: int) -> int:
    """How many pixels a picture has; what is none, or would take too long, is refused by its header alone."""
    try:
        with Image.open(BoundedFile(data), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise Refused(413, f"This picture has far more than {limit:,} pixels, which is what is accepted.") from None
    except TooManyParts as error:
        raise Refused(400, f"This picture cannot be used: {error}.") from None
    except Exception:  # Pillow's readers raise whatever a mangled header leads them into
        raise Refused(415, "This is not a picture of a known kind: JPEG, PNG, WebP, GIF, TIFF, BMP, PPM.") from None
    if width * height > limit:
        raise Refused(413, f"This picture has {width:,} × {height:,} pixels; up to {limit:,} are accepted.")
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > SCANS:  # in pixels a byte ff is always followed by 00
        raise Refused(400, "This JPEG file has more passes than any honest one.")
    return width * height


def thumbnail(path: Path, side: int) -> tuple[bytes, str]:
    """A picture of short side `side`, or less where the file has less, and its media type.

    It holds pixels and nothing else: no place, no time, no camera.
    """
    try:
        pixels = decode_file(path, short_side=side, formats=FORMATS, enlarge=False)
    except BadImage as error:
        raise Refused(404, f"The picture cannot be shown: {error.reason}.") from None
    kind = "PNG" if min(pixels.shape[1:]) <= THUMBNAILS[0] else "JPEG"  # few pixels are shown as they are
    out = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(out, kind, quality=85)
    return out.getvalue(), f"image/{kind.lower()}"


class Cache:
    """The pictures made last, up to so many bytes."""

    def __init__(self, make: Callable[[Path, int], tuple[bytes, str]], *, most: int = 64 * 2**20) -> None:
        self.make, self.most, self.held = make, most, 0
        self.kept: OrderedDict[tuple[Path, int], tuple[bytes, str]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, path: Path, side: int) -> tuple[bytes, str]:
        """The picture of a file, made now unless it is there."""
        key = (path, side)
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        made = self.make(path, side)  # not under the lock: two may make the same one, which is rare and harmless
        with self.lock:
            if key not in self.kept:
                self.kept[key] = made
                self.held += len(made[0])
            while self.held > self.most and len(self.kept) > 1:
                _, (old, _) = self.kept.popitem(last=False)
                self.held -= len(old)
        return made
