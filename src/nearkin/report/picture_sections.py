"""Test classes one by one: how well each is found, which are hardest, and which are taken for which."""
# MERGED: The sections of a report that show the test set: classes, confusions, neighbours, pairs, the map.

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nearkin.data.images import counted
from nearkin.report.charts import histogram
from nearkin.report.comparing import class_means
from nearkin.report.html import Html, Thumbs, escape, figure, join, paragraph, table
from nearkin.report.maps import Map, make_map, map_svg
from nearkin.report.measured_runs import MAIN, Study
from nearkin.report.pairs import pair_similarities
from nearkin.report.sections import Material, Section


class ClassRow(NamedTuple):
    """A test class."""

    label: int
    name: str
    queries: int
    scores: list[dict[str, float]]  # of each method: metric → percent
    taken_for: str  # the class its queries' nearest neighbours belong to most often, where not its own
    share: float  # of its queries, in percent


class Confusion(NamedTuple):
    """Queries of a class whose nearest neighbour is of another class."""

    label: int
    other: int
    times: int
    share: float  # of the queries of the class, in percent
    query: int  # a row: the query whose nearest neighbour is most similar
    found: int  # its nearest neighbour


def class_rows(methods: Sequence[Sequence[Study]]) -> list[ClassRow]:
    """All classes, those with the lowest mean score first; a method is its runs, confusions are the first run's."""
    first = methods[0][0]
    queries = torch.bincount(first.labels, minlength=first.images.classes).tolist()
    scores = [{metric: class_means(runs, metric) for metric in MAIN} for runs in methods]
    mean = np.mean([own[MAIN[0]] for own in scores], axis=0)
    worst: dict[int, Confusion] = {}
    for found in confusions(first):
        worst.setdefault(found.label, found)
    rows = []
    for c in np.argsort(np.where(np.isnan(mean), np.inf, mean), kind="stable").tolist():
        own = worst.get(c)
        rows.append(
            ClassRow(
                label=c,
                name=first.images.names[c],
                queries=queries[c],
                scores=[{metric: float(values[c]) for metric, values in each.items()} for each in scores],
                taken_for=first.images.names[own.other] if own else "",
                share=own.share if own else 0.0,
            )
        )
    return rows


def confusions(study: Study) -> list[Confusion]:
    """Pairs of classes by how often a query of the one has its nearest neighbour in the other, most often first."""
    counted = ~study.values[MAIN[0]].isnan()
    labels, nearest = study.labels, study.near[:, 0]
    others = study.images.labels[nearest]
    wrong = (counted & (others != labels)).nonzero().flatten()
    counts = Counter(zip(labels[wrong].tolist(), others[wrong].tolist(), strict=True))
    size = torch.bincount(labels[counted], minlength=study.images.classes).tolist()
    example: dict[tuple[int, int], int] = {}
    for place in wrong[study.similarity[wrong, 0].argsort(descending=True, stable=True)].tolist():
        example.setdefault((int(labels[place]), int(others[place])), place)
    found = []
    for (a, b), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        place = example[a, b]
        row, other = int(study.query[place]), int(nearest[place])
        found.append(Confusion(a, b, count, 100 * count / size[a], row, other))
    return found


ROWS = 500  # classes in the table, at most: the hardest
QUERIES = 6  # of each kind that are shown
HARDEST, CONFUSED = 8, 12


