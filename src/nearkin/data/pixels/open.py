"""Opening images for use: in the device's memory if they fit, else in the host's, else as a stream from their files."""
# MERGED: Images that stay open from one training to the next, in one process.
# MERGED: Images as a caller has them, files or pixels in memory, turned into a store.

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearkin.data.images import Dataset, Images, Progress, counted, listed
from nearkin.data.pixels.cache import (
    DamagedPack,
    Files,
    Packs,
    PackWriter,
    decode_all,
    look_up,
    measure_all,
    packs_folder,
)
from nearkin.data.pixels.decode import PIXEL_LIMIT, BadImage, as_channels, decode, picture, read, resize, stored_size
from nearkin.data.pixels.stores import Resident, Stream, each
from nearkin.data.pixels.tiles import TILE, Packed, first_tiles, tile_counts, write_tiles
from nearkin.data.pixels.views import short_side
from nearkin.errors import NearkinError

Store = Resident | Stream
Keep = Literal["auto", "device", "host", "stream"]

GIB = 2**30
_PART = 1024  # images in memory that are resized at once


def open_store(
    images: Images,
    *,
    short: int,
    device: torch.device | str,
    channels: int = 3,
    cache: Path | None = None,
    progress: Progress = None,
    keep: Keep = "auto",
    limit: int = PIXEL_LIMIT,
) -> tuple[Store, Images, list[BadImage]]:
    """Open images at short side `short`: return the store, the images in it, and those that cannot be used.

    Rows of the store are rows of the images returned. Pixels in memory stay at their own size where it suits `short`.
    `progress` counts twice: looking at the files, then decoding them. `keep` overrules where they are kept.
    Within `keep_images_open()` files that were opened before with the same arguments are not read again.
    """
    kept = _KEPT.get()
    if kept is None or isinstance(images.sources, Tensor):
        return _read_store(images, short, torch.device(device), channels, cache, progress, keep, limit)
    key = (short, str(device), channels, keep, limit, tuple(images.sources))
    if key in kept.stores:
        kept.stores[key] = store, bad = kept.stores.pop(key)  # now the most recent
        return store, _usable(images, bad), bad
    while len(kept.stores) >= kept.most:
        del kept.stores[next(iter(kept.stores))]
    store, good, bad = _read_store(images, short, torch.device(device), channels, cache, progress, keep, limit)
    kept.stores[key] = store, bad
    return store, good, bad


