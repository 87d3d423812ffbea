"""The sections that only a report of several runs has: tests, critical differences, the same queries by each method."""

import torch

from nearkin.benchmark.tables import LEVEL
from nearkin.evaluation.statistics import p_words
from nearkin.report.charts import critical_difference
from nearkin.report.comparing import Ranking, class_ranking
from nearkin.report.html import Html, escape, figure, join, paragraph
from nearkin.report.measured_runs import MAIN
from nearkin.report.picture_sections import QUERIES, legend, neighbour_line
from nearkin.report.run_tables import comparison_tables
from nearkin.report.sections import Material, Section, printed

TOP = 3


def differences(material: Material) -> Section:
    """Which differences are more than chance."""
    found = comparison_tables(material.studies)
    if not found:
        return Section("tests", "Tests", paragraph("All runs are seeds of one method: there is nothing to compare."))
    notes = dict.fromkeys(note for each in found for note in each.notes)  # once, not below every table
    tables = [printed(each._replace(notes=[]), text=(0, len(each.header) - 1)) for each in found]
    return Section("tests", "Tests", join([*tables, *(paragraph(note, "note") for note in notes)]))


def ranking(material: Material) -> Section:
    """The critical-difference diagram over test classes, or why there is none."""
    found = class_ranking(material.studies, MAIN[0])
    if found.why_not:
        body = paragraph(f"No critical-difference diagram is drawn. {found.why_not}")
    else:
        names, ranks = found.names, found.ranks
        title = f"Average ranks over {ranks.blocks} test classes by {MAIN[0]}"
        chart = critical_difference(names, ranks.ranks.tolist(), found.groups, ranks.critical, title=title)
        body = join([figure(chart, _words(found), kind="wide"), paragraph(_meaning(material), "note")])
    return Section("ranking", "Critical differences", body)


def _words(found: Ranking) -> str:
    ranks = found.ranks
    friedman = f"Friedman's test over {ranks.blocks:,} test classes: p {p_words(ranks.p)}."
    if not found.differ:
        return f"{friedman} It does not tell the methods apart, so no pair is compared; the bar joins them all."
    return (
        f"{friedman} Average rank of each method by {MAIN[0]} of the class, 1 is best; methods joined by a bar are not "
        f"told apart by Nemenyi's test at {LEVEL}."
    )


def _meaning(material: Material) -> str:
    seeds = any(len(runs) > 1 for runs in material.methods.values())
    which = "each method's mean over its runs" if seeds else "one trained model of each method"
    return (
        f"The blocks are the test classes, and what is ranked is {which}: the diagram speaks about these models on "
        "classes such as these. It does not speak about other data sets, nor about other seeds; for that see the tests "
        "over seeds."
    )


def retrievals(material: Material) -> Section:
    """The nearest three by each method for the same queries: some at random, and those they differ most about."""
    studies = material.shown
    values = torch.stack([study.values[MAIN[0]] for study in studies])
    rng = torch.Generator().manual_seed(1)
    some = torch.randperm(values.shape[1], generator=rng)[:QUERIES].tolist()
    apart = (values.amax(0) - values.amin(0)).nan_to_num(-1.0)
    most = [place for place in apart.argsort(descending=True, stable=True).tolist() if place not in some][:QUERIES]

    def block(place: int) -> Html:
        first = studies[0]
        row = int(first.query[place])
        own = first.images.names[int(first.images.labels[row])]
        lines = join(neighbour_line(study, place, material.thumbs, k=TOP, name=study.label.method) for study in studies)
        picture = material.thumbs.image(row, f"query: {own}")
        return Html(
            f'<li class="case"><div class="query">{picture}<span>{escape(own)}</span></div><div>{lines}</div></li>'
        )

    parts = [
        legend(),
        Html("<h3>Queries chosen at random</h3>"),
        Html(f'<ul class="cases">{join(map(block, some))}</ul>'),
        Html(f"<h3>Queries whose {MAIN[0]} differs most between them</h3>"),
        paragraph("Chosen because the methods disagree: they say where, not how often.", "note"),
        Html(f'<ul class="cases">{join(map(block, most))}</ul>'),
    ]
    return Section("retrievals", "The same queries by each method", join(parts))