def classes(material: Material) -> Section:
    """The hardest classes with pictures, and all of them as a table that can be sorted."""
    rows = class_rows(list(material.methods.values()))
    first, several = material.shown[0], len(material.methods) > 1
    cards = []
    for row in rows[:HARDEST]:
        own = (first.images.labels == row.label).nonzero().flatten()[:4].tolist()
        pictures = join(material.thumbs.image(image, row.name) for image in own)
        scored = sum(each[MAIN[0]] for each in row.scores) / len(row.scores)
        mistaken = f"Nearest neighbours most often of “{row.taken_for}” ({row.share:.0f} %)." if row.taken_for else ""
        cards.append(
            f'<li><div class="strip">{pictures}</div><strong>{escape(row.name)}</strong>'
            f"<span>{'Mean ' if several else ''}{MAIN[0]} {scored:.1f}. {escape(mistaken)}</span></li>"
        )
    metrics = MAIN[:1] if several else MAIN
    names = list(material.methods)
    columns = [f"{metric}, {name}" if several else metric for name in names for metric in metrics]
    header = ["class", "queries", *columns, "taken for", "%"]
    cells = [
        [r.name, r.queries, *(f"{each[m]:.1f}" for each in r.scores for m in metrics), r.taken_for, f"{r.share:.0f}"]
        for r in rows[:ROWS]
    ]
    cut = f" The {ROWS} with the lowest mean {MAIN[0]} of {len(rows):,} are shown." if len(rows) > ROWS else ""
    whose = f" (of {first.label.run})" if several else ""
    note = (
        f"Taken for{whose}: the other class that most of its queries have their nearest neighbour in, and how many of "
        f"its queries do, in percent. A score of few queries is a rough one.{cut}"
    )
    body = [
        Html(f"<h3>The hardest, by {MAIN[0]}</h3>"),
        Html(f'<ul class="cards">{"".join(cards)}</ul>'),
        Html("<h3>All classes</h3>" if not cut else "<h3>Classes</h3>"),
        table(header, cells, label="Scores by class", sortable=True, text=(0, len(header) - 2), tall=True),
        paragraph(note, "note"),
    ]
    return Section("classes", "Test classes", join(body))


def confused(material: Material) -> Section:
    """Which classes are taken for which, run by run."""
    parts = []
    for study in material.shown:
        found = confusions(study)[:CONFUSED]
        name = study.images.names
        cells = [
            [
                name[c.label],
                name[c.other],
                c.times,
                f"{c.share:.0f}",
                Html(
                    '<span class="duo">'
                    + material.thumbs.image(c.query, f"query: {name[c.label]}")
                    + material.thumbs.image(c.found, f"found: {name[c.other]}")
                    + "</span>"
                ),
            ]
            for c in found
        ]
        heading = Html(f"<h3>{escape(study.label.run)}</h3>") if len(material.shown) > 1 else Html("")
        if cells:
            header = ["class", "taken for", "times", "% of its queries", "the most alike"]
            shown = table(
                header, cells, label=f"Confusions of {study.label.run}", sortable=True, text=(0, 1), pictures=(4,)
            )
            parts.append(join([heading, shown]))
        else:
            parts.append(join([heading, paragraph("No query has its nearest neighbour in another class.")]))
    note = "A query is taken for another class where its nearest neighbour is of that class (R@1 is wrong)."
    return Section("confusions", "Taken for one another", join([paragraph(note, "note"), *parts]))


def neighbours(material: Material) -> Section:
    """Queries with their nearest neighbours: some at random, and those that go worst."""
    study = material.shown[0]
    rng = torch.Generator().manual_seed(0)
    some = torch.randperm(len(study.query), generator=rng)[:QUERIES].tolist()
    worst: dict[int, int] = {}  # class → its worst query
    for place in study.values[MAIN[0]].nan_to_num(torch.inf).argsort(stable=True).tolist():
        worst.setdefault(int(study.labels[place]), place)
    whose = f" of {study.label.run}" if len(material.shown) > 1 else ""
    parts = [
        legend(),
        Html(f"<h3>Queries chosen at random{escape(whose)}</h3>"),
        *(neighbour_line(study, place, material.thumbs) for place in some),
        Html(f"<h3>The queries with the lowest {MAIN[0]}{escape(whose)}, one of a class</h3>"),
        *(neighbour_line(study, place, material.thumbs) for place in list(worst.values())[:QUERIES]),
    ]
    return Section("neighbours", "Nearest neighbours", join(parts))


def legend() -> Html:
    """What the frames mean."""
    return Html(
        '<p class="note">To the left the query; then its nearest neighbours, the nearest first, with their similarity. '
        '<span class="key right">✓ solid frame: of its class</span> '
        '<span class="key wrong">✗ dashed frame: of another</span></p>'
    )


