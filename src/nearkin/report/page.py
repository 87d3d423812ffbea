"""The report of runs: a page that needs no other file and no network."""

from collections.abc import Sequence
from pathlib import Path

from nearkin.console import Reporter
from nearkin.data.images import counted, listed
from nearkin.files import atomic_file
from nearkin.report import picture_sections as pictures
from nearkin.report import sections
from nearkin.report.comparison import intervals
from nearkin.report.html import Html, Thumbnails, document, escape, join
from nearkin.report.maps import POINTS
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun, by_method
from nearkin.report.sections import ReportData, Section


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
    return compose_page(heading, _summary(report), made)


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


def compose_page(title: str, summary: Html, made: Sequence[Section], *, command: str = "nearkin report") -> str:
    """Compose a page of sections that needs no other file."""
    links = join(Html(f'<li><a href="#{section.id}">{escape(section.title)}</a></li>') for section in made)
    body = join(
        Html(
            f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
            f'<h2 id="{section.id}-title">{escape(section.title)}</h2>{section.body}</section>\n'
        )
        for section in made
    )
    nav = Html(f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n')
    return document(title, summary, body, nav=nav, command=command, script=True)
