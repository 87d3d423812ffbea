"""Embed many images into an index or a file, chunk by chunk. Images embedded before are skipped."""

import shutil
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.console import Reporter
from nearkin.data.image_files import ImageFile
from nearkin.data.pixels.formats import describe_misnamed
from nearkin.data.pixels.image_bytes import BadImage, none_usable
from nearkin.data.pixels.open import open_files
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.threads import map_in_threads
from nearkin.errors import NearkinError
from nearkin.files import atomic_file
from nearkin.search.index import Index, create_index, open_index
from nearkin.search.index.base import Floats
from nearkin.search.index.engines import MANIFEST
from nearkin.search.names import escape_name
from nearkin.search.stamps import is_unchanged, make_stamp, needs_renewal
from nearkin.training.model import Model, fingerprint

CHUNK = 512  # images per commit: the most that an interruption can lose


class Chunk(NamedTuple):
    """Some images with their pixels."""

    images: list[ImageFile]  # those that can be read
    stamps: list[str | None]  # of these
    store: Store | None  # None if none can be read
    bad: list[BadImage]


class Filled(NamedTuple):
    """The result of embedding images into an index."""

    added: int  # new or changed
    kept: int  # in the index before
    bad: list[BadImage]


def read_chunk(model: Model, images: Sequence[ImageFile]) -> Chunk:
    """Decode images on all cores."""
    paths = [Path(image.path) for image in images]
    channels, device = model.embedder.trunk.channels, model.device
    stamps = map_in_threads(make_stamp, [image.path for image in images])  # before the files are decoded
    how = model.storage._asdict()
    store, bad = open_files(paths, **how, channels=channels, device=device, location="device")
    unusable = {image.row for image in bad}
    good = [row for row in range(len(images)) if row not in unusable]
    return Chunk([images[row] for row in good], [stamps[row] for row in good], store, bad)


def read_chunks(model: Model, images: Sequence[ImageFile]) -> Generator[Chunk, None, None]:
    """Decode images chunk by chunk; the next chunk is decoded while this one is used."""
    coming: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(1) as reader:
        for start in range(0, len(images), CHUNK):
            coming.append(reader.submit(read_chunk, model, images[start : start + CHUNK]))
            if len(coming) == 2:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def fill(index: Index, model: Model, images: Sequence[ImageFile], *, reporter: Reporter | None = None) -> Filled:
    """Embed images into an index, one commit per chunk. Images with unchanged file and label are skipped."""
    known = index.stamps() if images else {}
    todo = [image for image in images if not _is_known(image, known)]
    new = {image.path for image in todo}
    kept = [image for image in images if image.path not in new]
    _renew_stamps(index, [image for image in kept if needs_renewal(known[image.path][1], image.path)])
    bad: list[BadImage] = []
    reporter = reporter or Reporter()
    with reporter.bar("embedding") as progress, closing(read_chunks(model, todo)) as chunks:
        done = len(kept)
        for chunk in chunks:
            if chunk.store is not None:
                _add(index, embed_chunk(model, chunk), chunk.images, chunk.stamps)
            bad += chunk.bad
            done += len(chunk.images) + len(chunk.bad)
            progress(done, len(images))
    for sentence in describe_misnamed(Path(image.path) for image in todo):
        reporter.note(sentence)
    reporter.leave_out(image.left_out for image in bad)
    return Filled(len(todo) - len(bad), len(kept), bad)


def _is_known(image: ImageFile, known: Mapping[str, tuple[str | None, str | None]]) -> bool:
    label, stamp = known.get(image.path, (None, None))
    return image.path in known and label == image.label and is_unchanged(stamp, image.path)


def _renew_stamps(index: Index, images: Sequence[ImageFile]) -> None:
    """Renew the stamps of unchanged images whose entries have changed, so that they are not read again each time."""
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        stamps = map_in_threads(make_stamp, [image.path for image in chunk])
        _add(index, index.embeddings([image.path for image in chunk]), chunk, stamps)


