"""Read a user's own images as a data set: one folder per class, or a csv table."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.data.image_files import (
    beside_train_and_test,
    class_folders,
    describe_skipped,
    is_image,
    loose_images,
    missing_or_empty,
    read_table,
    relative,
    subfolders,
    train_and_test,
)
from nearkin.data.images import Dataset, Images, LeftOut, counted, from_keys, listed, no_images
from nearkin.data.pixels.decode import all_small_grey
from nearkin.data.splits import in_halves, within_classes
from nearkin.errors import NearkinError


def read_folder(path: Path) -> Dataset:
    """Read one folder per class, in `train/` and `test/` if these are there, else split in halves by class name.

    With `train/` alone the data set has no test images. Fewer than four classes are split by their images.
    """
    if not os.path.isdir(path):
        raise NearkinError(f"There is no folder {path}: folder:PATH needs one folder of images per class.")
    if parts := train_and_test(path):
        passed = beside_train_and_test(path)
        train, notes = _read_classes(parts[0], passed, root=path)
        test, more = _read_classes(parts[1], passed, root=path) if len(parts) > 1 else (no_images(), [])
        if others := [folder.name for folder in subfolders(path) if folder.name not in ("train", "test")]:
            more.append(f"Folders beside train and test left out: {listed(others)}.")
        data = Dataset("folder", train, test, (*notes, *more), small_grey=small_grey(train))
    else:
        passed = []
        images, notes = _read_classes(path, passed, root=path)
        data = halved("folder", images, notes, without="train/ and test/ folders")
    return replace(data, left_out=tuple(passed))


def _read_classes(top: Path, passed: list[LeftOut], *, root: Path) -> tuple[Images, list[str]]:
    """The images that are not missing or empty, and sentences on what was left out; images also go to `passed`."""
    classes = class_folders(top, passed)
    files = [(file, folder.name, is_image(file)) for folder, files in classes.items() for file in files]
    others = [relative(file, root=root) for file, _, image in files if not image]
    labelled = [(file, label) for file, label, image in files if image]
    loose = loose_images(top, passed)
    passed += [LeftOut(file, "it is outside the class folders") for file in loose]
    names = [file.name for file in loose]
    notes = _left_out(names, "image file outside the class folders", "image files outside the class folders")
    notes += _left_out(others, "file that is not an image", "files that are not images")
    paths = [file for file, _ in labelled]
    bad = missing_or_empty(paths)
    passed += [LeftOut(paths[row], f"it is {word}") for row, word in bad.items()]
    notes += describe_skipped(bad, paths, root=root)
    good = [pair for row, pair in enumerate(labelled) if row not in bad]
    if not good:
        raise NearkinError(f"There is no image in {top}. {' '.join(notes)}".rstrip())
    images = from_keys([file for file, _ in good], [label for _, label in good])
    lost = [folder.name for folder in classes if folder.name not in set(images.names)]
    return images, notes + _left_out(lost, "class without images", "classes without images")


def _left_out(names: list[str], one: str, many: str) -> list[str]:
    return [f"{counted(len(names), one, many)} left out: {listed(names)}."] if names else []


def halved(name: str, images: Images, notes: list[str], *, without: str) -> Dataset:
    """Return a data set of the first half of the classes and the second; fewer than four are split by their images."""
    if images.classes < 4:
        return _halved_within_classes(name, images, notes)
    train, test = in_halves(images)
    note = (
        f"No {without}: the first {train.classes:,} classes by name ({train.names[0]} … {train.names[-1]}) train, "
        f"the other {test.classes:,} ({test.names[0]} … {test.names[-1]}) test."
    )
    return Dataset(name, train, test, tuple(notes), small_grey=small_grey(images), split=note)


def _halved_within_classes(name: str, images: Images, notes: list[str]) -> Dataset:
    """Split the images of two or three classes, of which none can be kept for testing alone."""
    classes = counted(images.classes, "class", "classes")
    if images.classes < 2 or int(images.counts.max()) < 2:
        raise NearkinError(
            f"{name} found {classes} ({listed(images.names)}) with at most "
            f"{counted(int(images.counts.max()), 'image', 'images')} each: at least 2 classes of 2 images are needed."
        )
    train, test = within_classes(images)
    note = (
        f"{classes} ({listed(images.names)}) are too few to keep some for testing: every second image of each class "
        "tests, the others train. The scores say how well new images of these classes find each other, and nothing "
        "about unseen classes, for which at least 4 classes are needed."
    )
    return Dataset(name, train, test, tuple(notes), small_grey=small_grey(images), split=note)


def small_grey(images: Images) -> bool:
    """Whether a sample of the image files, spread over all classes, is small and grey as far as it can be read."""
    assert not isinstance(images.sources, Tensor)
    return all_small_grey(images.sources[:: len(images) // 32 + 1])


class _Row(NamedTuple):
    path: Path
    label: str
    split: str  # train or test; empty if the table has no splits
    role: str  # query, gallery or empty


def read_csv(path: Path) -> Dataset:
    """Read a table with the columns path, label and, optionally, split (train, test) and role (query, gallery)."""
    if not os.path.isfile(path):
        raise NearkinError(f"There is no file {path}: csv:PATH needs a table with the columns path and label.")
    rows, notes = _without_repeats(
        [_row(fields, path, number) for number, fields in read_table(path, required=("path", "label"))], path
    )
    bad = missing_or_empty([row.path for row in rows])
    notes += describe_skipped(bad, [row.path for row in rows], root=path.parent)
    good = [row for number, row in enumerate(rows) if number not in bad]
    lost = sorted({row.label for row in rows} - {row.label for row in good})
    notes += _left_out(lost, "class without images", "classes without images")
    if good and not good[0].split:
        images = from_keys([row.path for row in good], [row.label for row in good])
        data = halved("csv", images, notes, without="split column")
    else:
        train, test = (_split(good, split, path, notes) for split in ("train", "test"))
        data = Dataset("csv", train, test, tuple(notes), small_grey=small_grey(train))
    return replace(data, left_out=tuple(LeftOut(rows[number].path, f"it is {word}") for number, word in bad.items()))


def _row(fields: dict[str, str], path: Path, number: int) -> _Row:
    where = f"{path}, line {number}"
    split, role = fields.get("split", "").lower(), fields.get("role", "").lower()
    if role not in ("", "query", "gallery"):
        raise NearkinError(f"{where}: the role is {role!r}; write query or gallery for test images, or nothing.")
    if "split" not in fields and "role" in fields:
        split = "test" if role else "train"
    elif "split" in fields and split not in ("train", "test"):
        raise NearkinError(f"{where}: the split is {split!r}; write train or test.")
    if split == "train" and role:
        raise NearkinError(f"{where}: a training image has the role {role!r}; only test images have one.")
    return _Row(path.parent / fields["path"], fields["label"], split, role)


def _without_repeats(rows: list[_Row], path: Path) -> tuple[list[_Row], list[str]]:
    """Each image once: equal rows are dropped and counted, an image with two different rows is refused."""
    seen: dict[Path, _Row] = {}
    for row in rows:
        if seen.setdefault(row.path, row) != row:
            name = relative(row.path, root=path.parent)
            raise NearkinError(f"{path} lists {name} twice with different entries: keep one of the rows.")
    repeats = len(rows) - len(seen)
    notes = [f"{counted(repeats, 'row that repeats', 'rows that repeat')} an earlier one skipped."] if repeats else []
    return list(seen.values()), notes


def _split(all_rows: list[_Row], split: str, path: Path, notes: list[str]) -> Images:
    rows = [row for row in all_rows if row.split == split]
    if not rows and split == "test":
        return no_images()
    if not rows:
        raise NearkinError(f"{path} leaves no {split} images. {' '.join(notes)}".rstrip())
    images = from_keys([row.path for row in rows], [row.label for row in rows])
    roles = [row.role for row in rows]
    if not any(roles):
        return images
    if not all(roles):
        name = relative(rows[roles.index("")].path, root=path.parent)
        raise NearkinError(f"{path}: the test image {name} has no role though others have: write query or gallery.")
    query = torch.tensor([role == "query" for role in roles])
    if query.all() or not query.any():
        raise NearkinError(f"{path}: all test images have the role {roles[0]}; both query and gallery are needed.")
    return Images(images.sources, images.labels, images.names, query, ~query)
