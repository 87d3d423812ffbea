"""The sections of a report that show test images: classes, confusions, neighbours, similarities, the map."""

import torch

from nearkin.data.images import counted
from nearkin.report.charts import histogram
from nearkin.report.html import Html, Thumbnails, escape, figure, join, paragraph, table
from nearkin.report.maps import Map, make_map, map_svg
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun
from nearkin.report.retrieval import class_rows, find_confusions, pair_similarities
from nearkin.report.sections import ReportData, Section

ROWS = 500  # classes in the table, at most: the hardest
QUERIES = 6  # shown of each kind
HARDEST, CONFUSED = 8, 12
TOP = 3  # neighbours by each method of the same query


def classes(report: ReportData) -> Section:
    """The hardest classes with pictures, and a sortable table of all classes."""
    rows = class_rows(list(report.methods.values()))
    first, several = report.first_runs[0], len(report.methods) > 1
    cards = []
    for row in rows[:HARDEST]:
        examples = (first.images.labels == row.label).nonzero().flatten()[:4].tolist()
        pictures = join(report.thumbnails.image(image, row.name) for image in examples)
        score = sum(each[MAIN_METRICS[0]] for each in row.scores) / len(row.scores)
        confusion = f"Most often confused with “{row.confused_with}” ({row.share:.0f} %)." if row.confused_with else ""
        cards.append(
            f'<li><div class="strip">{pictures}</div><strong>{escape(row.name)}</strong>'
            f"<span>{'Mean ' if several else ''}{MAIN_METRICS[0]} {score:.1f}. {escape(confusion)}</span></li>"
        )
    metrics = MAIN_METRICS[:1] if several else MAIN_METRICS
    columns = [f"{metric}, {name}" if several else metric for name in report.methods for metric in metrics]
    header = ["class", "queries", *columns, "confused with", "%"]
    cells = [
        [r.name, r.queries, *(f"{s[m]:.1f}" for s in r.scores for m in metrics), r.confused_with, f"{r.share:.0f}"]
        for r in rows[:ROWS]
    ]
    cut = f" Shown: the {ROWS} of {len(rows):,} classes with the lowest mean {MAIN_METRICS[0]}." if rows[ROWS:] else ""
    whose = f" (by {first.label.run})" if several else ""
    note = (
        f"Confused with{whose}: the other class that most of its queries have their nearest neighbour in, and the "
        f"share of these queries in percent. The score of a class with few queries is uncertain.{cut}"
    )
    body = [
        Html(f"<h3>The hardest, by {MAIN_METRICS[0]}</h3>"),
        Html(f'<ul class="cards">{"".join(cards)}</ul>'),
        Html("<h3>All classes</h3>" if not cut else "<h3>Classes</h3>"),
        table(header, cells, label="Scores by class", sortable=True, text=(0, len(header) - 2), tall=True),
        paragraph(note, "note"),
    ]
    return Section("classes", "Test classes", join(body))


def confusions(report: ReportData) -> Section:
    """Which classes each method confuses."""
    parts = []
    for run in report.first_runs:
        names, image, file = run.images.names, report.thumbnails.image, report.thumbnails.file
        cells = [
            [
                names[c.label],
                names[c.other],
                c.times,
                f"{c.share:.0f}",
                Html(
                    '<span class="duo">'
                    + image(c.query, f"query: {names[c.label]}")
                    + image(c.found, f"found: {names[c.other]}")
                    + "</span>"
                ),
                Html(f"{file(c.query)}<br>{file(c.found)}"),
            ]
            for c in find_confusions(run)[:CONFUSED]
        ]
        if len(report.first_runs) > 1:
            parts.append(Html(f"<h3>{escape(run.label.run)}</h3>"))
        if cells:
            header = ["class", "confused with", "times", "% of its queries", "most similar pair", "its files"]
            label = f"Confusions of {run.label.run}"
            parts.append(table(header, cells, label=label, sortable=True, text=(0, 1, 5), pictures=(4, 5)))
        else:
            parts.append(paragraph("No query has its nearest neighbour in another class."))
    note = "A query is confused with another class if its nearest neighbour is of that class (R@1 is wrong)."
    return Section("confusions", "Confused classes", join([paragraph(note, "note"), *parts]))


def neighbours(report: ReportData) -> Section:
    """Queries with their nearest neighbours: some at random, and some with the lowest score."""
    run = report.first_runs[0]
    some = _random_queries(run, seed=0)
    worst: dict[int, int] = {}  # class → its worst query
    for place in run.values[MAIN_METRICS[0]].nan_to_num(torch.inf).argsort(stable=True).tolist():
        worst.setdefault(int(run.labels[place]), place)
    whose = f" of {run.label.run}" if len(report.first_runs) > 1 else ""
    parts = [
        _legend(),
        Html(f"<h3>Random queries{escape(whose)}</h3>"),
        *(_neighbour_row(run, place, report.thumbnails) for place in some),
        Html(f"<h3>Queries with the lowest {MAIN_METRICS[0]}{escape(whose)}, one per class</h3>"),
        *(_neighbour_row(run, place, report.thumbnails) for place in list(worst.values())[:QUERIES]),
    ]
    return Section("neighbours", "Nearest neighbours", join(parts))


def retrievals(report: ReportData) -> Section:
    """The nearest neighbours by each method for the same queries: some at random, and some the methods disagree on."""
    values = torch.stack([run.values[MAIN_METRICS[0]] for run in report.first_runs])
    some = _random_queries(report.first_runs[0], seed=1)
    gap = (values.amax(0) - values.amin(0)).nan_to_num(-1.0)
    most = [place for place in gap.argsort(descending=True, stable=True).tolist() if place not in some][:QUERIES]
    parts = [
        _legend(),
        Html("<h3>Random queries</h3>"),
        Html(f'<ul class="cases">{join(_retrieval(report, place) for place in some)}</ul>'),
        Html(f"<h3>Queries whose {MAIN_METRICS[0]} differs most between the methods</h3>"),
        paragraph("Chosen because the methods disagree: they show where, not how often.", "note"),
        Html(f'<ul class="cases">{join(_retrieval(report, place) for place in most)}</ul>'),
    ]
    return Section("retrievals", "The same queries by each method", join(parts))


