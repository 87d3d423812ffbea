"""Sheets of pictures in rows: classes, or queries with their nearest neighbours, framed and marked right or wrong."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.letters import matplotlib_fonts
from nearkin.data.pixels.decode import decode_file
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.errors import NearkinError
from nearkin.files import atomic_file
from nearkin.space import Space
from nearkin.training.images import Embedded
from nearkin.training.seen_classes import seen_classes

Picture = Image.Image | Tensor | Path  # a tensor is uint8 [1 or 3, H, W]


class Frame(NamedTuple):
    """How a picture is framed; kinds differ in more than colour."""

    colour: str
    dashed: bool = False


RIGHT, WRONG = Frame("#0072b2"), Frame("#d55e00", dashed=True)  # same class, other class: as on the pages
LEGEND = (
    "✓ and a solid frame: same class as the query; ✗ and a dashed frame: another class; the number is the similarity"
)
PAPER, INK, ABSENT = "#ffffff", "#202020", "#d0d0d0"
GAP = 8  # pixels between pictures
TITLE, LABEL, CAPTION = 18, 14, 12  # pixels: font sizes
LABEL_WIDTH = 220  # pixels
LEADING, CAPTION_LEADING = 4, 3  # pixels between the lines of a text
CAPTION_LINES = 4  # at most
DASH = 9  # pixels


def contact_sheet(
    images: Sequence[Picture | None],
    *,
    captions: Sequence[str] = (),
    frames: Sequence[Frame | None] = (),
    row_labels: Sequence[str] = (),
    title: str = "",
    columns: int = 8,
    cell: int = 96,
) -> Image.Image:
    """Pictures row by row, each fitted into a square of `cell` pixels; None leaves its square blank.

    Captions stand below the pictures, frames around them, labels to the left of the rows. A line break in the title
    makes a second, smaller line.
    """
    rows = -(-len(images) // columns)
    for what, values, count in (
        ("captions", captions, len(images)),
        ("frames", frames, len(images)),
        ("row labels", row_labels, rows),
    ):
        if values and len(values) != count:
            raise NearkinError(
                f"A sheet of {len(images)} pictures in {rows} rows needs {count} {what}, not {len(values)}."
            )
    title, _, legend = title.partition("\n")
    below = [_lines(text, CAPTION, cell, CAPTION_LINES) for text in captions]
    left = GAP + (LABEL_WIDTH + GAP if row_labels else 0)
    tops = [GAP + (TITLE + 2 * GAP if title else 0) + (LABEL + GAP if legend else 0)]
    for row in range(max(rows, 1)):
        most = max((len(lines) for lines in below[row * columns : (row + 1) * columns]), default=0)
        tops.append(tops[-1] + cell + GAP + ((CAPTION + CAPTION_LEADING) * most + CAPTION_LEADING if most else 0))
    sheet = Image.new("RGB", (left + columns * (cell + GAP), tops[-1]), PAPER)
    pen = ImageDraw.Draw(sheet)
    if title:
        pen.text((GAP, GAP), _fit(title, TITLE, sheet.width - 2 * GAP), fill=INK, font=_font(TITLE))
        pen.text((GAP, 2 * GAP + TITLE), legend, fill=INK, font=_font(LABEL))
    for row, label in enumerate(row_labels):
        _label(pen, label, (GAP, tops[row]), height=cell)
    for n, image in enumerate(images):
        x, y = left + n % columns * (cell + GAP), tops[n // columns]
        if image is not None:
            _place(sheet, as_picture(image, size=cell), (x, y), cell=cell, frame=frames[n] if frames else None)
        for number, line in enumerate(below[n] if captions else ()):
            place = (x + cell / 2, y + cell + 4 + number * (CAPTION + CAPTION_LEADING))
            pen.text(place, line, fill=INK, font=_font(CAPTION), anchor="ma")
    return sheet


def class_sheet(images: Images, *, classes: int = 10, each: int = 8, title: str = "", cell: int = 96) -> Image.Image:
    """The first images of some classes, spread evenly over all classes: one row per class, with its name."""
    ids = torch.linspace(0, images.classes - 1, min(classes, images.classes)).round().long().tolist()
    pictures: list[Picture | None] = []
    for c in ids:
        rows = (images.labels == c).nonzero().flatten()[:each].tolist()
        pictures += [images.sources[row] for row in rows] + [None] * (each - len(rows))
    return contact_sheet(pictures, row_labels=[images.names[c] for c in ids], title=title, columns=each, cell=cell)


def save_sheet(sheet: Image.Image, path: Path) -> Path:
    """Write a sheet as PNG, or as JPEG if the name says so."""
    with atomic_file(path) as temporary:
        sheet.save(temporary, format="JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
    return path


def as_picture(image: Picture, *, size: int) -> Image.Image:
    """A picture in RGB; a file is decoded at short side `size`, or crossed out if it cannot be read."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, Path):
        try:
            image = decode_file(image, short_side=size)
        except BadImage:
            return _crossed_out(size)
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3):
        raise NearkinError(f"A picture is uint8 [1 or 3, H, W], not {str(image.dtype)[6:]} {list(image.shape)}.")
    return Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().cpu().numpy())