@contextmanager
def keep_images_open(most: int = 3) -> Iterator[None]:
    """Open image files once within this context, however often `open_store` is called for them.

    The `most` recently used stores are kept (training, held-out and test images of a run); the oldest is freed before
    another one is opened. Files are assumed not to change meanwhile. All stores are freed at the end of the context.
    A context inside another one shares its stores. Also usable as a decorator.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set(_Kept(most, {}))
    try:
        yield
    finally:
        _KEPT.reset(token)


class _Kept(NamedTuple):
    most: int
    stores: dict[tuple[Any, ...], tuple[Store, list[BadImage]]]  # the most recently used last


_KEPT: ContextVar[_Kept | None] = ContextVar("kept stores", default=None)


def _read_store(
    images: Images,
    short: int,
    device: torch.device,
    channels: int,
    cache: Path | None,
    progress: Progress,
    keep: Keep,
    limit: int,
) -> tuple[Store, Images, list[BadImage]]:
    if not len(images):
        raise NearkinError("There are no images to open.")
    if isinstance(images.sources, Tensor):
        packed = pack_tensor(images.sources, short=short, channels=channels)
        there = _choose(packed.tiles.numel(), device, keep, never="stream")
        return _resident(packed, there, short=short, channels=channels, device=device), images, []
    files = Files(images.sources, short, channels, limit, progress)
    folder = None if cache is None else packs_folder(cache, short=short, channels=channels)
    for _ in range(3):
        try:
            return _open_files(files, images, device=device, folder=folder, keep=keep)
        except DamagedPack:  # it has been removed, so the next round decodes what was in it
            continue
    raise NearkinError(f"The decoded images in {folder} are damaged and cannot be removed: delete that folder.")


def unreadable(dataset: Dataset, *, progress: Progress = None) -> list[str]:
    """Sentences that name the images of a data set that cannot be used: each is read to its end."""

    def look(job: tuple[int, Path]) -> BadImage | None:
        row, path = job
        try:
            decode(read(path), path, short=64, channels=3)
        except BadImage as error:
            return BadImage(path, error.reason, row=row)
        return None

    sentences = []
    for name, part in (("training", dataset.train), ("test", dataset.test)):
        if not isinstance(part.sources, Tensor):
            found = each(look, list(enumerate(part.sources)), progress=progress)
            if bad := [image for image in found if image is not None]:
                sentences.append(left_out(bad, part, name))
    return sentences


def left_out(bad: Sequence[BadImage], images: Images, what: str) -> str:
    """What a person is told of images that cannot be used: which, why, and the classes that have too few others."""
    count = counted(len(bad), f"{what} image", f"{what} images")
    told = f"{count} cannot be read, so left out: {listed([f'{image.path} ({image.reason})' for image in bad])}."
    gone = torch.bincount(images.labels[[image.row for image in bad]], minlength=images.classes)
    few = [images.names[c] for c in ((gone > 0) & (images.counts - gone < 2)).nonzero().flatten().tolist()]
    return f"{told} That leaves fewer than two images of {listed(few)}." if few else told


def pack_tensor(pixels: Tensor, *, short: int, channels: int) -> Packed:
    """Images uint8 [N, C, H, W] as tiles; resized unless crops for which `short` is meant fit into them as they are."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise NearkinError(f"Pixels in memory are uint8 [N, C, H, W], not {pixels.dtype} {list(pixels.shape)}.")
    height, width = pixels.shape[2:]
    side = min(height, width)
    fits = side <= short <= short_side(side)
    shape = (height, width) if fits else stored_size(height, width, short)
    size = torch.tensor([shape]).repeat(len(pixels), 1)
    tiles = torch.zeros(int(1 + tile_counts(size, channels).sum()), TILE, dtype=torch.uint8)
    slots = tiles[1:].view(len(pixels), -1, TILE)
    for start in range(0, len(pixels), _PART):
        part = pixels[start : start + _PART].cpu()
        part = as_channels(part if fits else resize(part, short), channels)
        write_tiles(part.flatten(0, 1), slots[start : start + _PART])
    return Packed(tiles, first_tiles(size, channels), size)


def free_memory(device: torch.device) -> int:
    """Bytes that images may take on a device and still leave room for training."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free - max(4 * GIB, total // 3)
    free = _host_memory()
    return free - max(2 * GIB, free // 4)


def _host_memory() -> int:
    """Bytes that could be allocated, as far as the system says, within the limit of a container."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        known.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no Linux, no control group, or one without a limit ("max")
        pass
    if not known and hasattr(os, "sysconf"):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(known, default=4 * GIB)


def _choose(size: int, device: torch.device, keep: Keep, *, never: Keep | None = None) -> Keep:
    """Where images of so many bytes go."""
    if keep not in ("auto", "device", "host", "stream") or keep == never:
        raise NearkinError(f"Images are kept on the device, host or as a stream, or auto, not {keep!r}.")
    if keep != "auto":
        return keep
    if size <= free_memory(device):
        return "device"
    fits = size <= free_memory(torch.device("cpu")) or never == "stream"
    return "host" if fits else "stream"


def _resident(packed: Packed, there: Keep, *, short: int, channels: int, device: torch.device) -> Resident:
    if there == "device":
        packed = Packed(*(part.to(device) for part in packed))
    return Resident(packed, short=short, channels=channels, device=device)


def _open_files(
    files: Files, images: Images, *, device: torch.device, folder: Path | None, keep: Keep
) -> tuple[Store, Images, list[BadImage]]:
    """One attempt at opening; the cache may turn out to be damaged."""
    packs = None if folder is None or keep == "stream" else Packs(folder, channels=files.channels)
    places = look_up(files, packs)
    size, bad = measure_all(files, places)
    there = _choose(TILE * int(1 + tile_counts(size, files.channels).sum()), device, keep)
    if there == "stream":
        good = _good(size, bad)
        paths = [files.paths[row] for row in good.tolist()]
        stream = Stream(paths, size[good], short=files.short, channels=files.channels, device=device, limit=files.limit)
        return stream, _usable(images, bad), bad
    keeper = device if there == "device" else torch.device("cpu")
    with nullcontext() if folder is None or all(places) else PackWriter(folder) as writer:
        packed, late = decode_all(files, places, size, device=keeper, writer=writer)
    bad = sorted([*bad, *late], key=lambda image: image.row)
    packed = packed.rows(_good(size, bad).to(keeper))
    return Resident(packed, short=files.short, channels=files.channels, device=device), _usable(images, bad), bad


