"""Searching an index with images: the model that belongs to it, and the similarity from which hits count as kin."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.data.image_files import Found
from nearkin.data.pixels.decode import BadImage
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json
from nearkin.search.calibrate import FILE
from nearkin.search.embed import embed_chunk, read_chunks
from nearkin.search.index import Hit, Index
from nearkin.spec import nearest
from nearkin.training.model import Model, fingerprint, load


class Answer(NamedTuple):
    """What was found for one image."""

    query: str  # its path
    hits: list[Hit]
    kin: list[bool | None]  # whether each hit is similar enough to be of the query's class; None without a threshold


def model_of(index: Index, *, run: str | Path | None = None, device: str = "auto") -> Model:
    """The model that made an index's embeddings; another one, whose similarities would mean nothing, is refused."""
    folder = Path(run) if run is not None else index.run
    if folder is None:
        raise NearkinError("The index does not say which run made it: name the run's folder by --run.")
    if not folder.is_dir():
        raise NearkinError(
            f"There is no run folder {folder}, whose model made the index: say by --run where it is now."
        )
    check_model(index, folder)
    return load(folder, device=device)


def check_model(index: Index, run: Path) -> None:
    """Refuse a run whose model is not the one that made the index."""
    if index.meta["fingerprint"] not in (None, fingerprint(run)):
        raise NearkinError(f"The index was made with another model than the one in {run}: index the images anew.")


def check_labels(index: Index, labels: Sequence[str]) -> None:
    """Refuse a label that no item has: it may be misspelt."""
    known = index.label_names() if labels else []
    for label in labels:
        if label not in known:
            raise NearkinError(f"No item of the index has the label {label!r}.{nearest(label, known)}")


def run_threshold(run: Path | None) -> Json | None:
    """The threshold that `nearkin calibrate` kept in a run folder."""
    return read_json(run / FILE) if run is not None and (run / FILE).exists() else None


def threshold_of(index: Index, run: str | Path | None = None) -> Json | None:
    """The similarity from which a hit counts as the query's kin (`similarity`), and what that was calibrated on.

    The run's own is asked for first, where the run is now: it may be younger than the index.
    """
    kept: Json | None = index.meta.get("threshold")
    return run_threshold(Path(run) if run is not None else index.run) or kept


def search_images(
    index: Index,
    model: Model,
    images: Sequence[Found],
    *,
    k: int = 10,
    labels: Sequence[str] | None = None,
    run: str | Path | None = None,
) -> tuple[list[Answer], list[BadImage]]:
    """The k nearest items of each image, itself left out where it is in the index; and the images that are unusable.

    `run` is where the run is now, if it has moved: its threshold tells which hits are kin.
    """
    threshold = threshold_of(index, run)
    answers: list[Answer] = []
    bad: list[BadImage] = []
    for chunk in read_chunks(model, images):
        bad += chunk.bad
        if chunk.store is None:
            continue
        found = index.search(embed_chunk(model, chunk), k + 1, labels=labels)
        for image, hits in zip(chunk.images, found, strict=True):
            others = [hit for hit in hits if hit.id != image.path][:k]
            kin = [None if threshold is None else hit.similarity >= threshold["similarity"] for hit in others]
            answers.append(Answer(image.path, others, kin))
    return answers, bad


def threshold_words(threshold: Json | None) -> str:
    """What a threshold means, in a sentence."""
    if threshold is None:
        return "No similarity is known from which a hit is kin: nearkin calibrate RUN chooses one."
    return (
        f"Kin: a similarity of {threshold['similarity']:.3f} or more; {threshold['precision']:.0%} of such pairs were "
        f"of one class on {threshold['on']}."
    )


def rows_of(answer: Answer) -> list[list[str]]:
    """The hits as rows of a table."""
    return [
        [shown(hit.path), hit.label or "", f"{hit.similarity:.4f}", "kin" if kin else ""]
        for hit, kin in zip(answer.hits, answer.kin, strict=True)
    ]


def as_records(answers: Sequence[Answer], bad: Sequence[BadImage], threshold: Json | None) -> Json:
    """What was found, for a program."""
    queries = [
        {"path": a.query, "hits": [{**hit._asdict(), "kin": kin} for hit, kin in zip(a.hits, a.kin, strict=True)]}
        for a in answers
    ]
    unusable = [{"path": str(image.path), "reason": image.reason} for image in bad]
    return {"queries": queries, "unusable": unusable, "threshold": threshold}


def shown(path: str) -> str:
    """A path as short as it can be read from here."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
