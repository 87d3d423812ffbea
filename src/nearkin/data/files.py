"""What can be known of image files without decoding them, and text files read line by line."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nearkin.data.images import counted, listed
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
