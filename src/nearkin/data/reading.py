"""Image files looked up in the cache, measured by their headers, and decoded once, on all cores."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.data.decode import BadImage, decode, measure, read
from nearkin.data.images import Progress
from nearkin.data.packs import Entry, Packs, PackWriter, Place, checksum, digest
from nearkin.data.parallel import each
from nearkin.data.pixels import TILE, Packed, first_tiles, tile_counts, write_tiles

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
