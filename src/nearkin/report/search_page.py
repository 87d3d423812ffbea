"""What a search found, as one page with its pictures in it: nothing to load, nothing to run."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nearkin.data.images import Images
from nearkin.report.html import Html, Thumbs, escape, join
from nearkin.search import Answer

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
