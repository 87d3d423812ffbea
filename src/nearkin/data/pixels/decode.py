"""From an image file to uint8 pixels of a given short side, or a sentence on what is wrong with the file.

The short side becomes `short`, the long side follows (rounded down); what is longer than twice the short side loses its
ends first. Resizing is bilinear with antialiasing, as is usual in the field. Orientation tags are obeyed, transparency
lies on white, palettes, CMYK and 16 bits a channel become 8-bit RGB, of an animation the first frame counts; colour
profiles are not applied. JPEG files are decoded by simplejpeg where it is installed, else by Pillow: the same pixels.
"""

import io
import warnings
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import NearkinError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Bytes = NDArray[np.uint8]

PIXEL_LIMIT = 100_000_000
"""Pixels beyond which an image is taken for a decompression bomb. Pillow by itself refuses more than 179 million."""

READS = 100_000
"""How often Pillow may read from one file: some twenty megabytes of PNG in its smallest usual parts, several times."""

_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = (5, 6, 7, 8)  # its values that swap height and width
_LUMA = (19595, 38470, 7471)  # Rec. 601 in 1/65536


class BadImage(NearkinError):  # noqa: N818 (it is an image)
    """An image that cannot be used; the message names the file and says why."""

    def __init__(self, path: Path | str, reason: str, *, row: int = -1) -> None:
        super().__init__(f"Cannot use the image {path}: {reason}. Replace it or take it out of the data.")
        self.path, self.reason, self.row = Path(path), reason, row


class TooManyParts(OSError):  # noqa: N818 (it says what is wrong)
    """A file of so many small parts that it is meant to keep a processor busy."""


class Bounded(io.BytesIO):
    """A file in memory that is read so often and no more.

    Pillow goes through a file's parts one by one. A few megabytes hold millions of empty ones, which take a minute.
    """

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Some bytes, or TooManyParts."""
        self.reads += 1
        if self.reads > READS:
            raise TooManyParts("it has more parts than any honest file")
        return super().read(size)


def stored_size(height: int, width: int, short: int) -> tuple[int, int]:
    """Height and width at which an image of this size is stored."""
    side = min(height, width)
    height, width = min(height, 2 * side), min(width, 2 * side)
    return height * short // side, width * short // side


def read(path: Path) -> bytes:
    """The bytes of a file, or a BadImage."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadImage(path, "there is no such file") from None
    except OSError as error:
        raise BadImage(path, f"it cannot be read ({error.strerror or error})") from None
    if not data:
        raise BadImage(path, "it is empty")
    return data


def measure(path: Path, *, short: int, limit: int = PIXEL_LIMIT) -> tuple[int, int]:
    """The size an image will be stored at, from its header alone."""
    try:
        with path.open("rb") as file, _open(file, path, limit) as image:
            width, height = image.size
            sideways = _orientation(image, file) in _SIDEWAYS
    except OSError:  # what is wrong with opening it, read() can say
        read(path)
        raise BadImage(path, "it cannot be read") from None
    return stored_size(width, height, short) if sideways else stored_size(height, width, short)


def decode(data: bytes, path: Path, *, short: int, channels: int = 3, limit: int = PIXEL_LIMIT) -> Tensor:
    """The pixels of an image file's bytes, uint8 [channels, h, w]; `path` is for the message only."""
    file = Bounded(data)
    with _open(file, path, limit) as image:
        orientation = _orientation(image, file)
        pixels = _jpeg(data, image) if simplejpeg is not None else None
        if pixels is None:
            pixels = _pillow(image, path)
    turned = _turn(torch.from_numpy(pixels).permute(2, 0, 1), orientation)
    return as_channels(resize(turned, short), channels)


def picture(image: Image.Image) -> Tensor:
    """The pixels of Pillow's image as those of its file would be, before they are resized: uint8 [1 or 3, h, w]."""
    name = getattr(image, "filename", "") or "in memory"
    return _turn(torch.from_numpy(_pillow(image, name)).permute(2, 0, 1), _tag(image))


