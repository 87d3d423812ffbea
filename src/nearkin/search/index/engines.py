"""Where an index is: a folder, a store that a URL names, or a folder that only says which store."""

import os
import re
from pathlib import Path
from typing import Any

from nearkin.errors import NearkinError
from nearkin.files import read_json, write_json
from nearkin.search.index.base import Index, new_meta
from nearkin.search.index.folder import EmbeddedIndex
from nearkin.search.index.segments import manifest_path

POINTER = "store.json"


def create_index(
    where: str | Path,
    *,
    dim: int,
    space: str,
    kind: str = "exact",
    run: str | Path | None = None,
    store: str | None = None,
) -> Index:
    """A new index of nothing, in a folder or in a store. `run` is the folder of the model that makes the embeddings.

    With both a folder and a store, the items are in the store, and the folder says where (without its password).
    """
    from nearkin.training.model import fingerprint

    _check_store(store)
    run = None if run is None else Path(os.path.abspath(run))
    meta = new_meta(dim=dim, space=space, kind=kind, run=run, fingerprint=None if run is None else fingerprint(run))
    if store is not None and str(where) != store:
        folder = _free(Path(where))
        index: Index = _store(store).create(store, meta)
        _point(folder, store)
        return index
    if is_url(where):
        made: Index = _store(str(where)).create(str(where), meta)
        return made
    return EmbeddedIndex.create(_free(Path(where)), meta)


def open_index(where: str | Path, *, store: str | None = None) -> Index:
    """The index that is there. With a store, the folder says that the index is in that one; a new folder then will."""
    _check_store(store)
    if is_url(where):
        found: Index = _store(str(where))(str(where))
        return found
    pointer = Path(where) / POINTER
    if store is not None and not exists(where):
        there = open_index(store)
        _point(_free(Path(where)), store)
        return there
    if not pointer.exists():
        index = EmbeddedIndex(Path(where))
        if store is not None:
            raise NearkinError(f"The items of {where} are in that folder itself: leave --store out.")
        return index
    known: str = read_json(pointer)["store"]
    if store is not None and without_password(store) != known:
        raise NearkinError(f"The items of {where} are in {known}: leave --store out, or choose another folder.")
    return open_index(store or known)


def exists(where: str | Path) -> bool:
    """Whether a folder holds an index, or says where one is. Of a URL only opening it can tell."""
    return not is_url(where) and ((Path(where) / POINTER).exists() or manifest_path(Path(where)).exists())


def is_url(where: str | Path) -> bool:
    """Whether it names a store."""
    return isinstance(where, str) and "://" in where


def without_password(url: str) -> str:
    """The URL as it may be written down."""
    named = re.sub(r"(://[^/?@:]*):[^/?]*@", r"\1@", url)
    return re.sub(r"(?<=[?&])(ssl)?password=[^&]*&?", "", named).rstrip("?&")


def _check_store(store: str | None) -> None:
    if store is not None and not is_url(store):
        raise NearkinError(f"A store is named as postgresql://… or qdrant://host:port/collection, not {store!r}.")


def _point(folder: Path, store: str) -> None:
    write_json(folder / POINTER, {"store": without_password(store)})


def _free(folder: Path) -> Path:
    if exists(folder):
        raise NearkinError(f"There is an index in {folder} already: open it, or choose another place.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NearkinError(f"{folder} is there already and is no index: choose a new folder.")
    return folder


def _store(url: str) -> Any:
    """The class of the store that a URL names; what it needs is imported only now."""
    scheme = url.split("://")[0]
    if scheme in ("postgresql", "postgres"):
        from nearkin.search.index.postgres import PostgresIndex

        return PostgresIndex
    if scheme == "qdrant":
        from nearkin.search.index.qdrant import QdrantIndex

        return QdrantIndex
    raise NearkinError(f"There is no store {scheme}://: use a folder, postgresql://… or qdrant://host:port/collection.")
