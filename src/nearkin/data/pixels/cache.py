"""The cache of decoded images on disk, found again by the content of the files they came from.

A pack is a folder with the tiles of the images that were decoded together (`tiles.bin`, raw) and a table of them
(`index.npz`: digest of the file, size, checksum of the tiles). Images are found one by one, so another
split or a folder that has grown decodes only what is new. A pack appears under its name when it is complete; one that
turns out to be damaged is thrown away and its images are decoded again.
"""
# MERGED: Image files looked up in the cache, measured by their headers, and decoded once, on all cores.

import hashlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.images import Progress
from nearkin.data.pixels.decode import BadImage, decode, measure, read
from nearkin.data.pixels.stores import each
from nearkin.data.pixels.tiles import TILE, Packed, first_tiles, tile_counts, write_tiles
from nearkin.errors import NearkinError

VERSION = 1  # of the format and of the pixels: raise it when decode.py changes what it makes
DIGEST = 16  # bytes
_STALE = 24 * 3600  # seconds after which a pack that was never finished is taken for a dead one


class Entry(NamedTuple):
    """What is known of a decoded image."""

    key: bytes  # digest of its file
    size: tuple[int, int]
    check: int  # checksum of its tiles


class Place(NamedTuple):
    """Where a cached image lies."""

    pack: "Pack"
    row: int


class DamagedPack(Exception):  # noqa: N818 (not an error the user sees)
    """A pack whose contents are not what was written; it has been removed."""


def digest(data: bytes) -> bytes:
    """What identifies an image file, wherever it lies and whatever it is called."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def checksum(tiles: NDArray[np.uint8]) -> int:
    """CRC-32 of an image's tiles."""
    return zlib.crc32(tiles.data)


def packs_folder(cache: Path, *, short: int, channels: int) -> Path:
    """The folder of all packs of images stored alike."""
    return cache / f"pixels-v{VERSION}" / f"{short}x{channels}"


class Pack:
    """A pack that is opened for reading."""

    def __init__(self, path: Path, *, channels: int) -> None:
        self.path = path
        try:
            with (path / "index.npz").open("rb") as file, np.load(file, allow_pickle=False) as table:
                self.digests, self.check = table["digest"], table["check"]
                size = torch.from_numpy(table["size"])
            self.sizes: list[tuple[int, int]] = [(h, w) for h, w in size.tolist()]
            self.ends: list[int] = tile_counts(size, channels).cumsum(0).tolist()
            self.tiles = np.memmap(path / "tiles.bin", np.uint8, mode="r").reshape(-1, TILE)
        except Exception:  # a cut or mangled file fails in many ways
            self.remove()
            raise DamagedPack(path) from None

    def copy(self, row: int, slot: Tensor) -> None:
        """Copy an image's tiles, and make sure that they are what was written."""
        tiles = self.tiles[self.ends[row - 1] if row else 0 : self.ends[row]]
        if checksum(tiles) != int(self.check[row]):
            self.remove()
            raise DamagedPack(self.path)
        slot.numpy()[:] = tiles

    def remove(self) -> None:
        """Throw the pack away."""
        shutil.rmtree(self.path, ignore_errors=True)


class Packs:
    """All packs of a folder as one table."""

    def __init__(self, folder: Path, *, channels: int) -> None:
        self.table: dict[bytes, Place] = {}
        for path in sorted(folder.glob("pack-*")):
            try:
                pack = Pack(path, channels=channels)
            except DamagedPack:
                continue
            for row, key in enumerate(pack.digests):
                self.table[key.tobytes()] = Place(pack, row)

    def __len__(self) -> int:
        return len(self.table)

    def find(self, key: bytes) -> Place | None:
        """Where an image is, None where it is not here."""
        return self.table.get(key)


