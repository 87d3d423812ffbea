"""Readers for images of one's own: a folder per class, or a table in a csv file."""

import csv
import os
from pathlib import Path
from typing import NamedTuple

import torch

from nearkin.data.image_files import broken, files_below, is_image, lines, say_broken, shown, subfolders
from nearkin.data.images import Dataset, Images, counted, from_keys, listed
from nearkin.data.splits import in_halves
from nearkin.errors import NearkinError


def read_folder(path: Path) -> Dataset:
    """One folder per class, in `train/` and `test/` where both are there, else halved by class name."""
    if not os.path.isdir(path):
        raise NearkinError(
            f"There is no folder {path}: folder:PATH wants a folder with one folder of images per class."
        )
    train_top, test_top = path / "train", path / "test"
    if all(os.path.isdir(top) and subfolders(top) for top in (train_top, test_top)):
        (train, notes), (test, more) = _class_folders(train_top, root=path), _class_folders(test_top, root=path)
        others = [folder.name for folder in subfolders(path) if folder not in (train_top, test_top)]
        if others:
            more.append(f"Folders beside train and test left out: {listed(others)}.")
        return Dataset("folder", train, test, (*notes, *more))
    images, notes = _class_folders(path, root=path)
    return _halved("folder", images, notes, without="train/ and test/ folders")


def _class_folders(top: Path, *, root: Path) -> tuple[Images, list[str]]:
    paths: list[Path] = []
    keys: list[str] = []
    others: list[str] = []
    folders = subfolders(top)
    for folder in folders:
        files = files_below(folder)
        found = [file for file in files if is_image(file)]
        others += [shown(file, root=root) for file in files if not is_image(file)]
        paths += found
        keys += [folder.name] * len(found)
    loose = [file.name for file in sorted(top.iterdir()) if is_image(file) and file.is_file()]
    notes = _left_out(loose, "image file outside the class folders", "image files outside the class folders")
    notes += _left_out(others, "file that is not an image", "files that are not images")
    return _usable(paths, keys, [folder.name for folder in folders], notes, root=root, top=top)


def _usable(
    paths: list[Path], keys: list[str], classes: list[str], notes: list[str], *, root: Path, top: Path
) -> tuple[Images, list[str]]:
    """The images whose file is there and not empty, of the classes that have any; what was dropped is noted."""
    bad = broken(paths)
    notes += say_broken(bad, paths, root=root)
    good = [row for row in range(len(paths)) if row not in bad]
    if not good:
        raise NearkinError(f"There is no image in {top}. {' '.join(notes)}".rstrip())
    images = from_keys([paths[row] for row in good], [keys[row] for row in good])
    lost = [name for name in classes if name not in set(images.names)]
    notes += _left_out(lost, "class without images", "classes without images")
    return images, notes


def _left_out(names: list[str], one: str, many: str) -> list[str]:
    return [f"{counted(len(names), one, many)} left out: {listed(names)}."] if names else []


def _halved(name: str, images: Images, notes: list[str], *, without: str) -> Dataset:
    if images.classes < 3:
        raise NearkinError(
            f"{name} found {counted(images.classes, 'class', 'classes')} ({listed(images.names)}): "
            f"without {without} at least 3 are needed, the first half to train and the others to test."
        )
    train, test = in_halves(images)
    notes.append(
        f"No {without}: the first {train.classes:,} classes by name ({train.names[0]} … {train.names[-1]}) train, "
        f"the other {test.classes:,} ({test.names[0]} … {test.names[-1]}) test."
    )
    return Dataset(name, train, test, tuple(notes))


class _Row(NamedTuple):
    path: Path
    label: str
    split: str  # train, test or, where the table does not say, nothing
    role: str  # query, gallery or nothing


