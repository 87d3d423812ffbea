"""Search an index with images: its model, its similarity threshold, and the hits as tables and records."""

import csv
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from torch import Tensor

from nearkin.console import plain_table
from nearkin.data.image_files import ImageFile
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.errors import NearkinError
from nearkin.files import Json, Needs, read_json
from nearkin.search.calibrate import FILE
from nearkin.search.embed import embed_chunk, read_chunks
from nearkin.search.index import Hit, Index
from nearkin.search.index.base import Floats, NoItem
from nearkin.search.names import escape_name
from nearkin.spec import nearest
from nearkin.training.model import Model, fingerprint, load


class Query(NamedTuple):
    """One search: by an embedding, by decoded pixels, or by an item of the index."""

    k: int
    labels: tuple[str, ...] | None = None  # only items of these
    vector: Floats | None = None  # [D]
    pixels: Tensor | None = None  # uint8 [C, h, w], uncropped
    id: str | None = None  # of the item to search by, or that the picture is; never among the hits


class Answer(NamedTuple):
    """The hits of one image."""

    query: str  # its path
    hits: list[Hit]
    same_class: list[bool | None]  # whether each hit reaches the threshold; None without one
    label: str | None = None  # of the query, if known

    @property
    def same_label(self) -> list[bool | None]:
        """Whether each hit has the label of the query; None if either has none."""
        return [None if None in (self.label, hit.label) else hit.label == self.label for hit in self.hits]


def model_of(index: Index, *, run: str | Path | None = None, device: str = "auto") -> Model:
    """Load the model that made an index's embeddings; the similarities of another model would mean nothing."""
    folder = Path(run) if run is not None else index.run
    if folder is None:
        raise NearkinError("The index does not say which run made it: pass the run's folder with --run.")
    if not folder.is_dir():
        raise NearkinError(
            f"There is no run folder {folder}, whose model made the index: pass its new place with --run."
        )
    check_model(index, folder)
    return load(folder, device=device)


def check_model(index: Index, run: Path) -> None:
    """Refuse a run whose model is not the one that made the index."""
    if index.meta["fingerprint"] not in (None, fingerprint(run)):
        raise NearkinError(f"The index was made with another model than the one in {run}: create a new index.")


def check_labels(index: Index, labels: Sequence[str]) -> None:
    """Refuse a label that no item has, since it may be misspelt."""
    known = index.label_names() if labels else []
    for label in labels:
        if label not in known:
            raise NearkinError(f"No item of the index has the label {label!r}.{nearest(label, known)}")


def run_threshold(run: Path | None) -> Json | None:
    """The threshold that `nearkin calibrate` stored in a run folder, or None."""
    needs: Needs = {"similarity": int | float, "precision": int | float, "on": str}
    return read_json(run / FILE, needs=needs) if run is not None and (run / FILE).exists() else None


def threshold_of(index: Index, run: str | Path | None = None) -> Json | None:
    """The threshold above which a hit is taken for the query's class (`similarity`), and what it was calibrated on.

    The run's threshold comes first, since it may be newer than the index's. `run` is the run's folder if it has moved.
    """
    kept: Json | None = index.meta.get("threshold")
    return run_threshold(Path(run) if run is not None else index.run) or kept


def search_queries(
    index: Index, queries: Sequence[Query], *, model: Model | None = None
) -> list[list[Hit] | NearkinError]:
    """The k nearest items of each query, best first, or what is wrong with it.

    Pictures are embedded as one batch, and queries with the same k and labels are searched together.
    """
    results: dict[int, list[Hit] | NearkinError] = {}
    groups: dict[tuple[int, tuple[str, ...] | None], dict[int, Floats]] = defaultdict(dict)
    for row, vector in enumerate(_vectors(index, queries, model)):
        if isinstance(vector, NearkinError):
            results[row] = vector
        else:
            groups[queries[row].k, queries[row].labels][row] = vector
    for (k, labels), vectors in groups.items():
        try:
            found = index.search(np.stack(list(vectors.values())), k + 1, labels=labels)
        except NearkinError as error:
            results.update(dict.fromkeys(vectors, error))
            continue
        for row, hits in zip(vectors, found, strict=True):
            results[row] = [hit for hit in hits if hit.id != queries[row].id][:k]
    return [results[row] for row in range(len(queries))]


