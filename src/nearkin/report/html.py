"""A page and its pieces: escaped text, tables that scroll and can be sorted, embedded pictures."""

import base64
import html
import io
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from PIL import Image
from torch import Tensor

from nearkin.data.images import Images
from nearkin.report.picture_sheets import as_picture
from nearkin.search.names import escape_name

SIDE = 112  # pixels: longest side of a thumbnail
SMALL = 64  # pixels: pictures up to this side are PNG, and enlarged without smoothing

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser refuses to load anything that is not inside the page."""


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Text escaped for a page, also where it is not UTF-8; `Html` is left as it is."""
    return text if isinstance(text, Html) else Html(html.escape(escape_name(str(text))))


def join(parts: Iterable[Html]) -> Html:
    """Concatenate pieces."""
    return Html("".join(parts))


def document(title: str, summary: Html, body: Html, *, nav: Html, command: str, script: bool = False) -> str:
    """A whole page: its head, the style of a report, a heading with a summary, links to its sections, the sections."""
    ending = f"<script>{_asset('page.js')}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to content</a>\n<div class="page">\n'
        f"<header><h1>{escape(title)}</h1>{summary}</header>\n{nav}"
        f'<main id="main">{body}</main>\n'
        f"<footer>Written by {escape(command)}. The page needs no other file.</footer>\n"
        f"</div>\n{ending}</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def paragraph(text: str, kind: str = "") -> Html:
    """A paragraph, of a CSS class if `kind` is given (`note`)."""
    return Html(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    label: str,
    sortable: bool = False,
    text: Sequence[int] = (0,),
    pictures: Sequence[int] = (),
    tall: bool = False,
) -> Html:
    """A table in a scrolling box. Columns in `text` are aligned left, others right; `pictures` cannot be sorted."""

    def kind(number: int) -> str:
        return ' class="t"' if number in text else ""

    def head(number: int, name: str) -> str:
        button = sortable and name and number not in pictures
        inner = f'<button type="button">{escape(name)}</button>' if button else escape(name)
        return f'<th scope="col"{kind(number)}>{inner}</th>'

    def line(cells: Sequence[object]) -> str:
        first = f'<th scope="row"{kind(0)}>{escape(cells[0])}</th>'
        return "<tr>" + first + "".join(f"<td{kind(n)}>{escape(c)}</td>" for n, c in enumerate(cells) if n) + "</tr>"

    body = "".join(line(row) for row in rows)
    classes = "scroll tall" if tall else "scroll"
    return Html(
        f'<div class="{classes}" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table{' data-sortable' if sortable else ''}>"
        f"<thead><tr>{''.join(head(n, name) for n, name in enumerate(header))}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """A definition list of names and values."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return Html(f'<dl class="facts">{rows}</dl>')


def figure(picture: str, caption: str, *, kind: str = "") -> Html:
    """A chart with its caption."""
    return Html(
        f'<figure class="chart {kind}"><div class="frame">{picture}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


class Thumbnails:
    """Images as small pictures inside the page, each encoded once, and the names of their files."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.made: dict[int, tuple[str, int, int]] = {}

    def image(self, row: int, alt: str) -> Html:
        """The <img> of an image by its row."""
        if row not in self.made:
            self.made[row] = _encoded(as_picture(self.images.sources[row], size=SIDE))
        uri, width, height = self.made[row]
        kind = ' class="pixels"' if max(width, height) <= SMALL else ""
        return Html(f'<img src="{uri}" width="{width}" height="{height}" alt="{escape(alt)}"{kind}>')

    def file(self, row: int) -> Html:
        """The file of an image: its path from the folder that holds all of them; the whole path as a tooltip."""
        if isinstance(self.images.sources, Tensor):
            return Html(f'<code class="file">row {row}</code>')
        path = str(self.images.sources[row])
        return Html(f'<code class="file" title="{escape(path)}">{escape(os.path.relpath(path, self.top))}</code>')

    @cached_property
    def top(self) -> str:
        """The innermost folder that holds all images."""
        return os.path.commonpath([path.parent for path in self.images.sources])


def _encoded(picture: Image.Image) -> tuple[str, int, int]:
    """A data URI and the size: PNG if small, else JPEG."""
    picture.thumbnail((SIDE, SIDE))
    small = max(picture.size) <= SMALL
    buffer = io.BytesIO()
    if small:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "JPEG", quality=80, optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{'png' if small else 'jpeg'};base64,{data}", *picture.size
