"""The table of engines that can hold an index, and the addresses that name them."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.errors import NearkinError


class Engine(NamedTuple):
    """One kind of storage. Its class has `create(where, meta)`, and its constructor opens `where`."""

    about: str
    schemes: tuple[str, ...]  # of its URLs; a folder has none
    address: str  # how an address is written, for help texts and errors
    kinds: tuple[str, ...]
    module: str  # imported only when the engine is used: its client is optional
    index: str  # the name of its Index class
    needs: str = ""  # packages
    extra: str = ""  # of nearkin, which installs them

    def load(self) -> Any:
        """Import the engine's Index class, or say how to install its client."""
        try:
            return getattr(import_module(f"nearkin.search.index.{self.module}"), self.index)
        except ModuleNotFoundError:
            if not self.extra:
                raise
            raise NearkinError(f"{self.about} needs {self.needs}: pip install 'nearkin[{self.extra}]'.") from None


ENGINES = {
    "folder": Engine(
        about="An index in a folder",
        schemes=(),
        address="FOLDER",
        kinds=("exact", "hnsw", "ivfpq"),
        module="folder",
        index="FolderIndex",
    ),
    "postgres": Engine(
        about="An index in PostgreSQL",
        schemes=("postgresql", "postgres"),
        address="postgresql://…",
        kinds=("exact", "hnsw"),
        module="postgres",
        index="PostgresIndex",
        needs="psycopg and pgvector",
        extra="pg",
    ),
    "qdrant": Engine(
        about="An index in Qdrant",
        schemes=("qdrant",),
        address="qdrant://host:port/collection",
        kinds=("exact", "hnsw"),
        module="qdrant",
        index="QdrantIndex",
        needs="qdrant-client",
        extra="qdrant",
    ),
}


def store_addresses() -> str:
    """How a store is named, for help texts and errors: "postgresql://… or qdrant://…"."""
    return " or ".join(engine.address for engine in ENGINES.values() if engine.schemes)


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