def _add(index: Index, vectors: Floats, images: Sequence[ImageFile], stamps: Sequence[str | None]) -> None:
    labels = [image.label for image in images]
    index.add(vectors, paths=[image.path for image in images], labels=labels, stamps=stamps)


def embed_chunk(model: Model, chunk: Chunk) -> Floats:
    """The embeddings [N, D] of a chunk with at least one image."""
    assert chunk.store is not None
    vectors: Floats = model.embed_store(chunk.store).float().cpu().numpy()
    return vectors


def embed_to_file(
    run: Path, model: Model, images: Sequence[ImageFile], out: Path, *, reporter: Reporter | None = None
) -> Filled:
    """Embed images into a .parquet or .npz file, in their order. A .parquet file has escaped names.

    Unfinished work is kept in the index OUT.part: after an interruption, the same call continues from there.
    """
    write = WRITERS.get(out.suffix.lower())
    if write is None:
        raise NearkinError(f"Embeddings are written to a .parquet or .npz file, not to {out.name!r}.")
    if write is write_parquet:
        import_pyarrow()  # fail before the work, not after it

    return embed_and_write(run, model, images, out, write, reporter=reporter)


def embed_and_write(
    run: Path,
    model: Model,
    images: Sequence[ImageFile],
    out: Path,
    write: Callable[[Path, Sequence[ImageFile], Index], None],
    *,
    may_be_empty: bool = False,
    reporter: Reporter | None = None,
) -> Filled:
    """Embed images and, once all are done, `write` the file from those that can be read."""
    with _unfinished(out, run, model) as index:
        filled = fill(index, model, images, reporter=reporter)
        bad = {str(error.path) for error in filled.bad}
        good = [image for image in images if image.path not in bad]
        if not (good or may_be_empty):
            raise none_usable(filled.bad, len(images))
        with atomic_file(out) as temporary:
            write(temporary, good, index)
    shutil.rmtree(work_folder(out))
    return filled


def work_folder(out: Path) -> Path:
    """The index that keeps the unfinished work of a file."""
    return out.with_name(out.name + ".part")


def _unfinished(out: Path, run: Path, model: Model) -> Index:
    """The unfinished work of an earlier call with the same model, or a new index."""
    folder = work_folder(out)
    if (folder / MANIFEST).exists():
        index = open_index(folder)
        if index.meta["fingerprint"] == fingerprint(run):
            return index
        shutil.rmtree(folder)
    return create_index(folder, dim=model.embedder.dim, space=model.embedder.space, run=run)


def _write_npz(path: Path, images: Sequence[ImageFile], index: Index) -> None:
    with path.open("wb") as file:
        np.savez(
            file,
            embeddings=index.embeddings([image.path for image in images]),
            paths=np.array([image.path for image in images]),
            labels=np.array([image.label or "" for image in images]),
            space=np.array(index.space),
        )


def write_parquet(
    path: Path, images: Sequence[ImageFile], index: Index, about: Mapping[str, str] | None = None
) -> None:
    """Write the embeddings of images as a table, with what is known `about` it in its metadata."""
    pa, parquet = import_pyarrow()
    vectors, stamps = index.embeddings([image.path for image in images]), index.stamps()
    table = pa.table(
        {
            "path": pa.array([escape_name(image.path) for image in images], pa.string()),
            "label": pa.array([image.label and escape_name(image.label) for image in images], pa.string()),
            "stamp": pa.array([stamps[image.path][1] for image in images], pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), index.dim),
        }
    )
    made = {"space": index.space, "run": escape_name(str(index.run)), "fingerprint": index.meta["fingerprint"]}
    parquet.write_table(table.replace_schema_metadata(made | dict(about or {})), path)


def import_pyarrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet, or a sentence on how to install them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NearkinError(
            "A .parquet file needs pyarrow: pip install 'nearkin[search]', or choose an .npz file."
        ) from None
    return pyarrow, pyarrow.parquet


WRITERS = {".parquet": write_parquet, ".npz": _write_npz}
