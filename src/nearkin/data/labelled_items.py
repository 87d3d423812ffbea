"""Images and labels from Python as a csv table: a list of pairs, or any torch Dataset that returns them.

Pixels are written once as PNG files into the cache folder, so that a run on them can be resumed, measured and shown in
other processes like any other.
"""

import csv
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from nearkin.data.input_images import as_bytes
from nearkin.data.pixels.open import single_image
from nearkin.errors import NearkinError
from nearkin.files import cache_dir


class Items(Protocol):
    """Pairs of an image and a label, by number; a torch Dataset with a length is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def as_spec(data: Items | tuple[Items, Items]) -> str:
    """Write a table of the items and return the data set's spec, `csv:PATH`.

    A pair (train, test) keeps its parts. Otherwise the first half of the classes trains and the other half tests.
    """
    parts = {"train": data[0], "test": data[1]} if isinstance(data, tuple) and len(data) == 2 else {"": data}
    top = cache_dir() / "items"
    top.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="new-", dir=top))
    try:
        digest = hashlib.sha256()
        with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["path", "label", *(["split"] if len(parts) > 1 else [])])
            for split, items in parts.items():
                for row in range(_length(items)):
                    image, label = _pair(items[row], row)
                    path = _path_of(image, folder / f"{split or 'image'}-{row:07d}.png", digest)
                    table.writerow([path, label, *([split] if split else [])])
        digest.update((folder / "table.csv").read_bytes())
        final = top / digest.hexdigest()[:24]
        if not final.exists():
            folder.rename(final)
        return f"csv:{final / 'table.csv'}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _length(items: Any) -> int:
    if isinstance(items, str | bytes | dict) or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise NearkinError(
            f"The data are a spec, a list of (image, label), a torch Dataset with a length, or a pair (train, test) of "
            f"these, not {type(items).__name__}."
        )
    return len(items)


def _pair(item: Any, row: int) -> tuple[Any, str]:
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2:
        raise NearkinError(f"Item {row} of the data is {type(item).__name__}, not a pair (image, label).")
    image, label = item[0], item[1]
    if isinstance(label, Tensor | np.generic):
        label = label.item()
    if not isinstance(label, int | str) or isinstance(label, bool) or not str(label).strip():
        raise NearkinError(f"The label of item {row} is {label!r}: labels are whole numbers or words.")
    return image, str(label)


def _path_of(image: Any, target: Path, digest: Any) -> str:
    """The absolute path of an image file, or the name of the file into which pixels are written."""
    if isinstance(image, str | Path):
        return str(Path(image).absolute())
    pixels = single_image(as_bytes(image))
    if str(pixels.dtype) != "torch.uint8" or pixels.shape[0] not in (1, 3):
        raise NearkinError(
            f"Pixels are uint8, or floats from 0 to 1, of 1 or 3 channels [C, H, W], not {pixels.dtype} "
            f"{list(pixels.shape)}."
        )
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    digest.update(str(array.shape).encode() + array.tobytes())
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(target, compress_level=1)
    return target.name