def _crossed_out(size: int) -> Image.Image:
    picture = Image.new("RGB", (size, size), PAPER)
    pen = ImageDraw.Draw(picture)
    pen.rectangle((0, 0, size - 1, size - 1), outline=ABSENT, width=2)
    pen.line((0, 0, size - 1, size - 1), fill=ABSENT, width=2)
    pen.line((0, size - 1, size - 1, 0), fill=ABSENT, width=2)
    return picture


def _place(
    sheet: Image.Image, picture: Image.Image, corner: tuple[int, int], *, cell: int, frame: Frame | None
) -> None:
    grow = cell / max(picture.size)
    width, height = (max(1, round(side * grow)) for side in picture.size)
    # Small pictures are enlarged without smoothing.
    how = Image.Resampling.NEAREST if grow >= 2 else Image.Resampling.LANCZOS
    x, y = corner[0] + (cell - width) // 2, corner[1] + (cell - height) // 2
    sheet.paste(picture.resize((width, height), how), (x, y))
    if frame is not None:
        _draw_frame(ImageDraw.Draw(sheet), (x - 3, y - 3, x + width + 2, y + height + 2), frame)


def _draw_frame(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], frame: Frame) -> None:
    pen.rectangle(box, outline=frame.colour, width=4)
    if not frame.dashed:
        return
    x0, y0, x1, y1 = box
    for x in range(x0 + DASH, x1 - DASH // 2, 2 * DASH):  # gaps in the edges
        pen.rectangle((x, y0, x + DASH // 2, y0 + 3), fill=PAPER)
        pen.rectangle((x, y1 - 3, x + DASH // 2, y1), fill=PAPER)
    for y in range(y0 + DASH, y1 - DASH // 2, 2 * DASH):
        pen.rectangle((x0, y, x0 + 3, y + DASH // 2), fill=PAPER)
        pen.rectangle((x1 - 3, y, x1, y + DASH // 2), fill=PAPER)


def _label(pen: ImageDraw.ImageDraw, text: str, corner: tuple[int, int], *, height: int) -> None:
    """Draw text in lines, centred vertically; text that does not fit is cut."""
    step = LABEL + LEADING
    lines = _lines(text, LABEL, LABEL_WIDTH, max(1, height // step))
    y = corner[1] + (height - step * len(lines)) / 2
    for n, line in enumerate(lines):
        pen.text((corner[0], y + step * n), line, fill=INK, font=_font(LABEL))


def _lines(text: str, size: int, width: float, most: int) -> list[str]:
    """The text in at most that many lines, broken between words and at line breaks; what does not fit is cut."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        new = True
        for word in paragraph.split():
            longer = word if new else f"{lines[-1]} {word}"
            if not new and _font(size).getlength(longer) <= width:
                lines[-1] = longer
            else:
                lines.append(word)
            new = False
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [_fit(line, size, width) for line in lines]


def _fit(text: str, size: int, width: float) -> str:
    """The text, cut with an ellipsis if it is wider than `width` pixels."""
    if _font(size).getlength(text) <= width:
        return text
    while text and _font(size).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(matplotlib_fonts() / "DejaVuSans.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


def nearest_rows(x: Tensor, images: Images, queries: Tensor, k: int, space: Space) -> tuple[Tensor, Tensor]:
    """Rows [Q, k] of the k nearest gallery images of some queries, without the query itself, and their similarities."""
    gallery = torch.arange(len(x)) if images.gallery is None else images.gallery.nonzero().flatten()
    points = space.project(x).cpu()
    s = space.pairwise(points[queries], points[gallery])
    s = s.masked_fill(queries[:, None] == gallery, -torch.inf)
    top = s.topk(min(k, len(gallery) - 1), dim=1)
    return gallery[top.indices], top.values


def neighbour_sheet(embedded: Embedded, path: Path, *, queries: int = 8, k: int = 8, seed: int = 0) -> Path:
    """Write a PNG of random queries with their k nearest neighbours."""
    x, images, model = embedded
    queryable = torch.arange(len(x)) if images.query is None else images.query.nonzero().flatten()
    order = torch.randperm(len(queryable), generator=torch.Generator().manual_seed(seed))
    chosen = queryable[order[:queries]]
    rows, s = nearest_rows(x, images, chosen, k, model.space)
    pictures: list[Picture | None] = []
    captions: list[str] = []
    frames: list[Frame | None] = []
    for query, found, values in zip(chosen.tolist(), rows.tolist(), s.tolist(), strict=True):
        right = [bool(images.labels[row] == images.labels[query]) for row in found]
        names = [images.names[int(images.labels[row])] for row in found]
        pictures += [images.sources[query], None, *(images.sources[row] for row in found)]
        captions += ["query", ""]
        captions += [f"{'✓' if r else '✗'} {v:.2f}\n{n}" for r, v, n in zip(right, values, names, strict=True)]
        frames += [None, None, *(RIGHT if r else WRONG for r in right)]
    labels = [images.names[int(images.labels[query])] for query in chosen]
    tested = seen_classes(images.names, model.seen).title
    title = f"{model.plan.data}: queries and their nearest neighbours. {tested}.\n{LEGEND}"
    sheet = contact_sheet(
        pictures, captions=captions, frames=frames, row_labels=labels, title=title, columns=rows.shape[1] + 2, cell=112
    )
    return save_sheet(sheet, path)
