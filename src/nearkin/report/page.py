"""Pages that need no other file and no network: the report of runs, and the results of a search."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nearkin.console import Reporter
from nearkin.data.images import Images, counted, listed
from nearkin.files import atomic_file
from nearkin.report import picture_sections as pictures
from nearkin.report import sections
from nearkin.report.comparison import intervals
from nearkin.report.html import Html, Thumbnails, escape, join
from nearkin.report.maps import POINTS
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun, by_method
from nearkin.report.sections import ReportData, Section
from nearkin.search.query import Answer

# The browser refuses to load anything that is not inside the page.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(
    runs: Sequence[MeasuredRun], path: Path, *, title: str = "", points: int = POINTS, reporter: Reporter | None = None
) -> Path:
    """Write the report of one run, or of several side by side."""
    page = report_page(runs, title=title, points=points, reporter=reporter or Reporter())
    with atomic_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def report_page(runs: Sequence[MeasuredRun], *, title: str, points: int, reporter: Reporter) -> str:
    """The report as the text of a page."""
    report = ReportData(runs, by_method(runs), Thumbnails(runs[0].images), points)
    makers = [sections.about, sections.scores]
    if len(runs) > 1:
        makers += [sections.significance]
    if len(report.methods) > 1:
        makers += [sections.ranking, pictures.retrievals]
    makers += [
        sections.curves,
        pictures.classes,
        pictures.confusions,
        pictures.neighbours,
        pictures.similarities,
        pictures.maps,
    ]
    made: list[Section] = []
    with reporter.bar("writing the report") as progress:
        for number, maker in enumerate(makers, start=1):
            made.append(maker(report))
            progress(number, len(makers))
    made += [section for section in (sections.training_classes(report), sections.configuration(report)) if section]
    data = runs[0].config["plan"]["data"].partition(":")[0]
    heading = title or f"{listed(list(report.methods), limit=3)} on {data}"
    return _page(heading, _summary(report), made)


def _summary(report: ReportData) -> Html:
    """The top of the page: the main scores of one run, or the number of runs."""
    runs = report.runs
    if len(runs) > 1:
        where = "Tests and Critical differences" if len(report.methods) > 1 else "Tests"
        text = (
            f"{len(runs)} runs of {counted(len(report.methods), 'method', 'methods')} on the same "
            f"{len(runs[0].query):,} queries of {runs[0].images.classes:,} classes. See {where} for which "
            "differences are significant."
        )
        return Html(f"<p>{escape(text)}</p>")
    tiles = []
    for metric in reversed(MAIN_METRICS):
        found = intervals(runs[0], metric).classes
        tiles.append(
            f"<li><span>{metric}, percent</span><b>{found.mean:.1f}</b>"
            f"<span>95 % over classes: {found.low:.1f} to {found.high:.1f}</span></li>"
        )
    return Html(f'<ul class="tiles">{"".join(tiles)}</ul>')


def _page(title: str, summary: Html, made: Sequence[Section]) -> str:
    links = join(Html(f'<li><a href="#{section.id}">{escape(section.title)}</a></li>') for section in made)
    body = join(
        Html(
            f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
            f'<h2 id="{section.id}-title">{escape(section.title)}</h2>{section.body}</section>\n'
        )
        for section in made
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to content</a>\n<div class="page">\n'
        f"<header><h1>{escape(title)}</h1>{summary}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<main id="main">{body}</main>\n'
        "<footer>Written by nearkin report. The page needs no other file.</footer>\n"
        f"</div>\n<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def search_page(answers: Sequence[Answer], *, title: str, note: str) -> str:
    """A page of queries with their hits, best first; a bar marks hits above the threshold."""
    paths = list(dict.fromkeys(p for a in answers for p in (a.query, *(hit.path for hit in a.hits))))
    thumbnails = Thumbnails(Images([Path(p) for p in paths], torch.zeros(len(paths), dtype=torch.int64), ("",)))
    row = {path: number for number, path in enumerate(paths)}
    sections = join(_answer_section(answer, thumbnails, row) for answer in answers)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_asset('search.css')}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(note)}</p>\n{sections}</main></body></html>\n"
    )


def _answer_section(answer: Answer, thumbnails: Thumbnails, row: dict[str, int]) -> Html:
    items = [Html(f'<li class="query">{thumbnails.image(row[answer.query], "the query")}the query</li>')]
    for hit, match in zip(answer.hits, answer.same_class, strict=True):
        name = Path(hit.path).name
        picture = thumbnails.image(row[hit.path], name)
        words = f"{escape(hit.label or '')}<br>{hit.similarity:.3f}{', same class' if match else ''}"
        items.append(
            Html(
                f'<li class="{"match" if match else "hit"}" title="{escape(hit.path)}">{picture}{words}'
                f"<br><small>{escape(name)}</small></li>"
            )
        )
    return Html(f"<section><h2>{escape(answer.query)}</h2><ol>{join(items)}</ol></section>\n")
