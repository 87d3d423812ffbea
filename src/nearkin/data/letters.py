"""Draw letters from font files and choose letters of which no two look alike."""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

from nearkin.errors import NearkinError

FACES = (
    *(f"DejaVuSans{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}.ttf" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")),
)
LETTERS = frozenset({"Lu", "Ll", "Lt", "Lo"})  # Unicode's letters without modifiers
FEWEST_FACES = 8  # a letter is drawn in at least this many typefaces
EM = 48  # pixels
SIGNATURE = 24  # pixels: the size at which letters are compared
ALIKE = 0.94  # letters with a higher cosine of their signatures count as the same


class Font(NamedTuple):
    """An open typeface and its code points."""

    face: ImageFont.FreeTypeFont
    codes: frozenset[int]


class Letter(NamedTuple):
    """A letter and its drawing in each typeface that has it, light on dark, cropped to its bounding box."""

    letter: str
    drawings: list[Image.Image]


def matplotlib_fonts() -> Path:
    """Return the folder of the fonts that ship with matplotlib."""
    import matplotlib  # half a second: only if fonts are needed

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def font_files(extra: str | Path | None = None) -> list[Path]:
    """Return matplotlib's text fonts and, in addition, a font file or all font files in a folder."""
    folder = matplotlib_fonts()
    files = [folder / name for name in FACES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NearkinError(f"Fonts are missing in {folder}: {', '.join(missing)}. Install matplotlib again.")
    if extra is None:
        return files
    place = Path(extra).expanduser()
    found = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix.lower() in (".ttf", ".otf"))
    # The last-resort font draws the same box for all letters of a script.
    found = [file for file in found if not file.name.startswith("LastResort")]
    if not found:
        raise NearkinError(f"There is no font file (.ttf, .otf) at {place}.")
    return files + found


def open_font(path: Path) -> Font:
    """Open a font file as a typeface of 48 pixels."""
    from matplotlib.ft2font import FT2Font

    try:
        # Basic layout: the other one needs a system library.
        face = ImageFont.truetype(str(path), EM, layout_engine=ImageFont.Layout.BASIC)
        return Font(face, frozenset(FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError) as error:
        raise NearkinError(f"Cannot open the font {path}: {str(error).rstrip('.')}.") from None


def candidates(fonts: Sequence[Font]) -> list[str]:
    """Return the letters that enough typefaces have, in the order of their code points."""
    codes = sorted(frozenset[int]().union(*(font.codes for font in fonts)))
    letters = [chr(code) for code in codes if unicodedata.category(chr(code)) in LETTERS]
    return [letter for letter in letters if sum(ord(letter) in font.codes for font in fonts) >= FEWEST_FACES]


def distinct_letters(letters: Sequence[str], fonts: Sequence[Font]) -> Iterator[Letter | None]:
    """Yield each letter that looks like no earlier one in any typeface, and None for each that does."""
    seen = [_Seen() for _ in fonts]
    for letter in letters:
        drawings: list[Image.Image] = []
        signatures: list[tuple[_Seen, NDArray[np.float32]]] = []
        for font, of_face in zip(fonts, seen, strict=True):
            drawing = draw(font, letter)
            if drawing is None:
                continue
            signature = _signature(drawing)
            if of_face.has(signature):
                break
            drawings.append(drawing)
            signatures.append((of_face, signature))
        else:
            if len(drawings) >= FEWEST_FACES:
                for of_face, signature in signatures:
                    of_face.add(signature)
                yield Letter(letter, drawings)
            continue
        yield None


def draw(font: Font, letter: str) -> Image.Image | None:
    """Draw a letter in its bounding box; None if the typeface lacks it or draws nothing."""
    if ord(letter) not in font.codes:
        return None
    mask = font.face.getmask(letter, mode="L")
    if not all(mask.size):
        return None
    image = Image.frombytes("L", mask.size, bytes(mask))
    box = image.getbbox()
    return image.crop(box) if box else None


def _signature(drawing: Image.Image) -> NDArray[np.float32]:
    """Centre the drawing at a fixed size. With six bits per pixel, dot products are exact in float32 in any order."""
    grow = SIGNATURE / max(drawing.size)
    width, height = (max(1, round(side * grow)) for side in drawing.size)
    small = drawing.resize((width, height), Image.Resampling.BILINEAR)
    square = Image.new("L", (SIGNATURE, SIGNATURE))
    square.paste(small, ((SIGNATURE - width) // 2, (SIGNATURE - height) // 2))
    return (np.asarray(square) >> 2).astype(np.float32).ravel()


class _Seen:
    """The signatures of the letters chosen so far in one typeface."""

    def __init__(self) -> None:
        self.rows = np.zeros((64, SIGNATURE**2), dtype=np.float32)
        self.norms = np.zeros(64)  # squared
        self.count = 0

    def has(self, signature: NDArray[np.float32]) -> bool:
        dots = (self.rows[: self.count] @ signature).astype(np.float64)
        norm = float(signature @ signature)
        return bool((dots * dots >= ALIKE * ALIKE * norm * self.norms[: self.count]).any())

    def add(self, signature: NDArray[np.float32]) -> None:
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.norms = np.concatenate([self.norms, np.zeros_like(self.norms)])
        self.rows[self.count] = signature
        self.norms[self.count] = float(signature @ signature)
        self.count += 1
