"""Indexes of images in other files: where they are, how large, and their classes, made when a file is first read."""

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.paths import Table
from nearkin.data.pixels.archives import (
    Made,
    TarMember,
    arrow_batches,
    arrow_images,
    image_column,
    place_columns,
    remembered,
    scan_tar,
    table_in,
)
from nearkin.data.pixels.decode import shown_size
from nearkin.data.pixels.formats import SUFFIXES
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.data.pixels.threads import map_in_threads
from nearkin.errors import NearkinError


class Labelled(NamedTuple):
    """The images of one file with their classes."""

    table: Table
    codes: NDArray[np.integer[Any]]  # numbers of keys
    keys: Sequence[str]


def arrow_files(path: Path) -> list[str]:
    """Return the Arrow files of a data set that was saved in a folder; none if it is no such folder."""
    return sorted(glob.glob(os.path.join(glob.escape(str(path)), "*.arrow")))


def indexed(file: str, label: str) -> Labelled:
    """Return the images of a tar or Arrow file with their classes; `label` says where these are.

    Without it they are where they usually are, and an image may have none: its key is empty.
    """

    def make() -> Made:
        table, codes, keys = (_scan_arrow if file.endswith(".arrow") else _scan_tar)(file, label)
        if not len(table):
            raise NearkinError(f"{file} holds no images.")
        more = {"shape": _shapes(table), "codes": torch.from_numpy(codes.astype(np.int32))}
        return place_columns(table) | more, {"keys": list(keys)}

    found, about = remembered(f"images, {label}", file, make)
    columns = {name: column.numpy() for name, column in found.items()}
    codes = columns.pop("codes")
    return Labelled(Table((os.path.abspath(file),), (len(codes),), **columns), codes, about["keys"])


def _shapes(table: Table) -> Tensor:
    """Height and width of each image as it is shown; 0 if its header is damaged."""

    def look(row: int) -> tuple[int, int]:
        try:
            return shown_size(table.path(row))
        except BadImage:
            return 0, 0

    return torch.tensor(map_in_threads(look, range(len(table))), dtype=torch.int32).view(-1, 2)


def _scan_tar(file: str, label: str) -> Labelled:
    """The images of a tar file and their classes; files of one sample have one name up to the first dot."""
    samples: dict[str, dict[str, TarMember]] = {}
    for member in scan_tar(file):
        folder, _, name = member.name.rpartition("/")
        if not name.startswith("."):
            stem, _, kind = name.partition(".")
            samples.setdefault(f"{folder}/{stem}" if folder else stem, {})[kind.lower()] = member
    images, keys = [], []
    with open(file, "rb") as tar:
        for key, files in sorted(samples.items()):
            pictures = [member for kind, member in files.items() if f".{kind}" in SUFFIXES]
            if len(pictures) > 1:
                raise NearkinError(f"{file} has {len(pictures)} images of one name {key}: keep one of them per name.")
            if pictures:
                label = label if label != "auto" else "cls" if "cls" in files else "prefix"
                images += pictures
                keys.append(_tar_label(tar.fileno(), key, files, label, file))
    number: dict[str, int] = {}
    order = sorted(range(len(images)), key=lambda row: images[row].name)
    codes = np.array([number.setdefault(keys[row], len(number)) for row in order], np.int64)
    return Labelled(table_in(os.path.abspath(file), images), codes, list(number))


def _tar_label(tar: int, key: str, files: dict[str, TarMember], label: str, file: str) -> str:
    needed, label = label, label or ("cls" if "cls" in files else "prefix")
    if label == "prefix":
        found = key.rpartition("/")[0]
        if needed and not found:
            raise NearkinError(
                f"{file}: the class of {key} is not known, for it has neither a file {key}.cls nor a folder: write "
                "tar(label=NAME):PATTERN for an entry NAME of its json file."
            )
        return found
    kind = "cls" if label == "cls" else "json"
    if kind not in files:
        raise NearkinError(f"{file} has no file {key}.{kind}, which label={label} needs.")
    text = os.pread(tar, files[kind].size, files[kind].offset)
    try:
        found = text.decode().strip() if label == "cls" else json.loads(text)[label]
    except (ValueError, KeyError, TypeError):
        raise NearkinError(
            f"{file}: {key}.{kind} {'is not text' if label == 'cls' else f'has no entry {label}'}."
        ) from None
    if not isinstance(found, int | str) or not str(found).strip():
        raise NearkinError(f"{file}: the class of {key} is {found!r}; classes are words or whole numbers.")
    return str(found)


def _scan_arrow(file: str, label: str) -> Labelled:
    """The images of an Arrow file and their classes."""
    codes, number = [np.empty(0, np.int64)], dict[str, int]()
    needed, label = label, label or "label"
    for batch in arrow_batches(file):
        if not needed and label not in batch.schema.names:
            number[""] = 0
            codes.append(np.zeros(len(batch), np.int64))
            continue
        if label not in batch.schema.names:
            others = [name for name in batch.schema.names if name != image_column(batch.schema, file)]
            raise NearkinError(
                f"{file} has no column {label}: write arrow(label=NAME):PATH with one of {', '.join(others) or 'none'}."
            )
        column = batch.column(label)
        if column.null_count:
            raise NearkinError(f"{file} has rows without a {label}: leave them out of the data set.")
        encoded = column.dictionary_encode()
        names = _class_names(batch.schema.metadata, label)
        keys = [_arrow_label(value, names, file) for value in encoded.dictionary.to_pylist()]
        new = np.array([number.setdefault(key, len(number)) for key in keys], np.int64)
        codes.append(new[encoded.indices.to_numpy()])
    return Labelled(arrow_images(os.path.abspath(file)), np.concatenate(codes), list(number))


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> list[str]:
    """The names of a ClassLabel, which Hugging Face datasets keeps with the columns."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names]


def _arrow_label(value: Any, names: list[str], file: str) -> str:
    if isinstance(value, int) and names and not 0 <= value < len(names):
        raise NearkinError(f"{file} has the class {value}, but {len(names)} names: leave rows without a class out.")
    if not isinstance(value, int | str) or not str(value).strip():
        raise NearkinError(f"{file} has the class {value!r}; classes are words or whole numbers.")
    return names[value] if names and isinstance(value, int) else str(value)