def _vectors(index: Index, queries: Sequence[Query], model: Model | None) -> list[Floats | NearkinError]:
    """The embedding of each query, or why it has none."""
    pictures = [query.pixels for query in queries if query.pixels is not None]
    if pictures and model is None:
        raise NearkinError("A search by picture needs the model of the index.")
    embedded = iter(
        model.embed(pictures, near_enough=False).float().cpu().numpy() if pictures and model is not None else ()
    )
    vectors: list[Floats | NearkinError] = []
    for query in queries:
        if query.vector is not None:
            vectors.append(query.vector)
        elif query.pixels is not None:
            vectors.append(next(embedded))
        else:
            try:
                vectors.append(index.embeddings([query.id or ""])[0])
            except NearkinError as error:  # the item is not in the index
                vectors.append(error)
    return vectors


def search_images(
    index: Index,
    model: Model,
    images: Sequence[ImageFile],
    *,
    k: int = 10,
    labels: Sequence[str] | None = None,
    run: str | Path | None = None,
) -> tuple[list[Answer], list[BadImage]]:
    """The k nearest items of each image, without the image itself; and the images that cannot be read.

    `run` is the run's folder if it has moved; its threshold tells which hits are of the same class.
    """
    threshold = threshold_of(index, run)
    among = None if labels is None else tuple(labels)
    known = frozenset(index.label_names()) if any(image.label is not None for image in images) else frozenset()
    answers: list[Answer] = []
    bad: list[BadImage] = []
    for chunk in read_chunks(model, images):
        bad += chunk.bad
        if chunk.store is None:
            continue
        vectors = embed_chunk(model, chunk)
        queries = [Query(k, among, vector, id=image.path) for image, vector in zip(chunk.images, vectors, strict=True)]
        for image, hits in zip(chunk.images, search_queries(index, queries), strict=True):
            if isinstance(hits, NearkinError):
                raise hits
            same = [same_class(hit, threshold) for hit in hits]
            answers.append(Answer(image.path, hits, same, _label_of(image, index, known)))
    return answers, bad


def _label_of(image: ImageFile, index: Index, known: Collection[str]) -> str | None:
    """The label of a query: that of the same file in the index, else its folder's if the index has such a label."""
    with suppress(NoItem, UnicodeEncodeError):  # some stores hold only UTF-8
        return index.item(image.path).label
    return image.label if image.label in known else None


def same_class(hit: Hit, threshold: Json | None) -> bool | None:
    """Whether a hit is similar enough to be taken for the query's class; None without a threshold."""
    return None if threshold is None else hit.similarity >= threshold["similarity"]


def threshold_words(threshold: Json | None) -> str:
    """A threshold in a sentence."""
    if threshold is None:
        return "There is no threshold for the same class yet: nearkin calibrate RUN chooses one."
    return (
        f"Same class: a similarity of {threshold['similarity']:.3f} or more; {threshold['precision']:.0%} of such "
        f"pairs were of the same class on {threshold['on']}."
    )


def printed(answer: Answer) -> str:
    """The query and a table of its hits. Paths come last and are never broken, so that they can be copied."""
    label = "" if answer.label is None else f" ({escape_name(answer.label)})"
    rows = [
        [f"{hit.similarity:.4f}", escape_name(hit.label or ""), _verdict(same, alike), shown(hit.path)]
        for hit, same, alike in zip(answer.hits, answer.same_class, answer.same_label, strict=True)
    ]
    return f"{shown(answer.query)}{label}\n{plain_table(['similarity', 'label', '', 'path'], rows)}"


def _verdict(same: bool | None, alike: bool | None) -> str:
    return ", ".join((["same class"] if same else []) + (["other label"] if alike is False else []))


def write_csv(answers: Sequence[Answer], file: TextIO) -> None:
    """Write the hits as CSV, one row per hit, best first. Bytes of names that are not UTF-8 are escaped."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["query", "query_label", "rank", "path", "label", "similarity", "same_class"])
    for answer in answers:
        query = [escape_name(answer.query), escape_name(answer.label or "")]
        for rank, (hit, same) in enumerate(zip(answer.hits, answer.same_class, strict=True), start=1):
            verdict = "" if same is None else "yes" if same else "no"
            found = [escape_name(hit.path), escape_name(hit.label or ""), f"{hit.similarity:.6f}", verdict]
            rows.writerow([*query, rank, *found])


def as_records(answers: Sequence[Answer], bad: Sequence[BadImage], threshold: Json | None) -> Json:
    """The answers as JSON."""
    queries = []
    for answer in answers:
        hits = [{**hit._asdict(), "kin": same} for hit, same in zip(answer.hits, answer.same_class, strict=True)]
        queries.append({"path": answer.query, "label": answer.label, "hits": hits})
    unusable = [{"path": str(image.path), "reason": image.reason} for image in bad]
    return {"queries": queries, "unusable": unusable, "threshold": threshold}


def shown(path: str) -> str:
    """A path for people: relative to the current folder if it is inside, with its odd bytes escaped."""
    here = Path.cwd()
    return escape_name(str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path)
