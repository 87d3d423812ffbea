"""Decode image files once, on all cores, and keep the results in a cache on disk, found by the files' contents.

A pack is a folder with the tiles of the images that were decoded together (`tiles.bin`, raw) and a table of them
(`index.npz`: digest of the file, size, checksum of the tiles). Images are looked up one by one, so another split or a
folder that has grown decodes only what is new. A pack is renamed to its final name when it is complete. A damaged pack
is removed and its images are decoded again.
"""

import hashlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.data.images import Progress
from nearkin.data.pixels.decode import decode, measure, stored_sizes
from nearkin.data.pixels.image_bytes import BadImage, read_bytes
from nearkin.data.pixels.threads import map_in_threads
from nearkin.data.pixels.tiles import TILE, Packed, first_tiles, tile_counts, write_tiles
from nearkin.errors import NearkinError
from nearkin.files import sync_file, sync_folder

VERSION = 1  # of the format and of the pixels: increase it if decode.py changes its output
DIGEST = 16  # bytes
_STALE = 24 * 3600  # seconds after which an unfinished pack is removed


class Entry(NamedTuple):
    """The record of a decoded image."""

    key: bytes  # digest of its file
    size: tuple[int, int]
    check: int  # CRC-32 of its tiles


class CachedImage(NamedTuple):
    """The place of an image in the cache."""

    pack: "Pack"
    row: int


class DamagedPack(Exception):  # noqa: N818 (not an error the user sees)
    """A pack whose contents differ from what was written; it has been removed."""


def digest(data: bytes) -> bytes:
    """Return what identifies an image file, independent of its name and folder."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def packs_folder(cache: Path, *, short_side: int, channels: int, enlarge: bool = True) -> Path:
    """Return the folder of the packs with this (largest) short side and number of channels."""
    return cache / f"pixels-v{VERSION}" / f"{'' if enlarge else 'max-'}{short_side}x{channels}"


class Pack:
    """A pack opened for reading."""

    def __init__(self, path: Path, *, channels: int) -> None:
        self.path = path
        try:
            with (path / "index.npz").open("rb") as file, np.load(file, allow_pickle=False) as table:
                self.digests, self.check = table["digest"], table["check"]
                size = torch.from_numpy(table["size"])
            self.sizes: list[tuple[int, int]] = [(h, w) for h, w in size.tolist()]
            self.ends: list[int] = tile_counts(size, channels).cumsum(0).tolist()
            whole = (path / "tiles.bin").stat().st_size == TILE * self.ends[-1]
        except Exception:  # a truncated or damaged file fails in many ways
            whole = False
        if not whole:
            self.remove()
            raise DamagedPack(path)

    def copy(self, row: int, target: Tensor) -> None:
        """Read an image's tiles into `target` and verify their checksum."""
        tiles = target.numpy().data.cast("B")
        try:
            with (self.path / "tiles.bin").open("rb", buffering=0) as file:  # in one piece, unlike a mapping's pages
                file.seek(TILE * self.ends[row - 1] if row else 0)
                whole = file.readinto(tiles) == len(tiles)
        except OSError:
            whole = False
        if not whole or zlib.crc32(tiles) != int(self.check[row]):
            self.remove()
            raise DamagedPack(self.path)

    def remove(self) -> None:
        """Delete the pack."""
        shutil.rmtree(self.path, ignore_errors=True)


def read_packs(folder: Path, *, channels: int) -> dict[bytes, CachedImage]:
    """Return the place of each image in the packs of a folder, by the digest of its file."""
    table: dict[bytes, CachedImage] = {}
    for path in sorted(folder.glob("pack-*")):
        with suppress(DamagedPack):
            pack = Pack(path, channels=channels)
            table |= {key.tobytes(): CachedImage(pack, row) for row, key in enumerate(pack.digests)}
    return table


class PackWriter(NamedTuple):
    """A pack that is being written."""

    tiles: BinaryIO
    entries: list[Entry]

    def add(self, results: Sequence["Entry | BadImage | None"], tiles: Sequence[Tensor]) -> None:
        """Append the images that were decoded, which have an entry among the results."""
        for entry, pixels in zip(results, tiles, strict=True):
            if isinstance(entry, Entry):
                self.tiles.write(pixels.numpy().data)
                self.entries.append(entry)


@contextmanager
def write_pack(folder: Path) -> Iterator[PackWriter]:
    """Write a pack, which gets its final name at the end of the context. After an error nothing is left of it."""
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("new-*"):
            if time.time() - old.stat().st_mtime > _STALE:
                shutil.rmtree(old, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
        with (path / "tiles.bin").open("wb") as file:
            writer = PackWriter(file, [])
            yield writer  # not flushed to disk, which takes many seconds: checksums show what a power failure lost
        if writer.entries:
            keys, size, check = zip(*writer.entries, strict=True)
            digests = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, DIGEST)
            with (path / "index.npz").open("wb") as table:
                np.savez(table, digest=digests, size=np.array(size), check=np.array(check))
                sync_file(table)
            sync_folder(path)
            final = folder / f"pack-{digest(b''.join(keys)).hex()}"
            if not final.exists():  # another process may have written the same pack
                path.rename(final)
                sync_folder(folder)
    except OSError as error:
        why = error.strerror or str(error)
        raise NearkinError(f"Cannot write decoded images to {folder}: {why}. Make room or set NEARKIN_CACHE.") from None
    finally:
        if path != folder:
            shutil.rmtree(path, ignore_errors=True)


