"""Decode image files to uint8 pixels of a given short side, or say what is wrong with a file.

The short side becomes `short_side`, the long side follows (rounded down); without `enlarge` a smaller image keeps its
size. An image longer than twice its short side is first cut at both ends. Resizing is bilinear with antialiasing.
Orientation tags are applied, transparency is blended with white, palettes, CMYK and 16 bits per channel become 8-bit
RGB, an animation gives its first frame; colour profiles are ignored. JPEG files are decoded by simplejpeg if it is
installed, else by Pillow, with the same pixels. The content of a file decides how it is read, not its name.
"""

import ctypes
import io
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from nearkin.data.paths import Bytes, Place
from nearkin.data.pixels.archives import locate
from nearkin.data.pixels.formats import BRANDS, FORMATS, MAGIC, RAW, format_of
from nearkin.data.pixels.image_bytes import (
    BadImage,
    BoundedFile,
    open_image,
    open_regular,
    read_bytes,
    read_place,
    unreadable,
)
from nearkin.errors import NearkinError, first_line

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

PIXEL_LIMIT = 100_000_000
"""Images with more pixels are treated as decompression bombs. Pillow itself refuses more than 179 million."""

SMALL = 64
"""The largest short side of a small image, in pixels."""

_GREY = ("1", "L", "LA", "I")  # Pillow's grey modes
_HEAD, _JPEG = 2**16, b"\xff\xd8\xff"  # bytes that usually tell the size of a JPEG, and its first ones
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = (5, 6, 7, 8)  # its values that swap height and width
_LUMA = (19595, 38470, 7471)  # Rec. 601 in 1/65536


class Storage(NamedTuple):
    """How images are kept: at a short side of `short_side`, smaller ones enlarged to it or at their own size."""

    short_side: int
    enlarge: bool = True


def stored_size(height: int, width: int, short_side: int, enlarge: bool = True) -> tuple[int, int]:
    """Return the height and width at which an image of this size is stored; without `enlarge` at most its own."""
    side = min(height, width)
    height, width = min(height, 2 * side), min(width, 2 * side)
    wanted = short_side if enlarge else min(short_side, side)
    return height * wanted // side, width * wanted // side


def stored_sizes(shapes: Tensor, short_side: int, *, enlarge: bool = True) -> Tensor:
    """Return what `stored_size` does for heights and widths [N, 2]; 0 stays 0."""
    side = shapes.amin(1, keepdim=True)
    wanted = side.new_full((), short_side) if enlarge else side.clamp_max(short_side)
    return torch.minimum(shapes, 2 * side) * wanted // side.clamp_min(1)


def measure(path: Path, *, short_side: int, enlarge: bool = True, limit: int = PIXEL_LIMIT) -> tuple[int, int]:
    """Return the size an image will be stored at, from its header alone."""
    return stored_size(*shown_size(path, limit=limit), short_side, enlarge=enlarge)


def shown_size(path: Path, place: Place | None = None, *, limit: int = PIXEL_LIMIT) -> tuple[int, int]:
    """Return the height and width of an image as it is shown, from its header alone; `place` is known or looked up."""
    place = place or locate(path)
    if place.size > _HEAD:  # of a JPEG in an archive, the beginning is enough unless it says otherwise
        start = read_place(place._replace(size=_HEAD), path)
        with suppress(BadImage):
            if start.startswith(_JPEG):
                return _size_of(io.BytesIO(start), path, limit)
    if place.size >= 0:
        return _size_of(io.BytesIO(read_place(place, path)), path, limit)
    try:
        with open_regular(Path(place.file)) as file:
            return _size_of(file, path, limit)
    except OSError as error:
        raise unreadable(path, error) from None


def _size_of(file: IO[bytes], path: Path, limit: int) -> tuple[int, int]:
    with _open(file, path, limit) as image:
        width, height = image.size
        return (width, height) if _orientation(image, file) in _SIDEWAYS else (height, width)


def all_small_grey(paths: Iterable[Path]) -> bool:
    """Whether all images that can be read are grey and have a short side of at most SMALL, by their headers alone."""
    found = []
    for path in paths:
        with suppress(BadImage, OSError), open_image(path) as file, _open(file, path, PIXEL_LIMIT) as image:
            found.append(image.mode.split(";")[0] in _GREY and min(image.size) <= SMALL)
    return bool(found) and all(found)


def decode(
    data: bytes,
    path: Path | str,
    *,
    short_side: int,
    channels: int = 3,
    limit: int = PIXEL_LIMIT,
    enlarge: bool = True,
) -> Tensor:
    """Decode the bytes of an image file: uint8 [channels, h, w].

    `path` is only for the message of a BadImage. Without `enlarge` a smaller image keeps its size.
    """
    file = BoundedFile(data)
    with _open(file, path, limit) as image:
        orientation = _orientation(image, file)
        pixels = _jpeg(data, image) if simplejpeg is not None else None
        if pixels is None:
            pixels = _pillow(image, path)
    turned = _turn(torch.from_numpy(pixels).permute(2, 0, 1), orientation)
    side = short_side if enlarge else min(short_side, *turned.shape[1:])
    return as_channels(resize(turned, side)[:3], channels)


def decode_file(path: Path, **how: Any) -> Tensor:
    """Read and decode an image file; keyword arguments as of `decode`."""
    return decode(read_bytes(path), path, **how)


