"""Formats of image files: which are read, and which one a file has by its first bytes."""

import struct
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from nearkin.data.images import counted, listed
from nearkin.data.pixels.image_bytes import BadImage, open_image

try:
    import pillow_heif
except ImportError:
    pillow_heif = None  # type: ignore[assignment, unused-ignore]
else:
    pillow_heif.register_heif_opener()

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

MAGIC = 32  # bytes by which a format is recognised
BRANDS = {  # of the box `ftyp` at the start of a file; AVIF first, since its files may name those of HEIF as well
    "AVIF": {b"avif", b"avis"},
    "HEIF": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"},
}
_JPEG_XL = (b"\xff\x0a", b"\0\0\0\x0cJXL ")
_NO_PICTURES = ("BUFR", "GRIB", "HDF5", "MPEG")  # which Pillow knows as well
_TEXT = frozenset({7, 8, 9, 10, 12, 13, 27, *range(32, 256)}) - {127}


def describe_misnamed(paths: Iterable[Path]) -> list[str]:
    """Return a sentence that lists the images whose content is of another format than their names say."""
    known = Image.registered_extensions()
    names = []
    for path in paths:
        try:
            with open_image(path) as file:
                found = format_of(file.read(MAGIC))
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
        return next((name for name, known in BRANDS.items() if brands & known), None)
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
            start = file.read(MAGIC)
    except (BadImage, OSError):
        return False
    known = None if _TEXT.issuperset(start) else format_of(start)  # words may begin like a format: "BM", "P5"
    return known is not None and known not in _NO_PICTURES