def neighbour_line(study: Study, place: int, thumbs: Thumbs, *, k: int = 8, name: str = "") -> Html:
    """A query with its k nearest; `name` stands where the query's picture was shown already."""
    names, labels = study.images.names, study.images.labels
    row = int(study.query[place])
    own = names[int(labels[row])]
    items = []
    found = zip(study.near[place, :k].tolist(), study.similarity[place, :k].tolist(), strict=True)
    for number, (near, s) in enumerate(found, start=1):
        right = bool(labels[near] == labels[row])
        other = names[int(labels[near])]
        alt = f"neighbour {number}: {other}, {'right' if right else 'wrong'}"
        items.append(
            f'<li class="{"right" if right else "wrong"}" title="{escape(other)}">{thumbs.image(near, alt)}'
            f"<span>{'✓' if right else '✗'} {s:.2f}</span></li>"
        )
    if name:
        head = f'<div class="who">{escape(name)}</div>'
    else:
        head = f'<div class="query">{thumbs.image(row, f"query: {own}")}<span>{escape(own)}</span></div>'
    return Html(f'<div class="line">{head}<ol class="near">{"".join(items)}</ol></div>')


def similarities(material: Material) -> Section:
    """Histograms of the similarity of kin and of strangers."""
    charts = []
    for study in material.shown:
        found = pair_similarities(study)
        series = {"pairs of one class": found.kin, "pairs of two classes": found.strangers}
        title = f"Similarities of pairs, {study.label.run}"
        chart = histogram(series, x=f"similarity ({study.space} space)", y="density", title=title)
        which = "all" if found.all_kin else "a sample of"
        words = (
            f"{study.label.run}: {which} {len(found.kin):,} pairs of one class, {len(found.strangers):,} of two. "
            f"A random pair of one class is the more similar in {100 * found.separation:.1f} % of comparisons."
        )
        charts.append(figure(chart, words))
    note = "Each outline has area 1. How far the two stand apart tells how well one threshold would serve all classes."
    body = join([paragraph(note, "note"), Html(f'<div class="charts big">{join(charts)}</div>')])
    return Section("similarities", "Similarities of pairs", body)


def maps(material: Material) -> Section:
    """t-SNE of the test set, one run of each method, with a way to pick out a class."""
    drawn = [(study, make_map(study, points=material.points)) for study in material.shown]
    first, found = drawn[0]
    shown = sorted({int(first.images.labels[row]) for row in found.rows}, key=lambda c: first.images.names[c])
    options = "".join(f'<option value="{c}">{escape(first.images.names[c])}</option>' for c in shown)
    pick = Html(f'<label class="pick">Pick out a class <select><option value="">all</option>{options}</select></label>')
    charts = [
        figure(
            map_svg(own, study.images.labels, study.images.names, title=f"t-SNE map, {study.label.run}"),
            f"{study.label.run}. {_map_words(study, own)}",
            kind="square",
        )
        for study, own in drawn
    ]
    note = (
        "t-SNE keeps who is near whom and little else: sizes of clusters and distances between them mean nothing. "
        "Colour and shape together stand for a class and come again where there are many; hover over a point for its "
        "name, or pick a class."
    )
    body = join([paragraph(note, "note"), pick, Html(f'<div class="charts big">{join(charts)}</div>')])
    return Section("map", "Map of the test set", body)


def _map_words(study: Study, found: Map) -> str:
    images = f"{len(found.rows):,} of {len(study.images):,} test images."
    if not len(found.proxies):
        return f"{images} The run kept no proxies."
    some = f"{len(found.proxies):,} of {found.all_proxies:,}" if len(found.proxies) < found.all_proxies else "the"
    shared = study.trained_on & set(study.images.names)
    whose = (
        f"some of which are test classes, too ({len(shared)} by name)"
        if shared
        else "no image here is of those: a star among points says that unseen images lie where a training class does"
    )
    return f"{images} Stars: {some} {counted(len(found.proxies), 'proxy', 'proxies')} of training classes, {whose}."
