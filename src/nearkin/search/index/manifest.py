"""The manifest of an index in a folder: which files make up the index. To replace it is to commit."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nearkin.errors import NearkinError
from nearkin.files import read_json, write_json
from nearkin.search.index.base import Meta, NoIndex
from nearkin.search.index.engines import MANIFEST

FORMAT = 2
READABLE = (1, FORMAT)  # the first version wrote 1, with other files of items
INDEX_FILES = re.compile(
    r"(items|removed)-\d+(-\d+)?\.safetensors|graph-\d+\.faiss|\.(items|removed|graph|index)[-.].*"
)


class Entry(NamedTuple):
    """One file of items."""

    file: str
    rows: int


class Manifest(NamedTuple):
    """The files that make up the index."""

    meta: Meta
    generation: int = 0  # number of commits, and the number in the names of new files
    next_key: int = 0
    segments: tuple[Entry, ...] = ()
    removed: tuple[str, ...] = ()  # files with the keys of removed items
    graph: Meta | None = None  # file, its items, its digest

    @property
    def files(self) -> set[str]:
        """The names of all files of the index."""
        graph = [self.graph["file"]] if self.graph else []
        return {*(entry.file for entry in self.segments), *self.removed, *graph}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index."""
    path = folder / MANIFEST
    if not path.exists():
        raise NoIndex(f"There is no index in {folder}: create one with nearkin index RUN IMAGES -o {folder}.")
    try:
        content = read_json(path)
    except NearkinError:
        raise NearkinError(f"{path} is damaged: restore it, or create the index again.") from None
    if content.get("format") not in READABLE or "meta" not in content:
        raise NearkinError(f"{path} is not an index manifest of this version: create the index again.")
    try:
        segments = tuple(Entry(*entry) for entry in content["segments"])
        known = {name: content[name] for name in ("meta", "generation", "next_key", "graph")}
        removed = content["removed"] or ()
    except (KeyError, TypeError):
        raise NearkinError(f"{path} is damaged: restore it, or create the index again.") from None
    return Manifest(**known, segments=segments, removed=(removed,) if isinstance(removed, str) else tuple(removed))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit: these files are now the index."""
    write_json(folder / MANIFEST, {"format": FORMAT, **manifest._asdict()})


def clean(folder: Path, manifest: Manifest) -> None:
    """Delete files of the index that the manifest does not name, such as leftovers of an interruption."""
    for path in folder.iterdir():
        if INDEX_FILES.fullmatch(path.name) and path.name not in manifest.files:
            with suppress(PermissionError):  # Windows keeps a file that is mapped until the next commit
                path.unlink(missing_ok=True)