def read_csv(path: Path) -> Dataset:
    """A table with the columns path, label and, if wanted, split (train, test) and role (query, gallery)."""
    if not os.path.isfile(path):
        raise NearkinError(f"There is no file {path}: csv:PATH wants a table with the columns path and label.")
    rows, notes = _each_once(_table(path), path)
    bad = broken([row.path for row in rows])
    notes += say_broken(bad, [row.path for row in rows], root=path.parent)
    good = [row for number, row in enumerate(rows) if number not in bad]
    lost = sorted({row.label for row in rows} - {row.label for row in good})
    notes += _left_out(lost, "class without images", "classes without images")
    if good and not good[0].split:
        images = from_keys([row.path for row in good], [row.label for row in good])
        return _halved("csv", images, notes, without="split column")
    return Dataset("csv", _part(good, "train", path, notes), _part(good, "test", path, notes), tuple(notes))


def _table(path: Path) -> list[_Row]:
    numbered = list(lines(path))
    reader = csv.reader([line for _, line in numbered], skipinitialspace=True)
    try:
        table = [(numbered[reader.line_num - 1][0], fields) for fields in reader]
    except csv.Error as error:
        raise NearkinError(f"Cannot read {path} as a csv table: {error}.") from None
    columns = [name.strip().lower() for name in table[0][1]] if table else []
    for wanted in ("path", "label"):
        if wanted not in columns:
            raise NearkinError(
                f"{path} has no column {wanted!r}: its first line names the columns path, label and, if wanted, "
                f"split and role, with commas between them, but reads {','.join(columns)!r}."
            )
    rows = [_row(columns, fields, where=f"{path}, line {number}") for number, fields in table[1:]]
    if not rows:
        raise NearkinError(f"{path} lists no images: it has a first line with the columns but no rows.")
    return [row._replace(path=path.parent / row.path) for row in rows]


def _row(columns: list[str], fields: list[str], *, where: str) -> _Row:
    if len(fields) != len(columns):
        raise NearkinError(
            f"{where}: {len(fields)} fields under {len(columns)} columns; put quotes around a field with a comma."
        )
    values = dict(zip(columns, (field.strip() for field in fields), strict=True))
    for wanted in ("path", "label"):
        if not values[wanted]:
            raise NearkinError(f"{where}: the {wanted} is empty.")
    split, role = values.get("split", "").lower(), values.get("role", "").lower()
    if role not in ("", "query", "gallery"):
        raise NearkinError(
            f"{where}: the role is {role!r}; write query or gallery for test images, nothing for the others."
        )
    if "split" not in columns and "role" in columns:
        split = "test" if role else "train"
    elif "split" in columns and split not in ("train", "test"):
        raise NearkinError(f"{where}: the split is {split!r}; write train or test.")
    if split == "train" and role:
        raise NearkinError(f"{where}: a training image has the role {role!r}; only test images have one.")
    return _Row(Path(values["path"]), values["label"], split, role)


def _each_once(rows: list[_Row], path: Path) -> tuple[list[_Row], list[str]]:
    """Each image once: the same row again is dropped and counted, the same image as something else is refused."""
    seen: dict[Path, _Row] = {}
    for row in rows:
        if seen.setdefault(row.path, row) != row:
            raise NearkinError(
                f"{path} lists {shown(row.path, root=path.parent)} twice, differently: keep one of the rows."
            )
    repeats = len(rows) - len(seen)
    notes = [f"{counted(repeats, 'row that repeats', 'rows that repeat')} an earlier one skipped."] if repeats else []
    return list(seen.values()), notes


def _part(rows: list[_Row], split: str, path: Path, notes: list[str]) -> Images:
    part = [row for row in rows if row.split == split]
    if not part:
        raise NearkinError(f"{path} leaves no {split} images. {' '.join(notes)}".rstrip())
    images = from_keys([row.path for row in part], [row.label for row in part])
    roles = [row.role for row in part]
    if not any(roles):
        return images
    if not all(roles):
        unsaid = shown(part[roles.index("")].path, root=path.parent)
        raise NearkinError(f"{path}: the test image {unsaid} has no role though others have: write query or gallery.")
    query = torch.tensor([role == "query" for role in roles])
    if query.all() or not query.any():
        raise NearkinError(f"{path}: all test images have the role {roles[0]}; both query and gallery are needed.")
    return Images(images.sources, images.labels, images.names, query, ~query)
