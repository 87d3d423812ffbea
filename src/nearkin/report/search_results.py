"""The results of a search as a page that needs no other file: each query with its hits, best first."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nearkin.data.images import Images
from nearkin.report.html import Html, Thumbnails, document, escape, join, paragraph
from nearkin.search.index import Hit
from nearkin.search.query import Answer, shown


def search_page(answers: Sequence[Answer], *, title: str, note: str) -> str:
    """The page. Hits above the threshold are marked, and hits whose label differs from the query's, if it is known."""
    paths = list(dict.fromkeys(p for a in answers for p in (a.query, *(hit.path for hit in a.hits))))
    thumbnails = Thumbnails(Images([Path(p) for p in paths], torch.zeros(len(paths), dtype=torch.int64), ("",)))
    row = {path: number for number, path in enumerate(paths)}
    summary = paragraph(note)
    if any(answer.label is not None for answer in answers):
        summary = join([summary, _legend()])
    links = [
        Html(f'<li><a href="#q{number}">{escape(Path(answer.query).name)}</a></li>')
        for number, answer in enumerate(answers)
    ]
    nav = Html(f'<nav aria-label="Queries"><ul>{join(links)}</ul></nav>\n' if len(links) > 1 else "")
    body = join(_section(number, answer, thumbnails, row) for number, answer in enumerate(answers))
    return document(title, summary, body, nav=nav, command="nearkin search")


def _legend() -> Html:
    return Html(
        '<p class="note"><span class="key right">✓ same label as the query</span> '
        '<span class="key wrong">✗ other label</span></p>'
    )


def _section(number: int, answer: Answer, thumbnails: Thumbnails, row: dict[str, int]) -> Html:
    query = thumbnails.image(row[answer.query], "the query")
    label = "" if answer.label is None else f"<strong>{escape(answer.label)}</strong>"
    items = join(
        _hit(hit, thumbnails.image(row[hit.path], hit.label or "no label"), same, alike)
        for hit, same, alike in zip(answer.hits, answer.same_class, answer.same_label, strict=True)
    )
    return Html(
        f'<section id="q{number}" aria-labelledby="q{number}-title">'
        f'<h2 id="q{number}-title">{escape(shown(answer.query))}</h2>'
        f'<div class="line found"><div class="query">{query}<span>query</span>{label}</div>'
        f'<ol class="near">{items}</ol></div></section>\n'
    )


def _hit(hit: Hit, picture: Html, same: bool | None, alike: bool | None) -> Html:
    kind = {True: "right", False: "wrong", None: ""}[alike]
    mark = {True: "✓ ", False: "✗ ", None: ""}[alike]
    above = "<em>same class</em>" if same else ""
    return Html(
        f'<li class="{kind}" title="{escape(hit.path)}">{picture}<span>{mark}{hit.similarity:.3f}</span>'
        f"{above}<strong>{escape(hit.label or 'no label')}</strong><small>{escape(Path(hit.path).name)}</small></li>"
    )
