"""The table of data sets, and `load_dataset`, which opens any of them from its spec."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from nearkin.data.benchmarks import read_cars, read_cub, read_inshop, read_sop
from nearkin.data.glyphs import make_glyphs
from nearkin.data.images import Dataset, Images, Progress, counted, listed
from nearkin.data.own_archives import read_arrow, read_tar
from nearkin.data.own_images import read_csv, read_folder
from nearkin.data.splits import all_training, swapped
from nearkin.errors import NearkinError
from nearkin.spec import check_options, look_up, option_names, parse


@dataclass(frozen=True)
class Reader:
    """How to read a data set, and one line of help."""

    read: Callable[..., Dataset]
    help: str
    path: bool = True  # whether its spec is name:PATH


DATASETS: dict[str, Reader] = {
    "glyphs": Reader(
        make_glyphs, "characters of many scripts rendered from matplotlib's fonts; nothing to download", path=False
    ),
    "folder": Reader(read_folder, "folder:PATH, one folder of images per class, in train/ and test/ or split by name"),
    "csv": Reader(
        read_csv, "csv:PATH, a table of path, label and optionally split (train, test) and role (query, gallery)"
    ),
    "tar": Reader(
        read_tar,
        "tar:PATTERN, webdataset's tar files as they are, in a folder or by name; classes from .cls, .json or the key",
    ),
    "arrow": Reader(
        read_arrow, "arrow:PATH, a data set of images that Hugging Face datasets saved by save_to_disk, memory-mapped"
    ),
    "cub": Reader(read_cub, "cub:PATH, Caltech-UCSD Birds-200-2011 in its original layout"),
    "cars": Reader(read_cars, "cars:PATH, Stanford Cars-196 with cars_annos.mat and car_ims"),
    "sop": Reader(read_sop, "sop:PATH, Stanford Online Products with Ebay_train.txt and Ebay_test.txt"),
    "inshop": Reader(read_inshop, "inshop:PATH, DeepFashion In-Shop with list_eval_partition.txt"),
}

_SPEC = re.compile(r"\s*(?P<call>\w+\s*(?:\(.*?\))?)\s*(?::(?P<path>.*))?", re.DOTALL)
_FILLED_IN = ("cache", "progress", "expect")  # arguments set by the program, not by the spec


def load_dataset(
    text: str,
    *,
    halves: Literal["first", "swapped"] = "first",
    test: Literal["split", "none"] = "split",
    cache: Path | None = None,
    progress: Progress = None,
) -> Dataset:
    """Open a data set by its spec: `glyphs`, `glyphs(classes=200)`, `cub:PATH`, `folder:PATH`, …

    `halves="swapped"` trains on the test part and tests on the training part. `test="none"` trains on both, and then
    the data set needs no test part. `cache` is a folder for rendered images.
    """
    if halves not in ("first", "swapped"):
        raise NearkinError(f"halves is 'first' or 'swapped', not {halves!r}.")
    if test not in ("split", "none"):
        raise NearkinError(f"test is 'split' or 'none', not {test!r}.")
    reader, path, options = _resolve(text)
    filled_in: dict[str, object] = {"cache": cache, "progress": progress}
    known = option_names(reader.read)
    options |= {name: value for name, value in filled_in.items() if name in known}
    dataset = reader.read(*([path] if reader.path else []), **options)
    if test == "none":
        dataset = all_training(dataset)
    elif not len(dataset.test):
        raise NearkinError(f"{text} has no test images: add some, or train on all classes with --test none.")
    elif halves == "swapped":
        dataset = swapped(dataset)
    split = [dataset.split] if dataset.split else []
    return replace(dataset, notes=(*dataset.notes, *split, *_remarks(dataset)))


def _resolve(text: str) -> tuple[Reader, Path | None, dict[str, object]]:
    match = _SPEC.fullmatch(text)
    call = parse(match["call"]) if match else None
    if match is None or call is None or (call.name not in DATASETS and os.path.isdir(text)):
        hint = f" To read your own images write folder:{text}." if os.path.isdir(text) else ""
        raise NearkinError(f"Cannot read the data set {text!r}: write one of {dataset_names()}.{hint}")
    reader = look_up(call.name, DATASETS, what="data set")
    if call.args:
        raise NearkinError(f"{call.name} takes options such as key=value, not {call.args[0]}.")
    location = (match["path"] or "").strip()
    if reader.path != bool(location):
        wanted = f"needs a path: write {call.name}:PATH" if reader.path else f"takes no path: write {call.name} alone"
        raise NearkinError(f"The data set {call.name} {wanted}.")
    options = check_options(call, reader.read, reserved=_FILLED_IN)
    return reader, Path(location).expanduser() if location else None, options


def path_of(text: str) -> Path | None:
    """Return the path in the spec of a data set; None if it has none."""
    match = _SPEC.fullmatch(text)
    place = (match["path"] or "").strip() if match else ""
    return Path(place).expanduser() if place else None


def at_path(text: str, path: Path) -> str:
    """Return the spec of a data set with another path."""
    match = _SPEC.fullmatch(text)
    return f"{match['call'].strip()}:{path}" if match else text


def dataset_names() -> str:
    """Return the forms of all specs in one line, for messages and help: `glyphs, folder:PATH, …`."""
    return ", ".join(f"{name}:PATH" if reader.path else name for name, reader in DATASETS.items())


def _remarks(dataset: Dataset) -> list[str]:
    """Sentences on classes that are of little use for training or testing."""
    train, test = dataset.train, dataset.test
    if train.classes < 2:
        raise NearkinError(f"{dataset.name} has {train.classes} training class: training needs at least 2.")
    remarks = []
    if single := _named(train, train.counts == 1):
        remarks.append(f"{_classes(single)} with one image in train, kept but without positives: {listed(single)}.")
    if alone := _without_relevant(test):
        remarks.append(
            f"{_classes(alone)} in test whose queries have no relevant image and are not counted: {listed(alone)}."
        )
    if test.classes == 1:
        remarks.append("The test part has one class, so every retrieval score is 100.")
    shared = sorted(set(train.names) & set(test.names))
    if shared:
        remarks.append(f"{_classes(shared)} in both train and test, so they are not unseen: {listed(shared)}.")
    return remarks


def _without_relevant(test: Images) -> list[str]:
    if test.query is None or test.gallery is None:
        return _named(test, test.counts == 1)
    masks = test.query, test.gallery
    queries, relevant = (torch.bincount(test.labels[mask], minlength=test.classes) for mask in masks)
    return _named(test, (queries > 0) & (relevant == 0))


def _named(images: Images, mask: torch.Tensor) -> list[str]:
    return [images.names[c] for c in mask.nonzero().flatten().tolist()]


def _classes(names: list[str]) -> str:
    return counted(len(names), "class", "classes")


class PartCounts(NamedTuple):
    """Counts of one part of a data set; the last three are images per class."""

    part: str
    images: int
    classes: int
    fewest: int
    median: float
    most: int


def describe(dataset: Dataset) -> list[PartCounts]:
    """Count images and classes of train and test, and of query and gallery if the test part has them."""
    parts = [_counted(name, part) for name, part in (("train", dataset.train), ("test", dataset.test)) if len(part)]
    if dataset.test.query is not None and dataset.test.gallery is not None:
        parts += [_counted("query", dataset.test.take(dataset.test.query))]
        parts += [_counted("gallery", dataset.test.take(dataset.test.gallery))]
    return parts


def _counted(name: str, images: Images) -> PartCounts:
    counts = images.counts
    median = counts.double().quantile(0.5).item()
    return PartCounts(name, len(images), images.classes, int(counts.min()), median, int(counts.max()))