class PackWriter:
    """A pack in the making: tiles as they are decoded, then the table; without the table it never was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("new-*"):
                if time.time() - old.stat().st_mtime > _STALE:
                    shutil.rmtree(old, ignore_errors=True)
            self.path = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
            self.file = (self.path / "tiles.bin").open("wb")
        except OSError as error:
            raise self._sentence(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        shutil.rmtree(self.path, ignore_errors=True)  # nothing is left where finish() has renamed it

    def add(self, entry: Entry, tiles: Tensor) -> None:
        """Append an image."""
        try:
            self.file.write(tiles.numpy().data)
        except OSError as error:
            raise self._sentence(error) from None
        self.entries.append(entry)

    def finish(self) -> None:
        """Write the table and give the pack its name; a pack of nothing is left to vanish."""
        if not self.entries:
            return
        keys, size, check = zip(*self.entries, strict=True)
        name = f"pack-{digest(b''.join(keys)).hex()}"
        digests = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, DIGEST)
        try:
            self.file.close()
            np.savez(self.path / "index.npz", digest=digests, size=np.array(size), check=np.array(check))
            if not (self.folder / name).exists():  # another process may have made the same one meanwhile
                self.path.rename(self.folder / name)
        except OSError as error:
            raise self._sentence(error) from None

    def _sentence(self, error: OSError) -> NearkinError:
        why = error.strerror or str(error)
        return NearkinError(f"Cannot keep decoded images in {self.folder}: {why}; make room or name another folder.")


CHUNK = 2**28 // TILE  # tiles that are decoded before they move on to the device and the cache: a quarter of a GiB
PROBE = 32  # files that are looked up in the cache before all are


class Files(NamedTuple):
    """Image files, and what is wanted of them."""

    paths: Sequence[Path]
    short: int
    channels: int
    limit: int
    progress: Progress


def look_up(files: Files, packs: Packs | None) -> list[Place | None]:
    """Which images are in the cache. If no image of a sample is, the others are not read to find out."""

    def find(path: Path) -> Place | None:
        try:
            return packs.find(digest(read(path))) if packs is not None else None
        except BadImage:
            return None

    if not packs or not any(each(find, files.paths[:: max(1, len(files.paths) // PROBE)])):
        return [None] * len(files.paths)
    return each(find, files.paths, progress=files.progress)


def measure_all(files: Files, places: Sequence[Place | None]) -> tuple[Tensor, list[BadImage]]:
    """Every image's size [N, 2], from the cache or from its header; 0, 0 for those whose header is bad, and these."""

    def look(row: int) -> tuple[int, int] | BadImage:
        try:
            return measure(files.paths[row], short=files.short, limit=files.limit)
        except BadImage as error:
            return BadImage(error.path, error.reason, row=row)

    sizes = [(0, 0) if place is None else place.pack.sizes[place.row] for place in places]
    unknown = [row for row, place in enumerate(places) if place is None]
    bad = []
    for row, found in zip(unknown, each(look, unknown, progress=files.progress), strict=True):
        if isinstance(found, BadImage):
            bad.append(found)
        else:
            sizes[row] = found
    return torch.tensor(sizes, dtype=torch.int64).view(-1, 2), bad


def decode_all(
    files: Files,
    places: Sequence[Place | None],
    size: Tensor,
    *,
    device: torch.device,
    writer: PackWriter | None,
) -> tuple[Packed, list[BadImage]]:
    """All images as tiles on the device, and those that could not be decoded; what is new goes to the writer too."""
    first, count = first_tiles(size, files.channels), tile_counts(size, files.channels)
    tiles = torch.empty(int(1 + count.sum()), TILE, dtype=torch.uint8, device=device)
    tiles[0] = 0
    bad: list[BadImage] = []
    begin, counts, sizes = first.tolist(), count.tolist(), size.tolist()

    def one(job: tuple[int, Tensor]) -> Entry | BadImage | None:
        row, slot = job
        place, (height, width) = places[row], sizes[row]
        if place is None:
            return _decode(files, row, slot, (height, width))
        place.pack.copy(place.row, slot)
        return None

    for rows in _chunks(counts):
        start, end = begin[rows[0]], begin[rows[-1]] + counts[rows[-1]]
        here = tiles[start:end]
        chunk = here if device.type == "cpu" else torch.empty(here.shape, dtype=torch.uint8, pin_memory=True)
        jobs = [(row, chunk[begin[row] - start :][: counts[row]]) for row in rows if counts[row]]
        for (_, slot), done in zip(
            jobs, each(one, jobs, progress=_after(files.progress, rows, len(counts))), strict=True
        ):
            if isinstance(done, BadImage):
                bad.append(done)
            elif done is not None and writer is not None:
                writer.add(done, slot)
        if chunk is not here:
            here.copy_(chunk, non_blocking=True)
    if writer is not None:
        writer.finish()
    return Packed(tiles, first.to(device), size.to(device)), bad


def _decode(files: Files, row: int, slot: Tensor, size: tuple[int, int]) -> Entry | BadImage:
    path = files.paths[row]
    try:
        data = read(path)
        image = decode(data, path, short=files.short, channels=files.channels, limit=files.limit)
    except BadImage as error:
        return BadImage(path, error.reason, row=row)
    if tuple(image.shape[1:]) != size:
        return BadImage(path, "it was changed while it was being read", row=row)
    write_tiles(image, slot)
    return Entry(digest(data), size, checksum(slot.numpy()))


def _chunks(counts: list[int]) -> Iterator[range]:
    """Ranges of rows of about CHUNK tiles, at least one row each."""
    start = held = 0
    for row, count in enumerate(counts):
        held += count
        if held >= CHUNK or row == len(counts) - 1:
            yield range(start, row + 1)
            start, held = row + 1, 0


def _after(progress: Progress, rows: range, total: int) -> Progress:
    """A progress that counts from the first of some rows on."""
    return None if progress is None else lambda done, _: progress(rows.start + done, total)
