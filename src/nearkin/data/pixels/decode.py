"""Decode image files to uint8 pixels of a given short side, or say what is wrong with a file.

The short side becomes `short_side`, the long side follows (rounded down); without `enlarge` a smaller image keeps its
size. An image longer than twice its short side is
first cut at both ends. Resizing is bilinear with antialiasing. Orientation tags are applied, transparency is blended
with white, palettes, CMYK and 16 bits per channel become 8-bit RGB, an animation gives its first frame; colour profiles
are ignored. JPEG files are decoded by simplejpeg if it is installed, else by Pillow, with the same pixels. The content
of a file decides how it is read, not its name.
"""

import ctypes
import io
import os
import stat
import struct
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from nearkin.data.images import LeftOut, counted, listed
from nearkin.data.paths import Place
from nearkin.data.pixels.archives import locate
from nearkin.errors import NearkinError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None
try:
    import pillow_heif
except ImportError:
    pillow_heif = None  # type: ignore[assignment, unused-ignore]
else:
    pillow_heif.register_heif_opener()

Bytes = NDArray[np.uint8]

PIXEL_LIMIT = 100_000_000
"""Images with more pixels are treated as decompression bombs. Pillow itself refuses more than 179 million."""

FORMATS: tuple[str, ...] = (
    "AVIF",
    "BMP",
    "GIF",
    "JPEG",
    "JPEG2000",
    "PNG",
    "PPM",
    "TIFF",
    "WEBP",
    *(("HEIF",) if pillow_heif else ()),
)
"""Formats that are read, by Pillow's names. Pillow knows more, some of which start other programs."""

