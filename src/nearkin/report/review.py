"""What to look at in a collection of labelled images, worst first: a page with pictures, and a csv table.

Likely wrong labels, images that are there twice or on both sides of the split, classes that may be one, outliers. All
of it comes from the neighbours of the images by the embeddings of a run, or of a network that was trained on other
images.
"""

import csv
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Dataset, Images, counted, joined
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation.suspects import ClassPair, Neighbours, Votes, confused_pairs, isolation, label_votes
from nearkin.files import atomic_file
from nearkin.networks.backbones import backbone_settings
from nearkin.report.html import Html, Thumbnails, escape, join, paragraph, table
from nearkin.report.page import compose_page
from nearkin.report.sections import Section
from nearkin.search.duplicates import FOUND, Limits, Pair, calibrate_limits, find_pairs, thumbnails_of
from nearkin.search.index.exact import search_exact
from nearkin.search.names import escape_name
from nearkin.training.checkpoint import kept_epochs, open_snapshot
from nearkin.training.images import embed_images, open_images, plan_dataset, training_images
from nearkin.training.model import Model, build_embedder, load
from nearkin.training.moved_data import find_data
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder

NEIGHBOURS = 10  # of each image that vote
SPARE = 5  # further ones, in place of copies
WRONG = 0.5  # a label is likely wrong if another has this much more of the votes
MIXED = 0.25  # classes may be one if each gives the other this share of its votes
FAR = 5.0  # an outlier is this many robust standard deviations farther from its neighbours than the median image
SHOWN = 100  # of each kind on the page; the table has all
EXAMPLES = 3  # neighbours shown beside an image


class Finding(NamedTuple):
    """One thing to look at."""

    kind: str
    score: float  # higher is worse; of each kind on its own scale
    rows: tuple[int, ...]  # the images it is about
    beside: tuple[int, ...]  # images to compare with
    words: str


class Collection(NamedTuple):
    """The images of a data set with their embeddings; training images come first."""

    images: Images
    train: Tensor  # [N] bool
    points: Tensor  # [N, D] projected into the space
    thumbnails: Tensor  # [N, T²]
    model: Model
    columns: dict[str, Tensor]  # values per image [N] that the method stored, NaN for others


class Review(NamedTuple):
    """All findings, worst first within a kind, and the files written."""

    collection: Collection
    limits: Limits
    findings: list[Finding]
    page: Path
    table: Path


KINDS = {
    "label": "Labels that are likely wrong",
    "leak": "Images on both sides of the split",
    "duplicate": "Images that are there twice",
    "classes": "Classes that may be one",
    "outlier": "Images unlike all others",
}
"""Kinds of findings and the titles of their sections."""


