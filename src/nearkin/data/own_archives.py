"""Read images inside other files as a data set: webdataset's tar files, and Arrow files of Hugging Face datasets."""

import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from nearkin.data.archive_index import Labelled, arrow_files, indexed
from nearkin.data.images import Dataset, Images, Progress, from_codes, no_images
from nearkin.data.own_images import halved, small_grey
from nearkin.data.paths import Paths, joined_tables
from nearkin.errors import NearkinError

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def read_tar(path: Path, *, label: str = "auto", progress: Progress = None) -> Dataset:
    """Read webdataset's tar files: a folder with them, in train/ and test/ or together, or a pattern of their names.

    `label` is where the class of an image is: `cls`, the file KEY.cls beside KEY.jpg; `prefix`, what is before the last
    slash of KEY; or the name of an entry in KEY.json. `auto` is `cls` if the first image has such a file, or `prefix`.
    """
    if not (parts := _parts(path, tar_files)):
        raise NearkinError(f"There is no tar file {path}: tar:PATTERN needs a folder of tar files or their names.")
    return _dataset("tar", parts, label, progress)


def read_arrow(path: Path, *, label: str = "label", progress: Progress = None) -> Dataset:
    """Read a data set that Hugging Face datasets saved with save_to_disk, with its splits train and test if it has any.

    `label` is the column of the class: words, or numbers with or without names.
    """
    if not (parts := _parts(path, arrow_files)):
        raise NearkinError(f"{path} has no data-*.arrow: arrow:PATH needs a folder made by save_to_disk.")
    return _dataset("arrow", parts, label, progress)


def tar_files(path: Path) -> list[str]:
    """Return the tar files in a folder, or with names of a pattern such as birds-{0000..0099}.tar."""
    if path.is_dir():
        return sorted(glob.glob(os.path.join(glob.escape(str(path)), "*.tar")))
    return sorted(
        {file for name in _without_braces(str(path)) for file in glob.glob(name)}
        | ({str(path)} if path.is_file() else set())
    )


def _without_braces(pattern: str) -> Iterator[str]:
    """All names of a pattern with ranges of numbers in braces."""
    if not (found := _BRACES.search(pattern)):
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _without_braces(f"{pattern[: found.start()]}{number:0{len(first)}d}{pattern[found.end() :]}")


def _parts(path: Path, find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """The files of the parts train and test, or all under no name."""
    parts = {part: files for part in ("train", "test") if (files := find(path / part))}
    return parts if "train" in parts else {"": files} if (files := find(path)) else {}


def _dataset(name: str, parts: dict[str, list[str]], label: str, progress: Progress) -> Dataset:
    total = sum(map(len, parts.values()))
    done = itertools.count(1)

    def read(file: str) -> Labelled:
        labelled = indexed(file, label)
        if progress is not None:
            progress(next(done), total)
        return labelled

    found = {part: _images([read(file) for file in files]) for part, files in parts.items()}
    if "" in found:
        return halved(name, found[""], [], without="folders train and test")
    return Dataset(name, found["train"], found.get("test", no_images()), small_grey=small_grey(found["train"]))


def _images(parts: list[Labelled]) -> Images:
    number: dict[str, int] = {}
    codes = []
    for part in parts:
        new = np.array([number.setdefault(key, len(number)) for key in part.keys], np.int64)
        codes.append(new[part.codes])
    return from_codes(
        Paths(joined_tables([part.table for part in parts])), torch.from_numpy(np.concatenate(codes)), list(number)
    )