def resize(image: Tensor, short: int) -> Tensor:
    """Images uint8 [..., C, h, w] at their stored size: ends cut off beyond 2:1, then resized."""
    height, width = image.shape[-2:]
    side = min(height, width)
    for dim, length in ((-2, height), (-1, width)):
        if length > 2 * side:
            image = image.narrow(dim, (length - 2 * side) // 2, 2 * side)
    size = stored_size(height, width, short)
    if image.shape[-2:] == size:
        return image
    batch = image if image.ndim == 4 else image[None]
    done = F.interpolate(batch, size=size, mode="bilinear", antialias=True)
    return done if image.ndim == 4 else done[0]


def as_channels(image: Tensor, channels: int) -> Tensor:
    """Grey repeated to RGB or RGB weighed to grey, where [..., C, h, w] is not yet what is asked for."""
    have = image.shape[-3]
    if have == channels:
        return image
    if (have, channels) == (1, 3):
        return image.expand(*image.shape[:-3], 3, -1, -1)
    if (have, channels) == (3, 1):
        r, g, b = (weight * part.int() for weight, part in zip(_LUMA, image.unbind(-3), strict=True))
        return ((r + g + b + 32768) >> 16).to(torch.uint8).unsqueeze(-3)
    raise NearkinError(f"Images of {have} channels cannot become images of {channels}: 1 (grey) and 3 (RGB) are known.")


def _open(file: IO[bytes], path: Path, limit: int) -> Image.Image:
    # Pillow's remarks on odd files would reach the user without the file's name. Set on every call, because
    # catch_warnings elsewhere may have dropped the filter; setting it again adds nothing.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        image = Image.open(file)
    except Image.DecompressionBombError:
        raise BadImage(path, "it has so many pixels that it may be a decompression bomb") from None
    except UnidentifiedImageError:
        empty = file.seek(0, io.SEEK_END) == 0
        raise BadImage(path, "it is empty" if empty else "it is not an image of a known format") from None
    except Exception as error:  # Pillow's readers raise whatever a mangled header leads them into
        raise BadImage(path, f"its header is damaged ({_short(error)})") from None
    width, height = image.size
    if width * height > limit:
        reason = f"{width} × {height} pixels are over the limit of {limit:,} that guards against decompression bombs"
        raise BadImage(path, reason)
    if min(width, height) < 1:
        raise BadImage(path, f"it has {width} × {height} pixels")
    return image


def _orientation(image: Image.Image, file: IO[bytes]) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        # Pillow would decode the whole image to look for a tag behind the pixels; hardly any file has one.
        here = file.tell()
        file.seek(0)
        found = b"eXIf" in file.read()
        file.seek(here)
        if not found:
            return 1
    return _tag(image)


def _tag(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a mangled tag says nothing about the pixels, and damaged pixels show when they are decoded
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turn(image: Tensor, orientation: int) -> Tensor:
    """[C, h, w] as the orientation tag wants it seen."""
    if orientation in _SIDEWAYS:
        image = image.transpose(1, 2)
    flips = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return image.flip(flips) if flips else image


def _jpeg(data: bytes, image: Image.Image) -> Bytes | None:
    """A plain JPEG by simplejpeg; None for what is left to Pillow, which also has the last word on damage."""
    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    try:
        pixels: Bytes = simplejpeg.decode_jpeg(data, colorspace="RGB" if image.mode == "RGB" else "GRAY")
    except ValueError:
        return None
    return pixels


def _pillow(image: Image.Image, path: Path | str) -> Bytes:
    """[h, w, 1 or 3] of any image Pillow can read."""
    if image.mode == "F":
        raise BadImage(path, "floating-point pixels have no known range")
    try:
        image.load()
        if image.mode.startswith("I"):
            deep = np.asarray(image).astype(np.int64).clip(0, 65535)
            return ((deep + 128) // 257).astype(np.uint8)[:, :, None]
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        if image.mode not in ("L", "RGB"):  # converting to the mode it has would copy it
            image = image.convert("L" if image.mode == "1" else "RGB")
    except Exception as error:  # truncated data, broken streams, codecs that are not there: readers raise many kinds
        reason = "it is truncated" if "truncated" in str(error) else f"its pixels cannot be decoded ({_short(error)})"
        raise BadImage(path, reason) from None
    pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100].rstrip(".") or type(error).__name__
