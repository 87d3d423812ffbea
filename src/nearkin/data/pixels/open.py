"""The front door to pixels: open the images of a data set, image files, or whatever pixels a caller has.

Images are kept in the device's memory if they fit, else in the host's memory, else they are streamed from their files.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearkin import ranks
from nearkin.data.images import Dataset, Images, LeaveOut, Progress, counted, listed
from nearkin.data.paths import Paths
from nearkin.data.pixels.cache import (
    DamagedPack,
    Files,
    decode_all,
    find_cached,
    measure_all,
    packs_folder,
    read_packs,
    write_pack,
)
from nearkin.data.pixels.decode import Storage, as_channels, decode_file, measure, pillow_pixels, resize, stored_size
from nearkin.data.pixels.formats import describe_misnamed
from nearkin.data.pixels.image_bytes import BadImage, none_usable
from nearkin.data.pixels.stores import MemoryStore, Store, StreamStore
from nearkin.data.pixels.threads import map_in_threads
from nearkin.data.pixels.tiles import TILE, Packed, concatenate, first_tiles, tile_counts, write_tiles
from nearkin.data.pixels.views import short_side_for
from nearkin.errors import NearkinError

Location = Literal["auto", "device", "host", "stream"]
ImageInputs = Sequence[str | Path] | Sequence[Tensor | NDArray[Any] | Image.Image] | Tensor | NDArray[Any]
"""Files; or uint8 pixels: a tensor [N, C, H, W], an array [N, H, W, C] or [N, H, W], or a list of single images."""

GIB = 2**30
_CHUNK = 1024  # images in memory that are resized at once


class _KeptStores(NamedTuple):
    most: int
    stores: dict[tuple[Any, ...], tuple[Store, list[BadImage]]]  # the most recently used last


_KEPT: ContextVar[_KeptStores | None] = ContextVar("kept stores", default=None)


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
    token = _KEPT.set(_KeptStores(most, {}))
    try:
        yield
    finally:
        _KEPT.reset(token)


def open_store(
    images: Images,
    *,
    short_side: int,
    enlarge: bool = True,
    device: torch.device | str,
    channels: int = 3,
    cache: Path | None = None,
    progress: Progress = None,
    location: Location = "auto",
) -> tuple[Store, Images, list[BadImage]]:
    """Open images at a short side: return the store, the images in it, and those that cannot be used.

    Rows of the store are rows of the images returned. Without `enlarge` images with a smaller short side keep their
    size, with it only pixels in memory that suit `short_side`. `cache` is the folder for decoded images. `progress`
    counts twice: looking at the files, then decoding them.
    """
    device = torch.device(device)
    if isinstance(images.sources, Tensor):
        if not len(images):
            raise NearkinError("There are no images to open.")
        packed = pack_tensor(images.sources, short_side=short_side, channels=channels, enlarge=enlarge)
        chosen = _choose_location(packed.tiles.numel(), device, location, streamable=False)
        packed = packed.to(device) if chosen == "device" else packed
        return MemoryStore(packed, channels=channels, device=device, near_enough=True), images, []
    kept = _KEPT.get()
    key = (short_side, enlarge, str(device), channels, location, images.sources)
    if kept is not None and key in kept.stores:
        store, bad = kept.stores.pop(key)
    else:
        while kept is not None and len(kept.stores) >= kept.most:
            del kept.stores[next(iter(kept.stores))]
        opened, bad = open_files(
            images.sources,
            short_side=short_side,
            enlarge=enlarge,
            device=device,
            channels=channels,
            cache=cache,
            progress=progress,
            location=location,
        )
        if opened is None:
            raise none_usable(bad, len(images))
        store = opened
    if kept is not None:
        kept.stores[key] = store, bad  # now the most recently used
    return store, images.without([image.row for image in bad]) if bad else images, bad


def open_files(
    paths: Sequence[Path],
    *,
    short_side: int,
    enlarge: bool = True,
    device: torch.device,
    channels: int = 3,
    cache: Path | None = None,
    progress: Progress = None,
    location: Location = "auto",
) -> tuple[Store | None, list[BadImage]]:
    """Open image files: return the store, None if no image can be used, and the images left out of it."""
    if not paths:
        raise NearkinError("There are no images to open.")
    files = Files(paths, short_side, channels, progress, enlarge)
    how: dict[str, Any] = {"short_side": short_side, "channels": channels, "enlarge": enlarge}
    folder = None if cache is None else packs_folder(cache, **how)
    for _ in range(3):
        try:
            return _open_files(files, device, folder, location)
        except DamagedPack:  # it has been removed, so the next attempt decodes its images
            continue
    raise NearkinError(f"The decoded images in {folder} are damaged and cannot be removed: delete that folder.")


def _open_files(
    files: Files, device: torch.device, folder: Path | None, location: Location
) -> tuple[Store | None, list[BadImage]]:
    packs = {} if folder is None or location == "stream" else read_packs(folder, channels=files.channels)
    cached = find_cached(files, packs)
    size, bad = measure_all(files, cached)
    chosen = _choose_location(TILE * int(1 + tile_counts(size, files.channels).sum()), device, location)
    how: dict[str, Any] = {"channels": files.channels, "device": device}
    if chosen == "stream":
        good = _good_rows(size, bad)
        paths = Paths.of(files.paths).take(good)
        how |= {"short_side": files.short_side, "enlarge": files.enlarge}
        return StreamStore(paths, size[good], **how) if paths else None, bad
    memory = device if chosen == "device" else torch.device("cpu")
    with nullcontext() if folder is None or all(cached) else write_pack(folder) as writer:
        packed, undecodable = decode_all(files, cached, size, device=memory, writer=writer)
    bad = sorted([*bad, *undecodable], key=lambda image: image.row)
    good = _good_rows(size, bad)
    return MemoryStore(packed.rows(good.to(memory)), **how) if len(good) else None, bad


def _good_rows(size: Tensor, bad: list[BadImage]) -> Tensor:
    good = torch.ones(len(size), dtype=torch.bool)
    good[[image.row for image in bad]] = False
    return good.nonzero().flatten()


def open_inputs(
    images: ImageInputs,
    *,
    short_side: int,
    enlarge: bool = True,
    channels: int,
    device: torch.device,
    near_enough: bool = True,
    progress: Progress = None,
) -> Store:
    """Open files or pixels in any of the usual forms; an image that cannot be used is an error.

    Pixels close to the network's size are shown as they are; without `near_enough` they are resized as files are.
    """
    if isinstance(images, str | Path | Image.Image) or not hasattr(images, "__len__"):
        raise NearkinError("Pass several images: a list of files or of pixels, a tensor or an array.")
    if not len(images):
        raise NearkinError("There is nothing to embed: the list of images is empty.")
    how: dict[str, Any] = {"short_side": short_side, "channels": channels, "enlarge": enlarge}
    if isinstance(images, Tensor | np.ndarray):
        if images.ndim not in (3, 4) or (isinstance(images, Tensor) and images.ndim != 4):
            shape = list(images.shape)
            raise NearkinError(f"Pixels are a tensor [N, C, H, W] or an array [N, H, W, C] or [N, H, W], not {shape}.")
        tensor = images if isinstance(images, Tensor) else _channels_first(images)
        packed = pack_tensor(tensor, **how)
    elif paths := [Path(image) for image in images if isinstance(image, str | Path)]:
        if len(paths) < len(images):
            raise NearkinError("A list holds files or pixels, not both: embed them one after the other.")
        store, bad = open_files(paths, **how, device=device, progress=progress)
        if store is None or bad:
            raise NearkinError(f"{len(bad)} of {len(paths)} images cannot be embedded, the first: {bad[0]}")
        return store
    else:
        singles = [single_image(image)[None] for image in images]
        packed = concatenate([pack_tensor(one, **how) for one in singles], channels)
    return MemoryStore(packed.to(device), channels=channels, device=device, near_enough=near_enough)


def _channels_first(array: NDArray[Any]) -> Tensor:
    """Arrays [N, H, W, C] or [N, H, W] as a tensor [N, C, H, W]."""
    last = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(last, -1, 1)))


def single_image(image: Any) -> Tensor:
    """One image as a tensor [C, H, W]."""
    if isinstance(image, Image.Image):
        return pillow_pixels(image)
    pixels = image if isinstance(image, Tensor) else np.asarray(image)
    if pixels.ndim not in (2, 3):
        shape = list(pixels.shape)
        raise NearkinError(f"One image is a tensor [C, H, W] or an array [H, W, C] or [H, W], not {shape}.")
    if isinstance(pixels, Tensor):
        return pixels if pixels.ndim == 3 else pixels[None]
    return _channels_first(pixels[None])[0]


def pack_tensor(pixels: Tensor, *, short_side: int, channels: int, enlarge: bool = True) -> Packed:
    """Pack images uint8 [N, C, H, W] as tiles, resized to `short_side`.

    They keep their size if they are smaller, or with `enlarge` if the crops meant by `short_side` fit as they are.
    """
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise NearkinError(f"Pixels in memory are uint8 [N, C, H, W], not {pixels.dtype} {list(pixels.shape)}.")
    height, width = pixels.shape[2:]
    fits = min(height, width) <= short_side <= short_side_for(min(height, width)) if enlarge else False
    shape = (height, width) if fits else stored_size(height, width, short_side, enlarge=enlarge)
    side = min(shape)
    size = torch.tensor([shape]).repeat(len(pixels), 1)
    tiles = torch.zeros(int(1 + tile_counts(size, channels).sum()), TILE, dtype=torch.uint8)
    image_tiles = tiles[1:].view(len(pixels), -1, TILE)
    for start in range(0, len(pixels), _CHUNK):
        chunk = pixels[start : start + _CHUNK].cpu()
        chunk = as_channels(chunk if fits else resize(chunk, side), channels)
        write_tiles(chunk.flatten(0, 1), image_tiles[start : start + _CHUNK])
    return Packed(tiles, first_tiles(size, channels), size)


def find_unreadable(dataset: Dataset, leave_out: LeaveOut | None = None, *, progress: Progress = None) -> list[str]:
    """Decode every image of a data set; return sentences on those that cannot be used or have a misleading name.

    `leave_out` receives those that cannot be used.
    """

    def check(job: tuple[int, Path]) -> BadImage | None:
        row, path = job
        try:
            decode_file(path, short_side=64)
        except BadImage as error:
            return BadImage(path, error.reason, row=row)
        return None

    sentences = []
    for name, images in (("training", dataset.train), ("test", dataset.test)):
        if not isinstance(images.sources, Tensor):
            found = map_in_threads(check, list(enumerate(images.sources)), progress=progress)
            if bad := [image for image in found if image is not None]:
                sentences.append(describe_left_out(bad, images, name))
                if leave_out is not None:
                    leave_out([image.left_out for image in bad])
            sentences += describe_misnamed(images.sources)
    return sentences


def describe_left_out(bad: Sequence[BadImage], images: Images, what: str) -> str:
    """Return a sentence on images that cannot be used: which, why, and the classes that have too few others."""
    count = counted(len(bad), f"{what} image", f"{what} images")
    told = f"{count} cannot be read, so left out: {listed([f'{image.path} ({image.reason})' for image in bad])}."
    lost = torch.bincount(images.labels[[image.row for image in bad]], minlength=images.classes)
    few = [images.names[c] for c in ((lost > 0) & (images.counts - lost < 2)).nonzero().flatten().tolist()]
    return f"{told} That leaves fewer than two images of {listed(few)}." if few else told


def free_memory(device: torch.device) -> int:
    """Return how many bytes images may take on a device and still leave room for training."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free - max(4 * GIB, total // 3)
    free = _host_memory()
    return (free - max(2 * GIB, free // 4)) // ranks.on_this_machine()


def _host_memory() -> int:
    """Bytes that could be allocated according to the system, within the limit of a container."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        known.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # not Linux, no control group, or one without a limit ("max")
        pass
    if not known and hasattr(os, "sysconf"):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(known, default=4 * GIB)


SAMPLE = 64
"""Images whose size is looked at to estimate that of all."""


def estimated_bytes(images: Images, *, storage: Storage, channels: int) -> int:
    """Estimate the memory that images take, from the headers of a few of them."""
    if isinstance(images.sources, Tensor):
        height, width = images.sources.shape[2:]
        sizes = [stored_size(height, width, *storage)]
    else:
        sizes = []
        for path in images.sources[:: max(1, len(images) // SAMPLE)]:
            with suppress(BadImage):
                sizes.append(measure(path, **storage._asdict()))
    counts = tile_counts(torch.tensor(sizes, dtype=torch.int64).view(-1, 2), channels)
    return int(counts.double().mean() * TILE * len(images)) if sizes else 0


def _choose_location(
    size: int, device: torch.device, location: Location, *, streamable: bool = True
) -> Literal["device", "host", "stream"]:
    """Where to keep images of `size` bytes."""
    if location not in ("auto", "device", "host", "stream") or (location == "stream" and not streamable):
        raise NearkinError(f"Images are kept on the device, host or as a stream, or auto, not {location!r}.")
    if location != "auto":
        return location
    if size <= free_memory(device):
        return "device"
    fits = size <= free_memory(torch.device("cpu")) or not streamable
    return "host" if fits else "stream"