RAW = frozenset({".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".rw2", ".srw"})
"""Suffixes of cameras' raw files. Many are TIFF files in which Pillow finds only a thumbnail."""

_READ = (
    "avif avifs bmp gif heic heics heif heifs hif j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx mpo pbm pgm png pnm ppm "
    "tif tiff webp"
)
_NOT_READ = "dds emf eps exr hdr icns ico jxl jxr pcx psd qoi sgi svg svgz tga wdp wmf xcf"
SUFFIXES = frozenset(f".{name}" for name in (*_READ.split(), *_NOT_READ.split())) | RAW
"""Suffixes of images, also of formats that cannot be read, so that such images are named and not just missing."""

FILE_LIMIT = 2**30
"""Bytes of the largest file that is read: more than an image of PIXEL_LIMIT needs without compression."""

READS = 100_000
"""Most reads by Pillow of one file: several times what twenty megabytes of PNG in small chunks need."""

SMALL = 64
"""The largest short side of a small image, in pixels."""

_GREY = ("1", "L", "LA", "I")  # Pillow's grey modes
_MAGIC = 32  # bytes by which a format is recognised
_HEAD, _JPEG = 2**16, b"\xff\xd8\xff"  # bytes that usually tell the size of a JPEG, and its first ones
_BRANDS = {  # of the box `ftyp` at the start of a file; AVIF first, since its files may name those of HEIF as well
    "AVIF": {b"avif", b"avis"},
    "HEIF": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"},
}
_JPEG_XL = (b"\xff\x0a", b"\0\0\0\x0cJXL ")
_NO_PICTURES = ("BUFR", "GRIB", "HDF5", "MPEG")  # which Pillow knows as well
_TEXT = frozenset({7, 8, 9, 10, 12, 13, 27, *range(32, 256)}) - {127}
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = (5, 6, 7, 8)  # its values that swap height and width
_LUMA = (19595, 38470, 7471)  # Rec. 601 in 1/65536


class Storage(NamedTuple):
    """How images are kept: at a short side of `short_side`, smaller ones enlarged to it or at their own size."""

    short_side: int
    enlarge: bool = True


class BadImage(NearkinError):  # noqa: N818 (it is an image)
    """An image that cannot be used; the message names the file and says why."""

    def __init__(self, path: Path | str, reason: str, *, row: int = -1) -> None:
        super().__init__(f"Cannot use the image {path}: {reason}. Replace it or take it out of the data.")
        self.path, self.reason, self.row = Path(path), reason, row

    @property
    def left_out(self) -> LeftOut:
        """File and reason."""
        return LeftOut(self.path, self.reason)


def none_usable(bad: Sequence[BadImage], total: int) -> NearkinError:
    """Return the error to raise if no image can be used."""
    return bad[0] if total == 1 else NearkinError(f"None of the {total:,} images can be used. The first: {bad[0]}")


def describe_misnamed(paths: Iterable[Path]) -> list[str]:
    """Return a sentence that lists the images whose content is of another format than their names say."""
    known = Image.registered_extensions()
    names = []
    for path in paths:
        try:
            with open_image(path) as file:
                found = format_of(file.read(_MAGIC))
        except (BadImage, OSError):  # reported where it is decoded
            continue
        if found in FORMATS and known.get(path.suffix.lower(), found) != found:
            names.append(f"{path} ({found})")
    if not names:
        return []
    count = counted(len(names), "image is", "images are")
    return [f"{count} read by content, which is of another format than the name says: {listed(names)}."]


def format_of(start: bytes) -> str | None:
    """Return the format of a file by its first bytes, in Pillow's words, also if it is not one of FORMATS."""
    if start[4:8] == b"ftyp":
        brands = {start[place : place + 4] for place in (8, *range(16, len(start), 4))}
        return next((name for name, known in _BRANDS.items() if brands & known), None)
    if start.startswith(_JPEG_XL):
        return "JPEG XL"
    Image.init()
    for name in (*FORMATS, *Image.OPEN):
        accept = Image.OPEN[name][1]
        try:
            if accept is not None and accept(start):
                return name
        except (IndexError, SyntaxError, TypeError, struct.error):  # too few bytes, as Pillow itself takes it
            continue
    return None


def looks_like_image(path: Path) -> bool:
    """Whether the first bytes of a file are those of an image, of whatever format."""
    try:
        with open_image(path) as file:
            start = file.read(_MAGIC)
    except (BadImage, OSError):
        return False
    known = None if _TEXT.issuperset(start) else format_of(start)  # words may begin like a format: "BM", "P5"
    return known is not None and known not in _NO_PICTURES


class TooManyParts(OSError):  # noqa: N818 (it says what is wrong)
    """A file with so many small parts that reading it is meant to keep a processor busy."""


class BoundedFile(io.BytesIO):
    """A file in memory with a limit on the number of reads.

    Pillow reads the parts of a file one by one. A few megabytes can hold millions of empty parts, which take a minute.
    """

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes, or raise TooManyParts."""
        self.reads += 1
        if self.reads > READS:
            raise TooManyParts("it has more parts than any honest file")
        return super().read(size)


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


def open_regular(path: Path, *, limited: bool = True) -> IO[bytes]:
    """Open a file that can be read to its end, within FILE_LIMIT if `limited`, or raise a BadImage.

    A named pipe or a device is refused: it would block, or never end.
    """
    try:
        _check_regular(path, os.stat(path), limited)  # first, because opening a device can already act on it
        # Without O_NONBLOCK, a pipe that has taken the file's place since would block here.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise BadImage(path, "there is no such file") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        _check_regular(path, os.fstat(number), limited)
    except BadImage:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def _check_regular(path: Path, known: os.stat_result, limited: bool) -> None:
    if not stat.S_ISREG(known.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(known.st_mode), "a device")
        raise BadImage(path, f"it cannot be read, because it is {kind} and not a file")
    if limited and known.st_size > FILE_LIMIT:
        raise _too_large(path, known.st_size)


def _too_large(path: Path | str, size: int) -> BadImage:
    return BadImage(path, f"{size:,} bytes are over the limit of {FILE_LIMIT:,} for one file")


def _unreadable(path: Path | str, error: OSError) -> BadImage:
    return BadImage(path, f"it cannot be read ({error.strerror or error})")


def open_image(path: Path | str) -> IO[bytes]:
    """Open the bytes of an image for reading, or raise a BadImage."""
    place = locate(path)
    return open_regular(Path(place.file)) if place.size < 0 else io.BytesIO(read_place(place, path))


def read_bytes(path: Path) -> bytes:
    """Return the bytes of an image, or raise a BadImage."""
    return read_place(locate(path), path)


def read_place(place: Place, path: Path | str) -> bytes:
    """Return the bytes of an image from its place; `path` is what the message of a BadImage names."""
    within = place.size >= 0
    if place.size > FILE_LIMIT:
        raise _too_large(path, place.size)
    with open_regular(Path(place.file), limited=not within) as file:
        try:
            file.seek(place.offset)
            data = file.read(place.size if within else os.fstat(file.fileno()).st_size)  # bounded, even if it grows
        except OSError as error:
            raise _unreadable(path, error) from None
    if not data:
        raise BadImage(path, "it is empty")
    return data


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
        raise _unreadable(path, error) from None


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
    start = file.read(_MAGIC)
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
            extra = "; pip install 'nearkin[heif]' adds HEIF" if other in _BRANDS else ""
            raise BadImage(path, f"its content is {other}; the formats read are {', '.join(FORMATS)}{extra}") from None
        raise BadImage(path, "it is not an image of a known format" if start else "it is empty") from None
    except Exception as error:  # Pillow raises many kinds of errors for a damaged header
        raise BadImage(path, f"its header is damaged ({_first_line(error)})") from None
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
            "it is truncated" if "truncated" in str(error) else f"its pixels cannot be decoded ({_first_line(error)})"
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100].rstrip(".") or type(error).__name__
