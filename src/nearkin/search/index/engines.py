"""The table of engines that can hold an index, and their addresses: folders and URLs."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from nearkin.errors import NearkinError
from nearkin.files import LOCK, write_json
from nearkin.spec import nearest

Kind = Literal["exact", "hnsw", "ivfpq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MANIFEST = "index.json"  # of an index in a folder
POINTER = "store.json"  # in a folder that points to a store: its URL


_LEFTOVER = re.compile(rf"{re.escape(LOCK)}|\.({re.escape(MANIFEST)}|{re.escape(POINTER)})\.\d+")
"""What an interrupted creation leaves in a folder."""


class Engine(NamedTuple):
    """One kind of storage. Its class has `create(where, meta)`, and its constructor opens `where`."""

    about: str
    schemes: tuple[str, ...]  # of its URLs; a folder has none
    address: str  # how an address is written, for help texts and errors
    kinds: tuple[Kind, ...]
    module: str  # imported only when the engine is used: its client is optional
    class_name: str  # of its Index
    needs: str = ""  # packages
    extra: str = ""  # of nearkin, which installs them

    def load(self) -> Any:
        """Import the engine's Index class, or say how to install its client."""
        try:
            return getattr(import_module(f"nearkin.search.index.{self.module}"), self.class_name)
        except ModuleNotFoundError:
            if not self.extra:
                raise
            raise NearkinError(f"{self.about} needs {self.needs}: pip install 'nearkin[{self.extra}]'.") from None


ENGINES = {
    "folder": Engine(
        about="An index in a folder",
        schemes=(),
        address="FOLDER",
        kinds=KINDS,
        module="folder",
        class_name="FolderIndex",
    ),
    "postgres": Engine(
        about="An index in PostgreSQL",
        schemes=("postgresql", "postgres"),
        address="postgresql://…",
        kinds=("exact", "hnsw"),
        module="postgres",
        class_name="PostgresIndex",
        needs="psycopg and pgvector",
        extra="pg",
    ),
    "qdrant": Engine(
        about="An index in Qdrant",
        schemes=("qdrant",),
        address="qdrant://host:port/collection",
        kinds=("exact", "hnsw"),
        module="qdrant",
        class_name="QdrantIndex",
        needs="qdrant-client",
        extra="qdrant",
    ),
    "lance": Engine(
        about="An index in a Lance table",
        schemes=("lance",),
        address="lance:///folder",
        kinds=("exact", "ivfpq"),
        module="lance",
        class_name="LanceIndex",
        needs="pylance",
        extra="lance",
    ),
}


def store_addresses() -> str:
    """How a store is named, for help texts and errors: "postgresql://…, qdrant://… or lance://…"."""
    *most, last = (engine.address for engine in ENGINES.values() if engine.schemes)
    return f"{', '.join(most)} or {last}"


def engine_of(where: str | Path) -> Engine:
    """The engine that an address names."""
    if not is_url(where):
        return ENGINES["folder"]
    scheme = str(where).split("://")[0]
    for engine in ENGINES.values():
        if scheme in engine.schemes:
            return engine
    raise NearkinError(f"There is no store {scheme}://: use a folder, {store_addresses()}.")


def is_url(where: str | Path) -> bool:
    """Whether an address is the URL of a store, not a folder."""
    return isinstance(where, str) and "://" in where


def without_password(url: str) -> str:
    """The URL without its passwords."""
    named = re.sub(r"(://[^/?@:]*):[^/?]*@", r"\1@", url)
    return re.sub(r"(?<=[?&])(ssl)?password=[^&]*&?", "", named).rstrip("?&")


def check_kind(kind: str) -> Kind:
    """The name of a kind, checked."""
    for known in KINDS:
        if kind == known:
            return known
    raise NearkinError(f"There is no index of kind {kind!r}.{nearest(kind, KINDS)} There are: {', '.join(KINDS)}.")


def holds_index(folder: Path) -> bool:
    """Whether a folder holds an index, or the URL of one."""
    return (folder / POINTER).exists() or (folder / MANIFEST).exists()


def check_store(store: str | None) -> None:
    """Refuse a store that is not a URL."""
    if store is not None and not is_url(store):
        raise NearkinError(f"A store is named as {store_addresses()}, not {store!r}.")


def write_pointer(folder: Path, store: str) -> None:
    """Make a folder point to a store, without its password."""
    write_json(folder / POINTER, {"store": without_password(store)})


def check_free(folder: Path) -> Path:
    """Refuse a folder that holds anything."""
    if holds_index(folder):
        raise NearkinError(f"There is an index in {folder} already: open it, or choose another place.")
    if folder.exists() and not (folder.is_dir() and all(_LEFTOVER.fullmatch(path.name) for path in folder.iterdir())):
        raise NearkinError(f"{folder} exists already and is not an index: choose a new folder.")
    return folder
