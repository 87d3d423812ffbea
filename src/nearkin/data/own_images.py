"""Read a user's own images as a data set: one folder per class, or a csv table."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.image_files import (
    Rows,
    beside_train_and_test,
    class_folders,
    describe_skipped,
    file_size,
    is_image,
    loose_images,
    missing_or_empty,
    read_table,
    relative,
    subfolders,
    train_and_test,
)
from nearkin.data.images import Dataset, Images, LeftOut, counted, from_codes, from_keys, listed, no_images
from nearkin.data.paths import Paths, joined_tables, table_of
from nearkin.data.pixels.decode import all_small_grey
from nearkin.data.splits import in_halves, within_classes
from nearkin.errors import NearkinError

SPLITS, ROLES = ("", "train", "test"), ("", "query", "gallery")
Column = NDArray[Any]  # one number per row of a table
_NOT_PLAIN = re.compile(r"//|/$|(^|/)\.(/|$)")  # paths that Path writes otherwise


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
    bad = missing_or_empty(map(file_size, paths))
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


class _Table(NamedTuple):
    """The rows of a table as columns."""

    paths: Paths
    label: Column  # numbers of keys
    split: Column  # numbers of SPLITS
    role: Column  # numbers of ROLES
    size: Column  # 1 if the file has a size, 0 if it is empty, -1 if it is missing
    mark: Column  # the same for rows of the same file, and hardly ever for others
    keys: list[str]

    def take(self, rows: Column) -> "_Table":
        """Select rows."""
        columns = {name: getattr(self, name)[rows] for name in ("label", "split", "role", "size", "mark")}
        return self._replace(paths=self.paths.take(rows), **columns)


def read_csv(path: Path) -> Dataset:
    """Read a table with the columns path, label and, optionally, split (train, test) and role (query, gallery)."""
    if not os.path.isfile(path):
        raise NearkinError(f"There is no file {path}: csv:PATH needs a table with the columns path and label.")
    with _uncollected():
        rows, notes = _without_repeats(_read_rows(path), path)
    unusable = np.flatnonzero(rows.size <= 0).tolist()
    bad = {unusable[number]: word for number, word in missing_or_empty(rows.size[unusable].tolist()).items()}
    notes += describe_skipped(bad, rows.paths, root=path.parent)
    good = rows.take(np.flatnonzero(rows.size > 0)) if bad else rows
    lost = sorted(rows.keys[number] for number in np.setdiff1d(rows.label, good.label).tolist())
    notes += _left_out(lost, "class without images", "classes without images")
    if len(good.paths) and not good.split[0]:
        data = halved("csv", _images(good), notes, without="split column")
    else:
        train, test = (_split(good, split, path, notes) for split in SPLITS[1:])
        data = Dataset("csv", train, test, tuple(notes), small_grey=small_grey(train))
    return replace(data, left_out=tuple(LeftOut(rows.paths[row], f"it is {word}") for row, word in bad.items()))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from looking through all objects again for every few hundred rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_rows(path: Path) -> _Table:
    """All rows of a table."""
    number: dict[str, int] = {}
    tables, columns = [], []
    folder = str(path.parent)
    for rows in read_table(path, required=("path", "label")):
        names = [str(Path(name)) if _NOT_PLAIN.search(name) else name for name in rows.columns["path"]]
        files = [name if name.startswith(os.sep) else f"{folder}{os.sep}{name}" for name in names]
        label = np.array([number.setdefault(label, len(number)) for label in rows.columns["label"]], np.int32)
        size = np.sign([file_size(file) for file in files]).astype(np.int8)
        mark = np.array([hash(file) for file in files])
        tables.append(table_of(folder, names))
        columns.append((label, *_split_and_role(rows, path), size, mark))
    paths = replace(joined_tables(tables), folders=(folder,), counts=(sum(map(len, tables)),))
    label, split, role, size, mark = map(np.concatenate, zip(*columns, strict=True))
    return _Table(Paths(paths), label, split, role, size, mark, list(number))


def _split_and_role(rows: Rows, path: Path) -> tuple[Column, Column]:
    """The numbers of the splits and of the roles of some rows."""

    def numbers(column: str, words: tuple[str, ...]) -> Column:
        values = rows.columns.get(column, [""] * len(rows.lines))
        known = {value: words.index(value.lower()) if value.lower() in words else -1 for value in set(values)}
        return np.array([known[value] for value in values], np.int8)

    def refuse(wrong: Column, column: str, says: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            value = rows.columns[column][row].lower()
            raise NearkinError(f"{path}, line {rows.lines[row]}: {says.format(repr(value))}")

    split, role = numbers("split", SPLITS), numbers("role", ROLES)
    refuse(role < 0, "role", "the role is {}; write query or gallery for test images, or nothing.")
    if "split" in rows.columns:
        refuse(split < 1, "split", "the split is {}; write train or test.")
    elif "role" in rows.columns:
        split = 1 + (role > 0).astype(np.int8)
    refuse((split == 1) & (role > 0), "role", "a training image has the role {}; only test images have one.")
    return split, role


def _without_repeats(rows: _Table, path: Path) -> tuple[_Table, list[str]]:
    """Each image once: equal rows are dropped and counted, an image with two different rows is refused."""
    order = rows.mark.argsort(kind="stable")
    same = np.flatnonzero(np.diff(rows.mark[order]) == 0)
    first: dict[Path, int] = {}
    repeats = []
    for row in np.unique(order[np.concatenate([same, same + 1])]).tolist():
        earlier = first.setdefault(rows.paths[row], row)
        if any(column[row] != column[earlier] for column in (rows.label, rows.split, rows.role)):
            name = relative(rows.paths[row], root=path.parent)
            raise NearkinError(f"{path} lists {name} twice with different entries: keep one of the rows.")
        if earlier != row:
            repeats.append(row)
    if not repeats:
        return rows, []
    count = counted(len(repeats), "row that repeats", "rows that repeat")
    return rows.take(np.delete(np.arange(len(rows.paths)), repeats)), [f"{count} an earlier one skipped."]


def _images(rows: _Table) -> Images:
    return from_codes(rows.paths, torch.from_numpy(rows.label), rows.keys)


def _split(table: _Table, split: str, path: Path, notes: list[str]) -> Images:
    rows = table.take(np.flatnonzero(table.split == SPLITS.index(split)))
    if not len(rows.paths) and split == "test":
        return no_images()
    if not len(rows.paths):
        raise NearkinError(f"{path} leaves no {split} images. {' '.join(notes)}".rstrip())
    images = _images(rows)
    if not rows.role.any():
        return images
    if not rows.role.all():
        name = relative(rows.paths[int(rows.role.argmin())], root=path.parent)
        raise NearkinError(f"{path}: the test image {name} has no role though others have: write query or gallery.")
    query = torch.from_numpy(rows.role == ROLES.index("query"))
    if query.all() or not query.any():
        raise NearkinError(
            f"{path}: all test images have the role {ROLES[rows.role[0]]}; both query and gallery are needed."
        )
    return Images(images.sources, images.labels, images.names, query, ~query)