@keep_images_open()
def review(
    source: str | Path,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    backbone: str = "lite0",
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Review:
    """Review the images of a run, or of a folder by the features of a network that was not trained on it."""
    reporter = reporter or Reporter()
    source = Path(source)
    run = RunFolder(source)
    of_run = run.config.exists()
    if of_run:
        model = load(source, device=device)
    elif source.is_dir():
        plan = make_plan(
            {"data": f"folder:{source}", "backbone": backbone, "dim": 0, "device": device}, backbone_settings(backbone)
        )
        embedder = build_embedder(plan, "cosine").to(plan.device).eval()
        model = Model(embedder, plan, ())
    else:
        raise NearkinError(f"{source} is neither the folder of a run nor a folder of images.")
    collection = _collect(model, data, run if of_run and data is None else None, reporter)
    limits, findings = find(collection, reporter)
    where = Path(out) if out is not None else (source / "review" if of_run else Path("review"))
    where.mkdir(parents=True, exist_ok=True)
    names = _file_names(collection)
    done = Review(collection, limits, findings, where / "review.html", where / "review.csv")
    _write_table(done, names)
    with reporter.bar("writing the page") as progress, atomic_file(done.page) as temporary:
        temporary.write_text(_page(done, names), encoding="utf-8")
        progress(1, 1)
    return done


def _collect(model: Model, data: str | None, run: RunFolder | None, reporter: Reporter) -> Collection:
    """Embed training and test images as one collection."""
    if run is None:
        dataset = _with_own_split(data or model.plan.data)
    else:
        dataset = plan_dataset(dataclasses.replace(model.plan, data=find_data(run)))
    for sentence in dataset.notes:
        reporter.note(sentence)
    opened = [
        open_images(model, images, what, reporter=reporter)
        for images, what in ((dataset.train, "training"), (dataset.test, "test"))
        if len(images)
    ]
    parts = [embed_images(model, each, reporter=reporter) for each in opened]
    thumbnails = torch.cat([thumbnails_of(each.store) for each in opened])
    images = joined([part.images for part in parts])
    points = model.space.project(torch.cat([part.x for part in parts]).float()).cpu()
    train = torch.arange(len(images)) < len(parts[0].images)
    return Collection(images, train, points, thumbnails, model, {} if run is None else _stored(run, images))


def _with_own_split(data: str) -> Dataset:
    """Open a data set with its own split into training and test images; without one, all are training images."""
    whole = load_dataset(data, test="none")
    try:
        dataset = load_dataset(data)
    except NearkinError:  # too few classes to split, or no test images
        return whole
    return whole if dataset.split else dataset


def _stored(run: RunFolder, images: Images) -> dict[str, Tensor]:
    """What the method stored about each training image, in the order of `images`."""
    epochs = list(kept_epochs(run))
    if not epochs:
        return {}
    snapshot = open_snapshot(run, epochs[-1], device="cpu")
    values = snapshot.method.image_values()
    if not values or isinstance(images.sources, Tensor):
        return {}
    trained, _ = training_images(snapshot.model.plan, plan_dataset(snapshot.model.plan))
    place = {source: row for row, source in enumerate(images.sources)}
    columns = {}
    for name, value in values.items():
        if len(value) == len(trained):
            column = torch.full((len(images),), torch.nan)
            for source, number in zip(trained.sources, value.tolist(), strict=True):
                if source in place:
                    column[place[source]] = number
            columns[name] = column
    return columns


def find(c: Collection, reporter: Reporter) -> tuple[Limits, list[Finding]]:
    """All findings of a collection, and from which similarity on two images count as nearly the same."""
    model, space = c.model, c.model.space
    with reporter.bar("comparing") as progress:
        wanted = min(NEIGHBOURS, max(3, int(c.images.counts.median()) - 1))
        vectors = c.points.numpy()
        rows, s = (torch.from_numpy(part) for part in search_exact(vectors, vectors, wanted + SPARE + 1, space=space))
        itself = rows == torch.arange(len(rows))[:, None]
        rows = rows.masked_fill(itself, -1)

        def embed(pictures: list[Tensor]) -> Tensor:
            return space.project(model.embed(pictures).float()).cpu()

        known = (c.images, c.points, c.thumbnails)
        limits = calibrate_limits(*known, embed, space.rowwise, short_side=model.short_side)
        pairs = find_pairs(*known, space.rowwise, limits)
        near = _without_copies(Neighbours(rows, s), pairs, wanted)
        progress(1, 1)
    labels = c.images.labels
    votes = label_votes(near, labels)
    found = [
        *_wrong_labels(c, near, votes),
        *_copies(c, pairs),
        *_mixed_classes(c, confused_pairs(near, labels, least=MIXED)),
        *_outliers(near),
    ]
    order = list(KINDS)
    return limits, sorted(found, key=lambda finding: (order.index(finding.kind), -finding.score))


def _without_copies(found: Neighbours, pairs: Sequence[Pair], k: int) -> Neighbours:
    """The k nearest neighbours that are not copies of the image, nor copies of its copies."""
    group = list(range(len(found.rows)))

    def leader(row: int) -> int:
        while group[row] != row:
            row = group[row]
        return row

    for pair in pairs:
        group[leader(pair.second)] = leader(pair.first)
    groups = torch.tensor([leader(row) for row in range(len(group))])
    same = groups[found.rows.clamp_min(0)] == groups[:, None]
    rows = found.rows.masked_fill(same, -1)
    order = torch.argsort((rows < 0).to(torch.uint8), dim=1, stable=True)[:, :k]
    return Neighbours(rows.gather(1, order), found.s.gather(1, order))


def _wrong_labels(c: Collection, near: Neighbours, votes: Votes) -> Iterator[Finding]:
    margin = votes.other - votes.own
    for row in (margin >= WRONG).nonzero().flatten().tolist():
        other = c.images.names[int(votes.label[row])]
        words = (
            f"labelled {c.images.names[int(c.images.labels[row])]}; its neighbours say {other} "
            f"({100 * float(votes.other[row]):.0f} % of their votes, {100 * float(votes.own[row]):.0f} % for the label)"
        )
        words += "".join(f"; {name}: {value[row]:g}" for name, value in c.columns.items() if value[row] > 0)
        yield Finding("label", float(margin[row]), (row,), _neighbours_of(near, row), words)


def _neighbours_of(near: Neighbours, row: int) -> tuple[int, ...]:
    return tuple(other for other in near.rows[row, :EXAMPLES].tolist() if other >= 0)


def _copies(c: Collection, pairs: Sequence[Pair]) -> Iterator[Finding]:
    for pair in pairs:
        a, b = pair.first, pair.second
        names = [c.images.names[int(c.images.labels[row])] for row in (a, b)]
        words = "the same file content" if pair.exact else f"nearly the same picture, similarity {pair.similarity:.3f}"
        words += f"; both labelled {names[0]}" if names[0] == names[1] else f"; labelled {names[0]} and {names[1]}"
        leaks = bool(c.train[a] != c.train[b])
        # Different labels first: at least one of them is wrong.
        score = pair.similarity + pair.exact + 2 * (names[0] != names[1])
        yield Finding("leak" if leaks else "duplicate", score, (a, b), (), words)


def _mixed_classes(c: Collection, pairs: Sequence[ClassPair]) -> Iterator[Finding]:
    for pair in pairs:
        examples = [(c.images.labels == k).nonzero().flatten()[:EXAMPLES].tolist() for k in (pair.first, pair.second)]
        first, second = c.images.names[pair.first], c.images.names[pair.second]
        words = f"{100 * pair.forth:.0f} % of the votes of {first} go to {second}, {100 * pair.back:.0f} % back"
        yield Finding("classes", pair.both_ways, tuple(examples[0]), tuple(examples[1]), words)


def _outliers(near: Neighbours) -> Iterator[Finding]:
    far = isolation(near)
    for row in (far >= FAR).nonzero().flatten().tolist():
        words = f"{float(far[row]):.1f} robust standard deviations farther from its neighbours than the median image"
        yield Finding("outlier", float(far[row]), (row,), _neighbours_of(near, row), words)


def _file_names(c: Collection) -> list[str]:
    """The file of each image below the folder that all have in common, or its number."""
    if isinstance(c.images.sources, Tensor):
        return [f"{'training' if train else 'test'} image {row}" for row, train in enumerate(c.train.tolist())]
    paths = [os.path.abspath(path) for path in c.images.sources]
    top = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [escape_name(os.path.relpath(path, top)) for path in paths]


def _write_table(done: Review, names: Sequence[str]) -> None:
    c = done.collection
    header = ("kind", "score", "image", "label", "split", "other image", "other label", "what", *c.columns)
    with atomic_file(done.table) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        sheet = csv.writer(file)
        sheet.writerow(header)
        for finding in done.findings:
            row, *others = [*finding.rows, *finding.beside]
            other = others[0] if others else None
            if finding.kind == "classes":
                other = finding.beside[0]
            sheet.writerow(
                (
                    finding.kind,
                    f"{finding.score:.4f}",
                    *(names[row], _label(c, row), "train" if c.train[row] else "test"),
                    *(("", "") if other is None else (names[other], _label(c, other))),
                    escape_name(finding.words),
                    *("" if value[row].isnan() else f"{value[row]:g}" for value in c.columns.values()),
                )
            )


def _label(c: Collection, row: int) -> str:
    return escape_name(c.images.names[int(c.images.labels[row])])


NOTES = {
    "label": "The nearest images by embedding vote on each label; listed where another label wins clearly. A run tends "
    "to learn wrong labels of its own training images by heart: it finds fewer of them the longer it trains.",
    "leak": "A test image that was trained on makes scores look better than they are.",
    "duplicate": "Copies with different labels come first: at least one of the labels is wrong.",
    "classes": "The neighbours of both classes are mixed both ways: one class under two names, or two that this "
    "network cannot tell apart.",
    "outlier": "Far from their own nearest neighbours: of another kind than the rest, damaged, or simply rare.",
}


def _page(done: Review, names: Sequence[str]) -> str:
    c = done.collection
    thumbnails = Thumbnails(c.images)

    def picture(row: int) -> Html:
        label = "" if _label(c, row) in names[row] else f"<br>{escape(_label(c, row))}"
        name = escape(names[row]).replace("/", "/<wbr>")  # where a long name may be broken
        image = thumbnails.image(row, _label(c, row))
        return Html(f'<figure class="shot">{image}<figcaption>{name}{label}</figcaption></figure>')

    sections, tiles = [], []
    for kind, title in KINDS.items():
        found = [finding for finding in done.findings if finding.kind == kind]
        tiles.append(f"<li><span>{escape(title)}</span><b>{len(found):,}</b></li>")
        parts = [paragraph(NOTES[kind], "note")]
        if found:
            cells = [
                [join(picture(row) for row in each.rows), each.words, join(picture(row) for row in each.beside)]
                for each in found[:SHOWN]
            ]
            beside = {"classes": "the other class"}.get(kind, "nearest other images")
            parts.append(
                table(
                    ["images", "why", beside if any(e.beside for e in found) else ""],
                    cells,
                    label=title,
                    text=(0, 1, 2),
                )
            )
        else:
            parts.append(paragraph("None found."))
        if len(found) > SHOWN:
            parts.append(paragraph(f"The worst {SHOWN} of {len(found):,}; {done.table.name} has all.", "note"))
        sections.append(Section(kind, title, join(parts)))
    limit = (
        f"{counted(len(c.images), 'image', 'images')} of {counted(c.images.classes, 'class', 'classes')}. Two pictures "
        f"count as nearly the same from similarity {done.limits.similarity:.3f} and thumbnail correlation "
        f"{done.limits.correlation:.3f} on, which {FOUND:.0%} of changed copies of these images reach."
    )
    summary = Html(f'<p>{escape(limit)}</p><ul class="tiles">{"".join(tiles)}</ul>')
    return compose_page("Review: what to look at", summary, sections, command="nearkin review")
