"""List the image files a user names: files, folders and csv tables; and read text files line by line."""

import csv
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from nearkin.data.archive_index import arrow_files, indexed
from nearkin.data.images import LeaveOut, LeftOut, counted, listed
from nearkin.data.pixels.archives import archive_of, locate
from nearkin.data.pixels.formats import SUFFIXES, looks_like_image
from nearkin.errors import NearkinError

_AT_ONCE = 10_000  # rows of a table


class ImageFile(NamedTuple):
    """One image file, whether or not it can be read."""

    path: str  # absolute
    label: str | None


def list_images(places: Sequence[str | Path], leave_out: LeaveOut | None = None) -> list[ImageFile]:
    """List the images in files, folders and csv tables, each file once; `leave_out` receives those passed over.

    The folders in a folder, or in its train/ and test/, are classes and name the labels. Images directly in a folder
    get its name as label if several folders are listed, as by a shell's `birds/*`, and otherwise none; files get none.
    A table has the columns path and, optionally, label. A tar file or a folder of Arrow files stands for its images,
    with the labels that it has.
    """
    paths = [Path(place) for place in places]
    several = sum(path.is_dir() for path in paths) > 1
    found: dict[str, ImageFile] = {}
    passed: list[LeftOut] = []
    for path in paths:
        for image, label in _images_at(path, several, passed):
            absolute = os.path.abspath(image)
            found.setdefault(absolute, ImageFile(absolute, label))
    if leave_out is not None:
        leave_out(passed)
    if not found:
        raise NearkinError(f"There is no image in {' '.join(map(str, paths)) or 'nothing'}: name files or folders.")
    return list(found.values())


def _images_at(path: Path, several: bool, passed: list[LeftOut]) -> Sequence[tuple[Path | str, str | None]]:
    if files := [file for part in (path, path / "train", path / "test") for file in arrow_files(part)]:
        return [pair for file in files for pair in _images_inside(file)]
    if path.is_dir():
        return _images_in_folder(path, several, passed)
    if path.suffix.lower() == ".tar" and path.is_file():
        return _images_inside(str(path))
    if not path.exists() and archive_of(path) is None:
        raise NearkinError(f"There is no file or folder {path}.")
    if path.exists() and not path.is_file():
        raise NearkinError(f"{path} is a pipe or a device: name image files, folders or csv tables.")
    if path.suffix.lower() != ".csv":
        return [(path, None)]
    return [
        (path.parent / name, label or None)
        for rows in read_table(path, required=("path",))
        for name, label in itertools.zip_longest(rows.columns["path"], rows.columns.get("label", ()))
    ]


def _images_inside(file: str) -> list[tuple[str, str | None]]:
    table, codes, keys = indexed(file, label="")
    return [(os.path.join(file, table.name(row)), keys[code] or None) for row, code in enumerate(codes.tolist())]


def _images_in_folder(top: Path, several: bool, passed: list[LeftOut]) -> list[tuple[Path, str | None]]:
    if parts := train_and_test(top):
        passed += beside_train_and_test(top)
        return [pair for part in parts for pair in _images_in_folder(part, several, passed)]
    classes = class_folders(top, passed)
    label = top.resolve().name if several and not classes else None
    return [(file, label) for file in loose_images(top, passed)] + [
        (file, folder.name) for folder, files in classes.items() for file in files if is_image(file)
    ]


def train_and_test(top: Path) -> tuple[Path, ...]:
    """Return the folders train/ and test/ if there are both with class folders in them; or train/ if nothing else is.

    Otherwise return none.
    """
    train, test = top / "train", top / "test"
    has_train, has_test = (os.path.isdir(part) and bool(subfolders(part)) for part in (train, test))
    if has_train and has_test:
        return train, test
    alone = has_train and all(folder.name in ("train", "test") for folder in subfolders(top))
    return (train,) if alone else ()


def beside_train_and_test(top: Path) -> list[LeftOut]:
    """Return the images and folders beside train/ and test/, which are not looked into."""
    passed: list[LeftOut] = []
    folders = [folder for folder in subfolders(top) if folder.name not in ("train", "test")]
    beside = "it is beside the folders train and test"
    return [LeftOut(path, beside) for path in (*loose_images(top, passed), *folders)] + passed


def class_folders(top: Path, passed: list[LeftOut]) -> dict[Path, list[Path]]:
    """Return the folders directly inside, each with all files in it and below it, sorted and without hidden ones.

    Hidden images and what cannot be looked into are added to `passed`.
    """
    return {folder: sorted(_files_below(folder, passed)) for folder in subfolders(top)}


