"""Embed a collection in parts, on any number of machines, and read files of embeddings back.

A part is a slice of the list of images, and its file `part-3-of-8.parquet` appears in one step once it is complete: so
the file is also the mark that the part is done. Every file says which model and which list of images it was made from,
and files that disagree are not read together.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin.console import Reporter
from nearkin.data.image_files import ImageFile
from nearkin.data.images import listed
from nearkin.errors import NearkinError, first_line
from nearkin.search.embed import WRITERS, Filled, embed_and_write, import_pyarrow, work_folder, write_parquet
from nearkin.search.index import Index, create_index, open_index
from nearkin.search.index.base import Floats
from nearkin.search.index.engines import is_url
from nearkin.search.names import unescape_name
from nearkin.training.measure_run import RunScores, measure_vectors
from nearkin.training.model import Model, fingerprint, load

READ_AT_ONCE = 2**16
"""Embeddings that are read, and added to an index, at once: files of so many items are never merged."""

_NAME = re.compile(r"part-(\d+)-of-(\d+)\.parquet(\.part)?")


class Part(NamedTuple):
    """One of several parts of a list of images, counted from 1."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part that a text such as 3/8 names."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise NearkinError(f"--part {text} is not a part: it is 1/8 to 8/8 for the first to the last of eight.")
        return cls(int(found[1]), int(found[2]))

    def of(self, images: Sequence[ImageFile]) -> Sequence[ImageFile]:
        """The images of this part; parts differ by at most one image."""
        return images[len(images) * (self.number - 1) // self.total : len(images) * self.number // self.total]

    def file(self, folder: Path) -> Path:
        """The file of this part, which sorts by its number."""
        return folder / f"part-{self.number:0{len(str(self.total))}}-of-{self.total}.parquet"


class Embeddings(NamedTuple):
    """Some embeddings of a file, with their images."""

    vectors: Floats  # [N, D]
    images: list[ImageFile]
    stamps: list[str | None]


def digest_of(images: Sequence[ImageFile]) -> str:
    """A digest of the paths and labels of a list of images."""
    digest = hashlib.blake2b(digest_size=8)
    for image in images:
        digest.update(repr(tuple(image)).encode())
    return digest.hexdigest()


def parts_folder(out: Path) -> Path:
    """The folder of the parts, checked before the work."""
    if out.suffix.lower() in WRITERS or out.is_file():
        raise NearkinError(f"Parts are files in a folder: --out {out} must name one, not a file.")
    import_pyarrow()
    return out


def embed_one_part(
    run: Path,
    images: Sequence[ImageFile],
    folder: Path,
    part: Part,
    *,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Filled:
    """Embed a part of a list of images into the folder, with the model of a run; a finished part is skipped."""
    chosen, digest = part.of(images), digest_of(images)
    return embed_part(run, partial(load, run, device=device), chosen, folder, part, digest, reporter=reporter)


def embed_part(
    run: Path,
    model: Callable[[], Model],
    images: Sequence[ImageFile],
    folder: Path,
    part: Part,
    digest: str,
    *,
    reporter: Reporter | None = None,
) -> Filled:
    """Embed the images of a part, as `embed_one_part` does. `digest` is that of the list they are a part of."""
    file = part.file(folder)
    if file.exists() and _made_from(file) == (fingerprint(run), digest):
        shutil.rmtree(work_folder(file), ignore_errors=True)  # of a process that was killed just before it did this
        with _opened(file) as opened:
            return Filled(0, opened.metadata.num_rows, [])
    write = partial(write_parquet, about={"images": digest})
    return embed_and_write(run, model(), images, file, write, may_be_empty=True, reporter=reporter)


def embedded_files(place: Path) -> list[Path]:
    """The files of embeddings at a place, a .parquet file or a folder with all parts; none if it is something else."""
    if place.is_file() and place.suffix.lower() == ".parquet":
        return [place]
    named = [found for path in place.iterdir() if (found := _NAME.fullmatch(path.name))] if place.is_dir() else []
    if not named:
        return []
    counts = sorted({int(found[2]) for found in named})
    if len(counts) > 1:
        raise NearkinError(
            f"{place} has files of {' and of '.join(map(str, counts))} parts: remove those of all but one splitting."
        )
    parts = [Part(number, counts[0]) for number in range(1, counts[0] + 1)]
    if missing := [str(part.number) for part in parts if not part.file(place).exists()]:
        raise NearkinError(
            f"{place} lacks {len(missing):,} of {counts[0]:,} parts ({listed(missing)}): nearkin embed RUN IMAGES "
            f"--out {place} --part {missing[0]}/{counts[0]} makes the first of them."
        )
    files = [part.file(place) for part in parts]
    _check_made_together(files)
    return files


def _check_made_together(files: Sequence[Path]) -> None:
    """Refuse parts of different lists of images, or by different models."""
    groups: dict[tuple[str | None, str | None], list[str]] = {}
    for file in files:
        groups.setdefault(_made_from(file), []).append(file.name)
    if len(groups) > 1:
        *_, most = sorted(groups.values(), key=len)
        others = [name for names in groups.values() if names is not most for name in names]
        raise NearkinError(
            f"{files[0].parent} holds parts of different lists of images or models: {listed(others)} differ from the "
            "others. Embed all parts again with one model and an unchanged list; those that fit are skipped."
        )


def read_embeddings(file: Path) -> Iterator[Embeddings]:
    """Yield the embeddings of a .parquet file of `nearkin embed`, some at a time."""
    with _opened(file) as opened:
        for batch in opened.iter_batches(READ_AT_ONCE):
            columns: dict[str, list[Any]] = {name: batch[name].to_pylist() for name in ("path", "label")}
            paths = [unescape_name(path) for path in columns["path"]]
            labels = [label and unescape_name(label) for label in columns["label"]]
            stamps = batch["stamp"].to_pylist() if "stamp" in batch.schema.names else [None] * len(paths)
            vectors = np.asarray(batch["embedding"].flatten(), np.float32).reshape(len(paths), -1)
            yield Embeddings(vectors, list(map(ImageFile, paths, labels)), stamps)


def _opened(file: Path) -> Any:
    pa, parquet = import_pyarrow()
    try:
        opened = parquet.ParquetFile(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise NearkinError(f"Cannot read {file} ({first_line(error)}): embed it again.") from None
    if missing := {"path", "label", "embedding"} - set(opened.schema_arrow.names):
        raise NearkinError(f"{file} has no column {min(missing)!r}: give files that nearkin embed wrote.")
    return opened


def _about(file: Path) -> dict[str, str]:
    """What a file says of the embeddings in it: space, run, fingerprint, and the digest of the list of images."""
    with _opened(file) as opened:
        held = opened.schema_arrow.metadata or {}
    return {name.decode(): value.decode() for name, value in held.items()}


def _made_from(file: Path) -> tuple[str | None, str | None]:
    """The fingerprint of the model that made a file, and the digest of the list of images that it is a part of."""
    about = _about(file)
    return about.get("fingerprint"), about.get("images")


def check_maker(file: Path, run: Path) -> None:
    """Refuse embeddings of another model than that of a run."""
    if _made_from(file)[0] != fingerprint(run):
        raise NearkinError(f"{file} was made with another model than the one in {run}: embed the images again.")


def add_embedded(index: Index, files: Sequence[Path], *, reporter: Reporter | None = None) -> Filled:
    """Add the embeddings of files to an index, except those that it has."""
    added = kept = 0
    with (reporter or Reporter()).bar("adding embeddings") as progress:
        for done, file in enumerate(files):
            for vectors, images, stamps in read_embeddings(file):
                labels = [image.label for image in images]
                known = index.stamps([image.path for image in images])
                same = [known.get(i.path) == (i.label, stamp) for i, stamp in zip(images, stamps, strict=True)]
                new = [row for row, is_same in enumerate(same) if not is_same]
                index.add(
                    vectors[new],
                    paths=[images[row].path for row in new],
                    labels=[labels[row] for row in new],
                    stamps=[stamps[row] for row in new],
                )
                added, kept = added + len(new), kept + len(images) - len(new)
            progress(done + 1, len(files))
    return Filled(added, kept, [])


@contextmanager
def open_searchable(where: str, *, run: Path | None = None) -> Iterator[Index]:
    """Open an index, or embeddings in files as a temporary one. `run` is the folder of the run if it has moved."""
    files = [] if is_url(where) else embedded_files(Path(where))
    if not files:
        with open_index(where) as index:
            yield index
        return
    about = _about(files[0])
    with _opened(files[0]) as opened:
        dim = opened.schema_arrow.field("embedding").type.list_size
    maker = run or Path(unescape_name(about["run"]))
    with (
        TemporaryDirectory() as folder,
        create_index(Path(folder) / "index", dim=dim, space=about["space"], run=maker) as index,
    ):
        check_maker(files[0], maker)
        add_embedded(index, files)
        yield index


def measure_embedded(
    run: Path, place: Path, *, metrics: Sequence[str] | None = None, device: str = "auto"
) -> RunScores:
    """The scores of embeddings in files by a run's model, each image searched among all others.

    An image without a label is relevant to none.
    """
    files = embedded_files(place)
    if not files:
        raise NearkinError(f"There are no embeddings in {place}: name what nearkin embed wrote.")
    for file in files:
        check_maker(file, run)
    read = [batch for file in files for batch in read_embeddings(file)]
    images = [image for batch in read for image in batch.images]
    names = {image.label for image in images if image.label is not None}
    if not names:
        raise NearkinError(f"No image in {place} has a label: nearkin embed takes them from folders or a csv table.")
    number = {name: n for n, name in enumerate(names)}
    labels = [number[i.label] if i.label is not None else -1 - row for row, i in enumerate(images)]
    vectors = torch.from_numpy(np.concatenate([batch.vectors for batch in read]))
    return measure_vectors(run, vectors, torch.tensor(labels), names, metrics=metrics, device=device)
