"""Images inside other files: in tar files, as webdataset writes them, and in Arrow files, as Hugging Face datasets.

Such an image has a path that leads through the file: `birds-0001.tar/000017.jpg`, or `data-00000.arrow/000000017`, the
row. Where the images are is looked up once per file and kept in the cache folder, by name, size and time of the file.
"""

import hashlib
import json
import os
import posixpath
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from nearkin.data.paths import Place, Table, table_of
from nearkin.errors import NearkinError, first_line
from nearkin.files import cache_dir, read_tensors, write_tensors

SUFFIXES = (".tar", ".arrow")
COLUMNS = ("names", "ends", "offset", "size")  # of an index of images in a file
Made = tuple[dict[str, Tensor], dict[str, Any]]  # what was found out about a file: arrays, and a record
_BLOCK = 512  # bytes of a tar file's header
_LONG_NAME, _SETTINGS, _FILE = b"L", b"x", (b"0", b"\0", b"7")  # types of a tar file's members


def locate(path: Path | str) -> Place:
    """Return where the bytes of an image are; those of a path through no other file are a file."""
    if (known := getattr(path, "place", None)) is not None:
        return cast("Place", known)
    text = os.fspath(path)
    if (file := archive_of(text)) is None:
        return Place(text)
    name = text[len(file) + 1 :].replace(os.sep, "/")
    with suppress(OSError, NearkinError):
        table = members(file)
        row = bisect_left(range(len(table)), name, key=table.name)
        if row < len(table) and table.name(row) == name:
            assert table.offset is not None
            assert table.size is not None
            return Place(file, int(table.offset[row]), int(table.size[row]))
    return Place(text)  # opening it says that there is no such file


def archive_of(path: Path | str) -> str | None:
    """Return the file that a path leads through; None for other paths."""
    text = os.fspath(path)
    for suffix in SUFFIXES:
        end = text.find(suffix + os.sep)
        while end >= 0:
            if os.path.isfile(file := text[: end + len(suffix)]):
                return file
            end = text.find(suffix + os.sep, end + 1)
    return None


def file_of(path: Path | str) -> str:
    """Return the file whose size and time show that an image has changed: its own, or the one it is in."""
    return archive_of(path) or os.fspath(path)


def members(file: str) -> Table:
    """Return where all files of a tar file, or the images of an Arrow file, are, in the order of their names."""
    return _members(version_of(file))


class Version(NamedTuple):
    """A file as it is now."""

    file: str
    size: int
    changed: int


def version_of(file: str) -> Version:
    """Return what tells whether a file has changed."""
    stat = os.stat(file)
    return Version(os.path.abspath(file), stat.st_size, stat.st_mtime_ns)


@lru_cache(4096)
def _members(version: Version) -> Table:
    file = version.file

    def look() -> Made:
        table = table_in(file, list(scan_tar(file))) if file.endswith(".tar") else arrow_images(file)
        return place_columns(table), {}

    found, _ = remembered("members", file, look)
    return Table((file,), (len(found["ends"]),), *(found[name].numpy() for name in COLUMNS))


def place_columns(table: Table) -> dict[str, Tensor]:
    """Return the columns of a table that say where its images are, to be kept."""
    return {name: torch.from_numpy(np.array(getattr(table, name))) for name in COLUMNS}


def remembered(what: str, file: str, make: Callable[[], Made]) -> Made:
    """Return what was found out about a file as it is now, from the cache folder, or make it and keep it there."""
    key = json.dumps([what, *version_of(file)])
    name = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    path = cache_dir() / "archives-v2" / f"{name}.safetensors"
    with suppress(NearkinError, OSError):
        if path.exists():
            return read_tensors(path)
    made = make()
    with suppress(NearkinError):  # the folder cannot be written to
        write_tensors(path, *made)
    return made


# Tar files.