def _good(size: Tensor, bad: list[BadImage]) -> Tensor:
    """The rows that can be used."""
    good = torch.ones(len(size), dtype=torch.bool)
    good[[b.row for b in bad]] = False
    if not good.any():
        raise NearkinError(f"None of the {len(bad):,} images can be used. The first: {bad[0]}")
    return good.nonzero().flatten()


def _usable(images: Images, bad: list[BadImage]) -> Images:
    return images.without([b.row for b in bad]) if bad else images


Given = Sequence[str | Path] | Sequence[Tensor | NDArray[Any] | Image.Image] | Tensor | NDArray[Any]
"""Files; or uint8 pixels: a tensor [N, C, H, W], an array [N, H, W, C] or [N, H, W], or a list of single ones."""


def store_of(images: Given, *, short: int, channels: int, device: torch.device, progress: Progress = None) -> Store:
    """The store of some images; one that cannot be used is a sentence."""
    if isinstance(images, str | Path | Image.Image) or not hasattr(images, "__len__"):
        raise NearkinError("Images are given together: a list of files or of pixels, a tensor or an array.")
    if not len(images):
        raise NearkinError("There is nothing to embed: no image was given.")
    if isinstance(images, Tensor | np.ndarray):
        if images.ndim not in (3, 4) or (isinstance(images, Tensor) and images.ndim != 4):
            shape = list(images.shape)
            raise NearkinError(f"Pixels are a tensor [N, C, H, W] or an array [N, H, W, C] or [N, H, W], not {shape}.")
        tensor = images if isinstance(images, Tensor) else _channels_first(images)
        packed = pack_tensor(tensor, short=short, channels=channels)
    elif paths := [Path(image) for image in images if isinstance(image, str | Path)]:
        if len(paths) < len(images):
            raise NearkinError("A list holds files or pixels, not both: embed them one after the other.")
        return _of_files(paths, short, channels, device, progress)
    else:
        singles = [_single(image) for image in images]
        packed = _together([pack_tensor(i[None], short=short, channels=channels) for i in singles], channels)
    return Resident(Packed(*(part.to(device) for part in packed)), short=short, channels=channels, device=device)


def _of_files(paths: list[Path], short: int, channels: int, device: torch.device, progress: Progress) -> Store:
    given = Images(paths, torch.zeros(len(paths), dtype=torch.int64), ("",))
    store, _, bad = _read_store(given, short, device, channels, None, progress, "auto", PIXEL_LIMIT)
    if bad:
        raise NearkinError(f"{len(bad)} of {len(paths)} images cannot be embedded, the first: {bad[0]}")
    return store


def _channels_first(array: NDArray[Any]) -> Tensor:
    """Arrays [N, H, W, C] or [N, H, W], as other libraries have them, as a tensor [N, C, H, W]."""
    last = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(last, -1, 1)))


def _single(image: Any) -> Tensor:
    """One image as a tensor [C, H, W]."""
    if isinstance(image, Image.Image):
        return picture(image)
    pixels = image if isinstance(image, Tensor) else np.asarray(image)
    if pixels.ndim not in (2, 3):
        raise NearkinError(
            f"One image is a tensor [C, H, W] or an array [H, W, C] or [H, W], not {list(pixels.shape)}."
        )
    if isinstance(pixels, Tensor):
        return pixels if pixels.ndim == 3 else pixels[None]
    return _channels_first(pixels[None])[0]


def _together(parts: list[Packed], channels: int) -> Packed:
    """Packed images as one pack: their tiles one after the other behind one blank tile."""
    size = torch.cat([part.size for part in parts])
    tiles = torch.cat([parts[0].tiles[:1], *(part.tiles[1:] for part in parts)])
    return Packed(tiles, first_tiles(size, channels), size)