def _files_below(folder: Path, passed: list[LeftOut]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        passed.append(LeftOut(Path(error.filename), f"the folder cannot be listed ({error.strerror})"))

    for inside, folders, names in os.walk(folder, onerror=note):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [Path(inside) / name for name in folders if os.path.islink(os.path.join(inside, name))]
        passed += [LeftOut(link, "it is a link to a folder, which is not followed") for link in links]
        yield from _without_hidden([Path(inside) / name for name in names], passed)


def _without_hidden(files: Sequence[Path], passed: list[LeftOut]) -> list[Path]:
    hidden = [file for file in files if file.name.startswith(".")]
    passed += [LeftOut(file, "its name begins with a dot") for file in hidden if looks_like_image(file)]
    return [file for file in files if not file.name.startswith(".")]


def subfolders(path: Path) -> list[Path]:
    """Return the folders directly inside, sorted by name, without hidden ones."""
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise NearkinError(f"Cannot list the folder {path}: {error.strerror or error}.") from None


def loose_images(top: Path, passed: list[LeftOut]) -> list[Path]:
    """Return the image files directly in a folder, sorted; hidden ones are added to `passed`."""
    files = [file for file in sorted(top.iterdir()) if file.is_file()]
    return [file for file in _without_hidden(files, passed) if is_image(file)]


def is_image(path: Path) -> bool:
    """Whether the name ends like that of an image, or else the content begins like one."""
    return path.suffix.lower() in SUFFIXES or looks_like_image(path)


class Rows(NamedTuple):
    """Some rows of a table."""

    lines: list[int]  # their numbers
    columns: dict[str, list[str]]


def read_table(path: Path, *, required: Sequence[str]) -> Iterator[Rows]:
    """Yield the rows of a csv table of images, some thousand at a time.

    The `required` columns must be there and not be empty.
    """
    with _text_of(path), path.open(encoding="utf-8-sig") as file:
        # Without the spaces around a line, but with its end, which may be within quotes.
        reader = csv.reader((f"{line.strip()}\n" for line in file), skipinitialspace=True, strict=True)
        numbered = ((reader.line_num, fields) for fields in reader if fields)
        names = [name.strip().lower() for name in next(numbered, (0, []))[1]]
        for name in required:
            if name not in names:
                raise NearkinError(
                    f"{path} has no column {name!r}: its first line must name the columns ({', '.join(required)}, …), "
                    f"separated by commas, but is {','.join(names)!r}."
                )
        rows = list(itertools.islice(numbered, _AT_ONCE))
        if not rows:
            raise NearkinError(f"{path} lists no images: there are no rows below the columns.")
        while rows:
            yield _in_columns(path, names, rows, required)
            rows = list(itertools.islice(numbered, _AT_ONCE))


def _in_columns(path: Path, names: list[str], rows: list[tuple[int, list[str]]], required: Sequence[str]) -> Rows:
    """Turn rows into columns; fields that are missing at the end of a row are empty."""
    too_long = next((row for row, (_, fields) in enumerate(rows) if len(fields) > len(names)), len(rows))
    turned = itertools.zip_longest(names, *(fields for _, fields in rows[:too_long]), fillvalue="")
    columns = {name: list(map(str.strip, values)) for name, *values in turned}
    if empty := [(columns[name].index(""), name) for name in required if "" in columns[name]]:
        row, name = min(empty, key=itemgetter(0))
        raise NearkinError(f"{path}, line {rows[row][0]}: the {name} is empty.")
    if too_long < len(rows):
        line, fields = rows[too_long]
        raise NearkinError(
            f"{path}, line {line}: {len(fields)} fields under {len(names)} columns; quote fields with commas."
        )
    return Rows([line for line, _ in rows], columns)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, numbered from 1."""
    with _text_of(path):
        text = path.read_text(encoding="utf-8-sig")
    return ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip())


@contextmanager
def _text_of(path: Path) -> Iterator[None]:
    """Say which file cannot be read as text or as a csv table."""
    try:
        yield
    except OSError as error:
        raise NearkinError(f"Cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise NearkinError(f"Cannot read {path}: it is not UTF-8 text.") from None
    except csv.Error as error:
        raise NearkinError(f"Cannot read {path} as a csv table: {error}.") from None


def missing_or_empty(sizes: Iterable[int]) -> dict[int, str]:
    """Return the rows whose file is missing or empty by its size, with that word."""
    return {row: "missing" if size < 0 else "empty" for row, size in enumerate(sizes) if size <= 0}


def file_size(path: Path | str) -> int:
    """Return the bytes of an image; -1 if there is no such file."""
    try:
        known = os.stat(path)
    except (OSError, ValueError):  # no path has a zero in it
        return locate(path).size  # in another file
    return known.st_size if stat.S_ISREG(known.st_mode) else -1


def describe_skipped(bad: dict[int, str], paths: Sequence[Path], *, root: Path) -> list[str]:
    """Return one sentence each on missing and on empty files: how many, and which."""
    sentences = []
    for word in sorted(set(bad.values())):
        names = [relative(paths[row], root=root) for row, why in bad.items() if why == word]
        count = counted(len(names), f"{word} image file", f"{word} image files")
        sentences.append(f"{count} skipped: {listed(names)}.")
    return sentences


def relative(path: Path, *, root: Path) -> str:
    """A path for a message: relative to the data set if it is inside."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