CHUNK = 2**28 // TILE  # tiles that are decoded before they are copied to the device and the cache: a quarter of a GiB
PROBE = 32  # files that are looked up in the cache first


class Files(NamedTuple):
    """Image files and how to read them."""

    paths: Sequence[Path]
    short_side: int
    channels: int
    progress: Progress
    enlarge: bool = True  # images with a smaller short side


def find_cached(files: Files, packs: Mapping[bytes, CachedImage]) -> list[CachedImage | None]:
    """Look up each image in the cache. If no image of a sample is found, the others are not read."""

    def find(path: Path) -> CachedImage | None:
        try:
            return packs.get(digest(read_bytes(path)))
        except BadImage:
            return None

    if not packs or not any(map_in_threads(find, files.paths[:: max(1, len(files.paths) // PROBE)])):
        return [None] * len(files.paths)
    return map_in_threads(find, files.paths, progress=files.progress)


def measure_all(files: Files, cached: Sequence[CachedImage | None]) -> tuple[Tensor, list[BadImage]]:
    """Return each image's size [N, 2], from the cache or its header, and the images with a bad header (size 0, 0)."""

    def look(row: int) -> tuple[int, int] | BadImage:
        try:
            return measure(files.paths[row], short_side=files.short_side, enlarge=files.enlarge)
        except BadImage as error:
            return BadImage(error.path, error.reason, row=row)

    known = getattr(files.paths, "shapes", None)
    size = torch.zeros(len(cached), 2, dtype=torch.int64)
    if known is not None:
        size = stored_sizes(known, files.short_side, enlarge=files.enlarge)
    found = {row: image.pack.sizes[image.row] for row, image in enumerate(cached) if image is not None}
    size[list(found)] = torch.tensor(list(found.values()), dtype=torch.int64).view(-1, 2)
    unknown = (size[:, 0] == 0).nonzero().flatten().tolist()
    looked = map_in_threads(look, unknown, progress=files.progress)
    bad = [image for image in looked if isinstance(image, BadImage)]
    measured = [(0, 0) if isinstance(one, BadImage) else one for one in looked]
    size[unknown] = torch.tensor(measured, dtype=torch.int64).view(-1, 2)
    return size, bad


def decode_all(
    files: Files,
    cached: Sequence[CachedImage | None],
    size: Tensor,
    *,
    device: torch.device,
    writer: PackWriter | None,
) -> tuple[Packed, list[BadImage]]:
    """Return all images as tiles on the device, and those that cannot be decoded. New ones also go to the writer."""
    first, count = first_tiles(size, files.channels), tile_counts(size, files.channels)
    tiles = torch.empty(int(1 + count.sum()), TILE, dtype=torch.uint8, device=device)
    tiles[0] = 0
    bad: list[BadImage] = []
    written: Future[None] | None = None
    starts, counts, sizes = first.tolist(), count.tolist(), size.tolist()

    def one(job: tuple[int, Tensor]) -> Entry | BadImage | None:
        row, target = job
        found, (height, width) = cached[row], sizes[row]
        if found is None:
            return _decode(files, row, target, (height, width))
        found.pack.copy(found.row, target)
        return None

    with ThreadPoolExecutor(1) as background:  # writes a chunk while the next one is decoded
        for rows in _chunks(counts):
            start, end = starts[rows[0]], starts[rows[-1]] + counts[rows[-1]]
            wanted = tiles[start:end]
            chunk = wanted if device.type == "cpu" else torch.empty(wanted.shape, dtype=torch.uint8, pin_memory=True)
            jobs = [(row, chunk[starts[row] - start :][: counts[row]]) for row in rows if counts[row]]
            results = map_in_threads(one, jobs, progress=_offset(files.progress, rows.start, len(counts)))
            bad += [done for done in results if isinstance(done, BadImage)]
            if chunk is not wanted:
                wanted.copy_(chunk, non_blocking=True)
            if writer is not None:
                if written is not None:
                    written.result()
                written = background.submit(writer.add, results, [target for _, target in jobs])
    if written is not None:
        written.result()
    return Packed(tiles, first.to(device), size.to(device)), bad


def _decode(files: Files, row: int, target: Tensor, size: tuple[int, int]) -> Entry | BadImage:
    path = files.paths[row]
    try:
        data = read_bytes(path)
        image = decode(data, path, short_side=files.short_side, channels=files.channels, enlarge=files.enlarge)
    except BadImage as error:
        return BadImage(path, error.reason, row=row)
    if tuple(image.shape[1:]) != size:
        return BadImage(path, "it was changed while it was being read", row=row)
    write_tiles(image, target)
    return Entry(digest(data), size, zlib.crc32(target.numpy().data))


def _chunks(counts: list[int]) -> Iterator[range]:
    """Ranges of rows of about CHUNK tiles, at least one row each."""
    start = held = 0
    for row, count in enumerate(counts):
        held += count
        if held >= CHUNK or row == len(counts) - 1:
            yield range(start, row + 1)
            start, held = row + 1, 0


def _offset(progress: Progress, start: int, total: int) -> Progress:
    """A progress callback that counts from `start`."""
    return None if progress is None else lambda done, _: progress(start + done, total)
