"""Sheets of pictures in rows: classes, or queries with their nearest neighbours framed green or red."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.letters import matplotlib_fonts
from nearkin.data.pixels.decode import BadImage, decode_file
from nearkin.errors import NearkinError
from nearkin.files import atomic_file
from nearkin.space import Space
from nearkin.training.images import Embedded, seen_classes

Picture = Image.Image | Tensor | Path  # a tensor is uint8 [1 or 3, H, W]

RIGHT, WRONG = "#1a9641", "#d7191c"  # frames: same class, other class
PAPER, INK, ABSENT = "#ffffff", "#202020", "#d0d0d0"
GAP = 8  # pixels between pictures
TITLE, LABEL, CAPTION = 18, 14, 12  # pixels: font sizes
LABEL_WIDTH = 220  # pixels


def contact_sheet(
    images: Sequence[Picture | None],
    *,
    captions: Sequence[str] = (),
    frames: Sequence[str | None] = (),
    row_labels: Sequence[str] = (),
    title: str = "",
    columns: int = 8,
    cell: int = 96,
) -> Image.Image:
    """Pictures row by row, each fitted into a square of `cell` pixels; None leaves its square blank.

    Captions stand below the pictures, coloured frames around them, labels to the left of the rows.
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
    left = GAP + (LABEL_WIDTH + GAP if row_labels else 0)
    top = GAP + (TITLE + 2 * GAP if title else 0)
    across, down = cell + GAP, cell + GAP + (CAPTION + 6 if any(captions) else 0)
    sheet = Image.new("RGB", (left + columns * across, top + max(rows, 1) * down), PAPER)
    pen = ImageDraw.Draw(sheet)
    if title:
        pen.text((GAP, GAP), _fit(title, TITLE, sheet.width - 2 * GAP), fill=INK, font=_font(TITLE))
    for row, label in enumerate(row_labels):
        _label(pen, label, (GAP, top + row * down), height=cell)
    for n, image in enumerate(images):
        x, y = left + n % columns * across, top + n // columns * down
        if image is not None:
            _place(sheet, as_picture(image, size=cell), (x, y), cell=cell, frame=frames[n] if frames else None)
        if captions:
            words = _fit(captions[n], CAPTION, cell)
            pen.text((x + cell / 2, y + cell + 4), words, fill=INK, font=_font(CAPTION), anchor="ma")
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
    """Write a sheet as PNG."""
    with atomic_file(path) as temporary:
        sheet.save(temporary, format="PNG")
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


def _place(sheet: Image.Image, picture: Image.Image, corner: tuple[int, int], *, cell: int, frame: str | None) -> None:
    grow = cell / max(picture.size)
    width, height = (max(1, round(side * grow)) for side in picture.size)
    # Small pictures are enlarged without smoothing.
    how = Image.Resampling.NEAREST if grow >= 2 else Image.Resampling.LANCZOS
    x, y = corner[0] + (cell - width) // 2, corner[1] + (cell - height) // 2
    sheet.paste(picture.resize((width, height), how), (x, y))
    if frame is not None:
        ImageDraw.Draw(sheet).rectangle((x - 3, y - 3, x + width + 2, y + height + 2), outline=frame, width=4)


def _label(pen: ImageDraw.ImageDraw, text: str, corner: tuple[int, int], *, height: int) -> None:
    """Draw text in lines, centred vertically; text that does not fit is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _font(LABEL).getlength(longer) <= LABEL_WIDTH:
            lines[-1] = longer
        else:
            lines.append(word)
    step = LABEL + 4
    room = max(1, height // step)
    if len(lines) > room:
        lines = [*lines[: room - 1], " ".join(lines[room - 1 :])]
    y = corner[1] + (height - step * len(lines)) / 2
    for n, line in enumerate(lines):
        pen.text((corner[0], y + step * n), _fit(line, LABEL, LABEL_WIDTH), fill=INK, font=_font(LABEL))


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
    frames: list[str | None] = []
    for query, found, values in zip(chosen.tolist(), rows.tolist(), s.tolist(), strict=True):
        label = images.labels[query]
        pictures += [images.sources[query], None, *(images.sources[row] for row in found)]
        captions += ["query", "", *(f"{value:.2f}" for value in values)]
        frames += [None, None, *(RIGHT if images.labels[row] == label else WRONG for row in found)]
    labels = [images.names[int(images.labels[query])] for query in chosen]
    tested = seen_classes(images.names, model.names).title
    title = f"{model.plan.data}: queries and their nearest neighbours. {tested}."
    sheet = contact_sheet(
        pictures, captions=captions, frames=frames, row_labels=labels, title=title, columns=rows.shape[1] + 2
    )
    return save_sheet(sheet, path)
