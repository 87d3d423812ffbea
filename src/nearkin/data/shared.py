"""Images that stay open from one training to the next, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkin.data.decode import BadImage
from nearkin.data.images import Images, Progress
from nearkin.data.stores import Store, open_store

Opener = Callable[..., tuple[Store, Images, list[BadImage]]]
"""`open_store`, or something with its arguments."""


class SharedStores:
    """`open_store` with a memory: image files that were opened alike are not read again while this object lives.

    The last few are kept (training, held-out and test images of a run); an older one makes room before a new one is
    opened. Files are taken to stay as they are meanwhile. Pixels that are in memory already are opened each time.
    """

    def __init__(self, keep: int = 3) -> None:
        self.keep = keep
        self.opened: dict[tuple[Any, ...], tuple[Store, list[BadImage]]] = {}

    def __call__(
        self,
        images: Images,
        *,
        short: int,
        device: torch.device | str,
        channels: int = 3,
        cache: Path | None = None,
        progress: Progress = None,
    ) -> tuple[Store, Images, list[BadImage]]:
        """The store, the images in it, and those that cannot be used."""
        given: dict[str, Any] = {"short": short, "device": device, "channels": channels}
        if isinstance(images.sources, Tensor):
            return open_store(images, **given, cache=cache, progress=progress)
        key = (short, channels, str(device), tuple(images.sources))
        if key in self.opened:
            self.opened[key] = store, bad = self.opened.pop(key)  # now the youngest
            return store, images.without([image.row for image in bad]) if bad else images, bad
        while len(self.opened) >= self.keep:
            del self.opened[next(iter(self.opened))]
        store, good, bad = open_store(images, **given, cache=cache, progress=progress)
        self.opened[key] = store, bad
        return store, good, bad
