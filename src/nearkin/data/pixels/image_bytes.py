"""The bytes of image files: open and read them safely, wherever they are, or say what is wrong with a file."""

import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from nearkin.data.images import LeftOut
from nearkin.data.paths import Place
from nearkin.data.pixels.archives import locate
from nearkin.errors import NearkinError

FILE_LIMIT = 2**30
"""Bytes of the largest file that is read: more than the largest image that is decoded needs without compression."""

READS = 100_000
"""Most reads by Pillow of one file: several times what twenty megabytes of PNG in small chunks need."""


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
        raise unreadable(path, error) from None
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


def unreadable(path: Path | str, error: OSError) -> BadImage:
    """Return the error to raise if reading fails."""
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
            raise unreadable(path, error) from None
    if not data:
        raise BadImage(path, "it is empty")
    return data