def _retrieval(report: ReportData, place: int) -> Html:
    query = _query_picture(report.first_runs[0], place, report.thumbnails)
    rows = join(
        _neighbour_row(run, place, report.thumbnails, k=TOP, name=run.label.method) for run in report.first_runs
    )
    file = report.thumbnails.file(int(report.first_runs[0].query[place]))
    return Html(f'<li class="case">{query}<div>{rows}</div>{file}</li>')


def _random_queries(run: MeasuredRun, *, seed: int) -> list[int]:
    chosen: list[int] = torch.randperm(len(run.query), generator=torch.Generator().manual_seed(seed))[:QUERIES].tolist()
    return chosen


def _legend() -> Html:
    return Html(
        '<p class="note">On the left the query, then its nearest neighbours with their similarity, nearest first. '
        '<span class="key right">✓ solid frame: same class</span> '
        '<span class="key wrong">✗ dashed frame: other class</span></p>'
    )


def _neighbour_row(run: MeasuredRun, place: int, thumbnails: Thumbnails, *, k: int = 8, name: str = "") -> Html:
    """A query with its k nearest neighbours; `name` replaces the query's picture."""
    names, labels = run.images.names, run.images.labels
    items = []
    found = zip(run.nearest[place, :k].tolist(), run.similarity[place, :k].tolist(), strict=True)
    for number, (near, s) in enumerate(found, start=1):
        right = bool(labels[near] == run.labels[place])
        other = names[int(labels[near])]
        alt = f"neighbour {number}: {other}, {'right' if right else 'wrong'}"
        title = other if isinstance(run.images.sources, torch.Tensor) else f"{other}: {run.images.sources[near]}"
        items.append(
            f'<li class="{"right" if right else "wrong"}" title="{escape(title)}">{thumbnails.image(near, alt)}'
            f"<span>{'✓' if right else '✗'} {s:.2f}</span></li>"
        )
    head = f'<div class="who">{escape(name)}</div>' if name else _query_picture(run, place, thumbnails)
    file = "" if name else thumbnails.file(int(run.query[place]))
    return Html(f'<div class="line">{head}<ol class="near">{"".join(items)}</ol>{file}</div>')


def _query_picture(run: MeasuredRun, place: int, thumbnails: Thumbnails) -> Html:
    name = run.images.names[int(run.labels[place])]
    picture = thumbnails.image(int(run.query[place]), f"query: {name}")
    return Html(f'<div class="query">{picture}<span>{escape(name)}</span></div>')


def similarities(report: ReportData) -> Section:
    """Histograms of the similarities of positive and negative pairs."""
    charts = []
    for run in report.first_runs:
        found = pair_similarities(run)
        series = {"same class": found.positive, "other class": found.negative}
        title = f"Similarities of pairs, {run.label.run}"
        chart = histogram(series, x=f"similarity ({run.space} space)", y="density", title=title)
        which = "all" if found.complete else "a sample of"
        caption = (
            f"{run.label.run}: {which} {len(found.positive):,} same-class pairs, {len(found.negative):,} pairs of "
            f"different classes. A random same-class pair is more similar in {100 * found.separation:.1f} % of "
            "comparisons."
        )
        charts.append(figure(chart, caption))
    note = "Each outline has area 1. Where they overlap, one threshold for all classes makes errors."
    body = join([paragraph(note, "note"), Html(f'<div class="charts big">{join(charts)}</div>')])
    return Section("similarities", "Similarities of pairs", body)


def maps(report: ReportData) -> Section:
    """t-SNE of the test set by each method, with a menu that highlights a class."""
    drawn = [(run, make_map(run, points=report.points)) for run in report.first_runs]
    first, found = drawn[0]
    shown = sorted({int(first.images.labels[row]) for row in found.rows}, key=lambda c: first.images.names[c])
    options = "".join(f'<option value="{c}">{escape(first.images.names[c])}</option>' for c in shown)
    select = f'<select><option value="">all</option>{options}</select>'
    pick = Html(f'<label class="pick">Highlight a class {select}</label>')
    charts = [
        figure(
            map_svg(each, run.images.labels, run.images.names, title=f"t-SNE map, {run.label.run}"),
            f"{run.label.run}. {_map_caption(run, each)}",
            kind="square",
        )
        for run, each in drawn
    ]
    note = (
        "t-SNE keeps neighbourhoods and little else: sizes of clusters and distances between them mean nothing. Colour "
        "and shape stand for the class, and repeat if there are many; hover over a point for its class, or highlight "
        "one."
    )
    body = join([paragraph(note, "note"), pick, Html(f'<div class="charts big">{join(charts)}</div>')])
    return Section("map", "Map of the test set", body)


def _map_caption(run: MeasuredRun, found: Map) -> str:
    images = f"{len(found.rows):,} of {len(run.images):,} test images."
    count, total = len(found.proxies), found.proxy_count
    if not count:
        return f"{images} The run has no proxies."
    some = f"{count:,} of {total:,}" if count < total else "the"
    shared = run.training_classes & set(run.images.names)
    overlap = (
        f"{len(shared)} of which are also test classes, by name"
        if shared
        else "none of them a test class: a star among points means that unseen images lie near a training class"
    )
    return f"{images} Stars: {some} {counted(count, 'proxy', 'proxies')} of training classes, {overlap}."