def pillow_pixels(image: Image.Image) -> Tensor:
    """Return the pixels of a Pillow image as decoding its file would, before resizing: uint8 [1 or 3, h, w]."""
    name = getattr(image, "filename", "") or "in memory"
    return _turn(torch.from_numpy(_pillow(image, name)).permute(2, 0, 1)[:3], _tag(image))


def resize(image: Tensor, short_side: int) -> Tensor:
    """Bring images uint8 [..., C, h, w] to their stored size: cut both ends beyond 2:1, then resize."""
    height, width = image.shape[-2:]
    side = min(height, width)
    for dim, length in ((-2, height), (-1, width)):
        if length > 2 * side:
            image = image.narrow(dim, (length - 2 * side) // 2, 2 * side)
    size = stored_size(height, width, short_side)
    if image.shape[-2:] == size:
        return image
    # As a batch of one in its own order of bytes; PyTorch would copy it if the stride of the batch were smaller.
    batch = image if image.ndim == 4 else image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    done = F.interpolate(batch, size=size, mode="bilinear", antialias=True)
    return done if image.ndim == 4 else done[0]


def as_channels(image: Tensor, channels: int) -> Tensor:
    """Convert [..., C, h, w] from grey to RGB or from RGB to grey if the number of channels differs."""
    have = image.shape[-3]
    if have == channels:
        return image
    if (have, channels) == (1, 3):
        return image.expand(*image.shape[:-3], 3, -1, -1)
    if (have, channels) == (3, 1):
        r, g, b = (weight * part.int() for weight, part in zip(_LUMA, image.unbind(-3), strict=True))
        return ((r + g + b + 32768) >> 16).to(torch.uint8).unsqueeze(-3)
    raise NearkinError(f"Images of {have} channels cannot become images of {channels}: use 1 (grey) or 3 (RGB).")


def _open(file: IO[bytes], path: Path | str, limit: int) -> Image.Image:
    # Pillow's warnings on odd files would reach the user without the file's name. Set on every call, because
    # catch_warnings elsewhere may have dropped the filter; setting it again adds nothing.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    if os.path.splitext(path)[1].lower() in RAW:
        raise BadImage(path, "it is a raw file of a camera: export it as JPEG, PNG or TIFF")
    start = file.read(MAGIC)
    file.seek(0)
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage(path, "it has so many pixels that it may be a decompression bomb") from None
    except UnidentifiedImageError:
        other = format_of(start) if start else None
        if other in FORMATS:
            raise BadImage(path, f"it begins like {other} but is truncated or damaged") from None
        if other is not None:
            extra = "; pip install 'nearkin[heif]' adds HEIF" if other in BRANDS else ""
            raise BadImage(path, f"its content is {other}; the formats read are {', '.join(FORMATS)}{extra}") from None
        raise BadImage(path, "it is not an image of a known format" if start else "it is empty") from None
    except Exception as error:  # Pillow raises many kinds of errors for a damaged header
        raise BadImage(path, f"its header is damaged ({_what_it_says(error)})") from None
    width, height = image.size
    if width * height > limit:
        reason = f"{width} × {height} pixels are over the limit of {limit:,} that guards against decompression bombs"
        raise BadImage(path, reason)
    if min(width, height) < 1:
        raise BadImage(path, f"it has {width} × {height} pixels")
    return image


def _orientation(image: Image.Image, file: IO[bytes]) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        # Pillow would decode the whole image to look for a tag behind the pixels, which is rare.
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
    except Exception:  # a damaged tag says nothing about the pixels
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turn(image: Tensor, orientation: int) -> Tensor:
    """Apply the orientation tag to [C, h, w]."""
    if orientation in _SIDEWAYS:
        image = image.transpose(1, 2)
    flips = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return image.flip(flips) if flips else image


def _jpeg(data: bytes, image: Image.Image) -> Bytes | None:
    """Decode a plain JPEG by simplejpeg; None for everything that Pillow has to decode, damaged files among them."""
    if image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    try:
        pixels: Bytes = simplejpeg.decode_jpeg(data, colorspace="RGBX" if image.mode == "RGB" else "GRAY")
    except ValueError:
        return None
    return pixels


def _pillow(image: Image.Image, path: Path | str) -> Bytes:
    """Return the pixels of any image Pillow can read: [h, w, 1 or 3], or 4 of which the last is to be ignored."""
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
    except Exception as error:  # Pillow raises many kinds of errors for damaged data
        reason = (
            "it is truncated" if "truncated" in str(error) else f"its pixels cannot be decoded ({_what_it_says(error)})"
        )
        raise BadImage(path, reason) from None
    try:
        return np.asarray(_PillowMemory(image))
    except ValueError:  # grey, or in several blocks
        pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


class _ArrowArray(ctypes.Structure):
    """The start of an array in Arrow's interface between libraries."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "nulls", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _PillowMemory:
    """The pixels of an RGB image in Pillow's own memory, [h, w, 4] as NumPy takes them.

    A copy without the fourth bytes takes a quarter of the time of decoding, and Python's lock.
    """

    def __init__(self, image: Image.Image) -> None:
        if image.mode != "RGB":
            raise ValueError(image.mode)
        self.owner = image.__arrow_c_array__()[1]  # type: ignore[attr-defined, unused-ignore]
        array = _ArrowArray.from_address(_pointer(self.owner, b"arrow_array"))
        shape = (image.height, image.width, 4)
        address = array.children[0].contents.buffers[1]
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": (address, False)}


def _what_it_says(error: Exception) -> str:
    return first_line(error)[:100].rstrip(".")