class TarMember(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int
    size: int


def scan_tar(file: str) -> Iterator[TarMember]:
    """Yield the files in a tar file, reading only its headers."""
    length = os.stat(file).st_size
    with open(file, "rb", buffering=0) as tar:
        number, at, settings = tar.fileno(), 0, dict[str, str]()
        while at + _BLOCK <= length:
            head = os.pread(number, _BLOCK, at)
            if head[257:262] != b"ustar":
                if not head.strip(b"\0"):
                    return
                raise NearkinError(
                    f"{file} is no tar file, or is damaged at byte {at:,}; compressed ones are not read."
                )
            try:
                size = _number(head[124:136])
            except ValueError:
                raise NearkinError(f"{file} is damaged at byte {at:,}: a file in it has no size.") from None
            kind, start = head[156:157], at + _BLOCK
            size = int(settings.get("size", size))
            if start + size > length:
                raise NearkinError(f"{file} is truncated: it ends within the file at byte {at:,}.")
            if kind == _SETTINGS:
                settings |= _settings(os.pread(number, size, start))
            elif kind == _LONG_NAME:
                settings["path"] = _text(os.pread(number, size, start))
            else:
                if kind in _FILE:
                    prefix = _text(head[345:500]) if head[262:263] == b"\0" else ""
                    name = settings.get("path") or f"{prefix}/{_text(head[:100])}"
                    yield TarMember(posixpath.normpath(name).lstrip("/"), start, size)  # as Path writes it
                settings = {}
            at = start + -(-size // _BLOCK) * _BLOCK
        if at < length:
            raise NearkinError(f"{file} is truncated: it ends within the header at byte {at:,}.")


def _number(field: bytes) -> int:
    """A number in octal digits, or in base 256 if it is large."""
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(field.strip(b" \0") or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _settings(data: bytes) -> dict[str, str]:
    """The lines `length key=value` of a pax header."""
    found = {}
    while data:
        length = int(data.split(b" ", 1)[0])
        key, _, value = data[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        found[key.decode()] = value.decode(errors="surrogateescape")
        data = data[length:]
    return found


def table_in(file: str, found: Sequence[TarMember]) -> Table:
    """Return a table of members sorted by name; one that is there twice is an error."""
    found = sorted(found)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise NearkinError(f"{file} holds {one.name} twice: keep one of them.")
    places = np.array([(member.offset, member.size) for member in found], np.int64).reshape(-1, 2)
    table = table_of(file, (member.name for member in found))
    return replace(table, offset=places[:, 0].copy(), size=places[:, 1].copy())


# Arrow files.


def arrow_library() -> Any:
    """Return the module pyarrow, or raise an error that says how to get it."""
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise NearkinError("Arrow files need pyarrow: pip install 'nearkin[search]'.") from None
    return pyarrow


def arrow_batches(file: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, mapped into memory."""
    pyarrow = arrow_library()
    with pyarrow.memory_map(file) as mapped:
        try:
            try:
                yield from pyarrow.ipc.open_stream(mapped)
            except pyarrow.ArrowInvalid:
                mapped.seek(0)
                opened = pyarrow.ipc.open_file(mapped)
                yield from map(opened.get_batch, range(opened.num_record_batches))
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise NearkinError(f"Cannot read {file} as an Arrow file ({first_line(error)}).") from None


def image_column(schema: Any, file: str) -> str:
    """Return the name of the first column of images, which are structures of bytes and path."""
    for field in schema:
        if {"bytes", "path"} <= {field.type.field(n).name for n in range(field.type.num_fields)}:
            return str(field.name)
    raise NearkinError(f"{file} has no column of images: none of {', '.join(schema.names)} holds bytes and path.")


def arrow_images(file: str) -> Table:
    """Return where the images of an Arrow file are; their names are the numbers of their rows."""
    pyarrow = arrow_library()
    offset, size = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    with pyarrow.memory_map(file) as mapped:
        start, length = mapped.read_buffer(1).address, mapped.size()
    rows = 0
    for batch in arrow_batches(file):
        images = batch.column(image_column(batch.schema, file))
        data = images.field("bytes")
        kind = np.int64 if data.type == pyarrow.large_binary() else np.int32
        if images.null_count or data.null_count:
            missing = rows + int(np.flatnonzero(data.is_null().to_numpy(zero_copy_only=False))[0])
            raise NearkinError(
                f"Row {missing} of {file} holds no bytes of an image: save the data set with its images in it, or read "
                "them with csv:PATH."
            )
        _, places, content = data.buffers()
        ends = np.frombuffer(places, kind)[data.offset : data.offset + len(data) + 1].astype(np.int64)
        at = content.address - start
        if not 0 <= at <= length:
            raise NearkinError(f"{file} is compressed, so its images cannot be read one by one: save it uncompressed.")
        offset.append(at + ends[:-1])
        size.append(np.diff(ends))
        rows += len(data)
    table = table_of(file, (f"{row:09d}" for row in range(rows)))
    return replace(table, offset=np.concatenate(offset), size=np.concatenate(size))
