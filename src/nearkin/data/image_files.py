"""What can be known of image files without decoding them, and text files read line by line."""
# MERGED: Image files that a user names: files, folders, tables; each with a label where there is one.

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.data.images import counted, listed
from nearkin.data.pixels.decode import BadImage
from nearkin.errors import NearkinError

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


def size_of(path: Path) -> int:
    """Bytes in a file; -1 where there is no file."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else -1
    except OSError:
        return -1


def broken(paths: Sequence[Path]) -> dict[int, str]:
    """Rows whose file is missing or empty, with the word for it."""
    sizes = [size_of(path) for path in paths]
    return {row: "missing" if size < 0 else "empty" for row, size in enumerate(sizes) if size <= 0}


def say_broken(bad: dict[int, str], paths: Sequence[Path], *, root: Path) -> list[str]:
    """One sentence a kind: how many files are missing or empty, and which."""
    sentences = []
    for word in sorted(set(bad.values())):
        names = [shown(paths[row], root=root) for row, why in bad.items() if why == word]
        sentences.append(
            f"{counted(len(names), f'{word} image file', f'{word} image files')} skipped: {listed(names)}."
        )
    return sentences


def shown(path: Path, *, root: Path) -> str:
    """A path as the user knows it: relative to the data set where it lies inside."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def subfolders(path: Path) -> list[Path]:
    """The folders directly inside, sorted by name; hidden ones are passed over."""
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise NearkinError(f"Cannot list the folder {path}: {error.strerror or error}.") from None


def files_below(path: Path) -> list[Path]:
    """All files in a folder and below it, sorted; hidden ones are passed over."""
    found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names if not name.startswith(".")]
    return sorted(found)


def is_image(path: Path) -> bool:
    """Whether the name ends as an image's does."""
    return path.suffix.lower() in SUFFIXES


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise NearkinError(f"Cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise NearkinError(f"Cannot read {path}: byte {error.start} is not UTF-8 text.") from None
    return ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip())


class Found(NamedTuple):
    """One image file, whether or not it can be read."""

    path: str  # absolute, so that it can be opened from anywhere
    label: str | None

    @property
    def stamp(self) -> str | None:
        """Size and time of change: what tells that a file is still the same. None where there is no file."""
        try:
            known = os.stat(self.path)
        except OSError:
            return None
        return f"{known.st_size}-{known.st_mtime_ns}"


def gather(given: Sequence[str | Path]) -> list[Found]:
    """The images of files, folders and csv tables, each file once.

    In a folder with folders, those are the classes and name the labels; with train/ and test/ in it, theirs are. Images
    straight in a folder have its name for a label where several folders are given, as by a shell's `birds/*`, and none
    otherwise; nor has a file. A table has the columns path and, if wanted, label.
    """
    paths = [Path(p) for p in given]
    several = sum(path.is_dir() for path in paths) > 1
    found: dict[str, Found] = {}
    for path in paths:
        for image, label in _images(path, several):
            place = os.path.abspath(image)
            found.setdefault(place, Found(place, label))
    if not found:
        raise NearkinError(f"There is no image in {' '.join(map(str, paths)) or 'nothing'}: name files or folders.")
    return list(found.values())


def _images(path: Path, several: bool) -> Iterable[tuple[Path, str | None]]:
    if path.is_dir():
        return _of_folder(path, several)
    if not path.is_file():
        raise NearkinError(f"There is no file or folder {path}.")
    return _of_table(path) if path.suffix.lower() == ".csv" else [(path, None)]


def _of_folder(top: Path, several: bool) -> Iterable[tuple[Path, str | None]]:
    halves = [top / "train", top / "test"]
    if all(half.is_dir() and subfolders(half) for half in halves):
        return [pair for half in halves for pair in _of_folder(half, several)]
    classes = subfolders(top)
    own = top.resolve().name if several and not classes else None
    loose = [(file, own) for file in sorted(top.iterdir()) if file.is_file() and is_image(file)]
    return loose + [(file, folder.name) for folder in classes for file in files_below(folder) if is_image(file)]


def _of_table(path: Path) -> list[tuple[Path, str | None]]:
    rows = csv.DictReader((line for _, line in lines(path)), skipinitialspace=True, strict=True)
    try:
        table = [{(name or "").strip().lower(): value for name, value in row.items()} for row in rows]
    except csv.Error as error:
        raise NearkinError(f"Cannot read {path} as a csv table: {error}.") from None
    bad = next((n for n, row in enumerate(table, start=2) if not row.get("path") or "" in row), None)
    if bad is not None or not table:
        where = f"row {bad} of {path}" if table else str(path)
        raise NearkinError(f"Cannot use {where}: a table of images has the columns path and, if wanted, label.")
    return [(path.parent / row["path"].strip(), (row.get("label") or "").strip() or None) for row in table]


def none_usable(bad: Sequence[BadImage], total: int) -> NearkinError:
    """What to say where not one image could be used."""
    return bad[0] if total == 1 else NearkinError(f"None of the {total:,} images can be used. The first: {bad[0]}")


def say_bad(bad: Sequence[ValueError], total: int) -> list[str]:
    """Lines that list the images which could not be used."""
    if not bad:
        return []
    return [f"{counted(len(bad), 'image', 'images')} of {total:,} left out:", *(f"  {error}" for error in bad)]
