"""Build an index from image files. Safe to interrupt: the same call continues."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.console import Reporter
from nearkin.data.image_files import ImageFile, file_size
from nearkin.data.images import counted
from nearkin.data.pixels.image_bytes import none_usable
from nearkin.errors import NearkinError
from nearkin.files import Json
from nearkin.search.embed import Filled, fill
from nearkin.search.index import Index, create_index, open_index
from nearkin.search.index.base import NoIndex
from nearkin.search.index.engines import without_password
from nearkin.search.parts import add_embedded, check_maker
from nearkin.search.query import check_model, run_threshold
from nearkin.training.model import Model, load


class Indexed(NamedTuple):
    """The result of indexing."""

    where: str
    filled: Filled
    removed: int
    items: int
    kind: str
    recall: Json | None


def index_images(
    run: str | Path,
    images: Sequence[ImageFile],
    where: str | Path,
    *,
    embedded: Sequence[Path] = (),
    kind: str | None = None,
    store: str | None = None,
    prune: bool = False,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Indexed:
    """Embed images with a run's model into a new or existing index. `prune` removes items whose files are gone.

    `embedded` are .parquet files of embeddings by the same model, which are added as they are.
    """
    run, reporter = Path(run), reporter or Reporter()
    for file in embedded:
        check_maker(file, run)
    model = load(run, device=device)
    with _open_or_create(run, model, where, kind, store) as index:
        check_model(index, run)
        if kind not in (None, index.kind):
            raise NearkinError(
                f"The index {where} is {index.kind}, not {kind}: leave --kind out, or create another index."
            )
        index.check_build()  # before the work
        read = add_embedded(index, embedded, reporter=reporter)
        filled = fill(index, model, images, reporter=reporter)
        filled = Filled(filled.added + read.added, filled.kept + read.kept, filled.bad)
        removed = index.remove(_without_file(index)) if prune else 0
        if not len(index):
            nothing = NearkinError("The files hold no embeddings: there is nothing to index.")
            raise none_usable(filled.bad, len(images)) if images else nothing
        if filled.added or removed or index.meta["recall"] is None:
            if index.kind != "exact":
                reporter.note(f"Building the {index.kind} index and measuring its recall.")
            index.build()
        index.remember(threshold=run_threshold(run), run=os.path.abspath(run))
        return Indexed(without_password(str(where)), filled, removed, len(index), index.kind, index.meta["recall"])


def _without_file(index: Index) -> list[str]:
    """The ids of items whose files no longer exist, or no longer have the image in them."""
    ids, paths, _ = index.items()
    return [name for name, path in zip(ids, paths, strict=True) if file_size(path) < 0]


def _open_or_create(run: Path, model: Model, where: str | Path, kind: str | None, store: str | None) -> Index:
    try:
        return open_index(where, store=store)
    except NoIndex:
        embedder = model.embedder
        return create_index(where, dim=embedder.dim, space=embedder.space, kind=kind or "exact", run=run, store=store)


def summary(done: Indexed) -> list[str]:
    """The result of indexing in sentences."""
    filled, removed = done.filled, f", {done.removed:,} removed" if done.removed else ""
    lines = [
        f"{counted(done.items, 'image', 'images')} in {done.where} ({filled.added:,} new or changed, "
        f"{filled.kept:,} unchanged{removed})."
    ]
    if done.kind == "exact":
        lines.append("Searches are exact.")
    elif done.recall is None:
        lines.append("Searches are exact: for so few images nothing is faster.")
    else:
        known = done.recall
        lines.append(
            f"Recall@{known['k']} of the {done.kind} index against an exact search: {known['value']:.3f} "
            f"({known['queries']} of its own images as queries)."
        )
    return lines
