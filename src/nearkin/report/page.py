"""A report of runs as one HTML page that needs nothing else: no network, no files beside it."""
# MERGED: What a search found, as one page with its pictures in it: nothing to load, nothing to run.

from collections.abc import Sequence
from pathlib import Path

import torch

from nearkin.console import Reporter
from nearkin.data.images import Images, counted, listed
from nearkin.files import whole_file
from nearkin.report import comparison_sections as comparison
from nearkin.report import picture_sections as pictures
from nearkin.report import sections
from nearkin.report.comparing import intervals
from nearkin.report.html import Html, Thumbs, escape, join
from nearkin.report.maps import POINTS
from nearkin.report.measured_runs import MAIN, Study, by_method
from nearkin.report.sections import Material, Section
from nearkin.search.query import Answer

# What the page may load: what it carries. A browser refuses the rest.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(
    studies: Sequence[Study], path: Path, *, title: str = "", points: int = POINTS, reporter: Reporter | None = None
) -> Path:
    """Write the report of one run, or of several side by side."""
    page = report_page(studies, title=title, points=points, reporter=reporter or Reporter())
    with whole_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def report_page(studies: Sequence[Study], *, title: str, points: int, reporter: Reporter) -> str:
    """The page as text."""
    material = Material(studies, by_method(studies), Thumbs(studies[0].images), points)
    makers = [sections.about, sections.scores]
    if len(studies) > 1:
        makers += [comparison.differences]
    if len(material.methods) > 1:
        makers += [comparison.ranking, comparison.retrievals]
    makers += [
        sections.curves,
        pictures.classes,
        pictures.confused,
        pictures.neighbours,
        pictures.similarities,
        pictures.maps,
    ]
    made: list[Section] = []
    with reporter.bar("writing the report") as progress:
        for number, maker in enumerate(makers, start=1):
            made.append(maker(material))
            progress(number, len(makers))
    made += [section for section in (sections.known(material), sections.configuration(material)) if section]
    data = studies[0].config["plan"]["data"].partition(":")[0]
    heading = title or f"{listed(list(material.methods), limit=3)} on {data}"
    return _page(heading, _lead(material), made)


def _lead(material: Material) -> Html:
    """What one sees first: the main scores of one run, or how many there are."""
    studies = material.studies
    if len(studies) > 1:
        where = "Tests and Critical differences" if len(material.methods) > 1 else "Tests"
        text = (
            f"{len(studies)} runs of {counted(len(material.methods), 'method', 'methods')} on the same "
            f"{len(studies[0].query):,} queries of {studies[0].images.classes:,} classes. What differs by more than "
            f"chance is said under {where}, and only there."
        )
        return Html(f"<p>{escape(text)}</p>")
    tiles = []
    for metric in reversed(MAIN):
        found = intervals(studies[0], metric).classes
        tiles.append(
            f"<li><span>{metric}, percent</span><b>{found.mean:.1f}</b>"
            f"<span>95 % over classes: {found.low:.1f} to {found.high:.1f}</span></li>"
        )
    return Html(f'<ul class="tiles">{"".join(tiles)}</ul>')


def _page(title: str, lead: Html, made: Sequence[Section]) -> str:
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
        '<a class="skip" href="#main">To the content</a>\n<div class="page">\n'
        f"<header><h1>{escape(title)}</h1>{lead}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<main id="main">{body}</main>\n'
        "<footer>Written by nearkin report. The page carries all it shows.</footer>\n"
        f"</div>\n<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --paper: #fdfdfc; --soft: #59606b; --rule: #dcdfe4; --kin: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --soft: #a3abb6; --rule: #373d46; --kin: #5aaee0; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; overflow-wrap: anywhere; } p, small { color: var(--soft); }
section { border-top: 1px solid var(--rule); padding: .5rem 0 1rem; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .8rem; }
ol { margin: 0; padding: 0; list-style: none; }
li { border-top: 4px solid transparent; padding-top: .3rem; font-size: .9rem; overflow-wrap: anywhere; }
li.query { font-weight: bold; } li.kin { border-color: var(--kin); }
img { display: block; width: 100%; height: auto; aspect-ratio: 1; object-fit: contain; }
img.pixels { image-rendering: pixelated; }
"""


def search_page(answers: Sequence[Answer], *, title: str, note: str) -> str:
    """The page: each query with its hits, best first; kin, where a threshold tells, have a bar above them."""
    paths = list(dict.fromkeys(p for a in answers for p in (a.query, *(hit.path for hit in a.hits))))
    thumbs = Thumbs(Images([Path(p) for p in paths], torch.zeros(len(paths), dtype=torch.int64), ("",)))
    row = {path: number for number, path in enumerate(paths)}
    sections = join(_section(answer, thumbs, row) for answer in answers)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{escape(title)}</h1><p>{escape(note)}</p>\n{sections}</main></body></html>\n"
    )


def _section(answer: Answer, thumbs: Thumbs, row: dict[str, int]) -> Html:
    items = [Html(f'<li class="query">{thumbs.image(row[answer.query], "the query")}the query</li>')]
    for hit, kin in zip(answer.hits, answer.kin, strict=True):
        name = Path(hit.path).name
        picture = thumbs.image(row[hit.path], name)
        words = f"{escape(hit.label or '')}<br>{hit.similarity:.3f}{', kin' if kin else ''}"
        items.append(
            Html(
                f'<li class="{"kin" if kin else "hit"}" title="{escape(hit.path)}">{picture}{words}'
                f"<br><small>{escape(name)}</small></li>"
            )
        )
    return Html(f"<section><h2>{escape(answer.query)}</h2><ol>{join(items)}</ol></section>\n")
