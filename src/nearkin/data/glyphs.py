"""The built-in data set: letters of many scripts, rendered from the fonts that ship with matplotlib.

A class is a letter. Its samples are drawn in several typefaces, shifted, rotated, sheared, thickened or thinned, with
noise. Letters that look like one already chosen (Latin A, Greek Alpha, Cyrillic A) are dropped by comparing pixels.
The seed and the font files determine everything, bit for bit; the result is cached on disk.
"""

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import cos, exp, radians, sin
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from nearkin.data.images import Dataset, Images, Progress, counted
from nearkin.data.letters import candidates, distinct_letters, font_files, open_font
from nearkin.data.splits import in_halves
from nearkin.errors import NearkinError
from nearkin.files import cache_dir, read_tensors, write_tensors

GENERATOR = 1  # increase it if the same recipe gives other pixels: old caches are then ignored
CANVAS, LONG_SIDE, SIZE = 64, 44, 32  # pixels: the canvas, the letter on it at scale 1, the finished image
MARGIN = 3  # pixels around a drawing, for smooth edges and thicker strokes


@dataclass(frozen=True)
class Recipe:
    """Everything besides the fonts that determines the pixels."""

    classes: int
    samples: int
    seed: int
    rotation: float
    scale: tuple[float, float]
    aspect: float
    shear: float
    shift: float
    stroke: float
    noise: float


def make_glyphs(
    *,
    classes: int = 800,
    samples: int = 12,  # per class
    seed: int = 0,
    fonts: str | None = None,  # a font file or a folder of them, in addition to matplotlib's
    rotation: float = 20.0,  # degrees, ±
    scale: tuple[float, float] = (0.65, 1.1),
    aspect: float = 0.12,  # log of width by height, ±
    shear: float = 0.25,  # ±
    shift: float = 3.0,  # pixels of the finished image, ±
    stroke: float = 0.7,  # 1: an edge moves by up to a pixel of the drawing, ±
    noise: float = 0.15,  # standard deviation, black 0 and white 1
    cache: Path | None = None,
    progress: Progress = None,
) -> Dataset:
    """Render letters as 32 × 32 grey images, light on dark; half of the classes train, the others test."""
    recipe = Recipe(classes, samples, seed, rotation, scale, aspect, shear, shift, stroke, noise)
    _check(recipe)
    files = font_files(fonts)
    store = (cache_dir() if cache is None else cache) / f"glyphs-{_key(recipe, files)}.safetensors"
    made, notes = _read(store, recipe), []
    if made is None:
        made = _make(recipe, files, progress)
        notes = _write(store, made)
    names = tuple(f"{unicodedata.name(letter).lower()} {letter}" for letter in made.letters)
    images = Images(made.pixels.flatten(0, 1), torch.arange(classes).repeat_interleave(samples), names)
    train, test = in_halves(images)
    return Dataset("glyphs", train, test, (_left_out(made.dropped), *notes), small_grey=True)


def _left_out(count: int) -> str:
    return f"{counted(count, 'letter', 'letters')} left out because they look like another one."


def _check(recipe: Recipe) -> None:
    ranges = {"classes": (4, 10**6), "samples": (1, 10**4)}
    for name, value in asdict(recipe).items():
        least, most = ranges.get(name, (0, 10**9))
        if name != "scale" and not least <= value <= most:
            raise NearkinError(f"glyphs: {name} must be a number from {least} to {most}, not {value!r}.")
    if not 0 < recipe.scale[0] <= recipe.scale[1] <= 10:
        raise NearkinError(f"glyphs: scale is two numbers such as (0.65, 1.1), smaller first, not {recipe.scale!r}.")


class _Made(NamedTuple):
    letters: list[str]
    dropped: int
    pixels: Tensor  # [classes, samples, 1, 32, 32] uint8


def _make(recipe: Recipe, files: Sequence[Path], progress: Progress) -> _Made:
    fonts = [open_font(file) for file in files]
    letters = candidates(fonts)
    order = np.random.default_rng(recipe.seed).permutation(len(letters))
    if recipe.classes > len(letters):
        raise _too_many(recipe.classes, len(letters))
    pixels = np.zeros((recipe.classes, recipe.samples, 1, SIZE, SIZE), dtype=np.uint8)
    chosen: list[str] = []
    dropped = 0
    for found in distinct_letters([letters[place] for place in order], fonts):
        if found is None:
            dropped += 1
            continue
        # One generator per letter: its samples do not depend on the letters before it.
        rng = np.random.default_rng((recipe.seed, ord(found.letter)))
        pixels[len(chosen), :, 0] = _samples(found.drawings, recipe, rng)
        chosen.append(found.letter)
        if progress is not None:
            progress(len(chosen), recipe.classes)
        if len(chosen) == recipe.classes:
            return _Made(chosen, dropped, torch.from_numpy(pixels))
    raise _too_many(recipe.classes, len(chosen))


def _too_many(wanted: int, available: int) -> NearkinError:
    return NearkinError(
        f"glyphs: {wanted} classes are more than the {available} letters of these fonts; use fewer, or add font files "
        f"with fonts=PATH."
    )


def _samples(drawings: Sequence[Image.Image], recipe: Recipe, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw the samples of one letter; the typefaces alternate in a random order."""
    faces = rng.permutation(len(drawings))
    taken = [drawings[faces[n % len(drawings)]] for n in range(recipe.samples)]
    return np.stack([_sample(drawing, recipe, rng) for drawing in taken])


def _sample(drawing: Image.Image, recipe: Recipe, rng: np.random.Generator) -> NDArray[np.uint8]:
    width, height = (side + 2 * MARGIN for side in drawing.size)
    sheet = Image.new("L", (width, height))
    sheet.paste(drawing, (MARGIN, MARGIN))
    sheet = _restroke(sheet, rng.uniform(-recipe.stroke, recipe.stroke))
    size = rng.uniform(*recipe.scale) * LONG_SIDE / max(drawing.size)
    angle = radians(rng.uniform(-recipe.rotation, recipe.rotation))
    stretch = exp(rng.uniform(-recipe.aspect, recipe.aspect) / 2)
    shear = rng.uniform(-recipe.shear, recipe.shear)
    x, y = CANVAS / 2 + rng.uniform(-recipe.shift, recipe.shift, size=2) * (CANVAS / SIZE)
    back = _inverse_map(size, angle, stretch, shear)
    shifts = width / 2 - back[0] * x - back[1] * y, height / 2 - back[2] * x - back[3] * y
    matrix = (back[0], back[1], shifts[0], back[2], back[3], shifts[1])
    canvas = sheet.transform((CANVAS, CANVAS), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    grey = np.asarray(canvas.reduce(CANVAS // SIZE)) + rng.normal(0, 255 * recipe.noise, (SIZE, SIZE))
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)


def _inverse_map(size: float, angle: float, stretch: float, shear: float) -> tuple[float, float, float, float]:
    """The map from canvas to drawing: the inverse of rotation · shear · stretch, which has determinant size²."""
    a, b = cos(angle) * stretch, (shear * cos(angle) - sin(angle)) / stretch
    c, d = sin(angle) * stretch, (shear * sin(angle) + cos(angle)) / stretch
    return d / size, -b / size, -c / size, a / size


def _restroke(sheet: Image.Image, weight: float) -> Image.Image:
    """Make strokes thicker (weight above 0) or thinner, by up to a pixel on each side at weight 1."""
    return Image.blend(
        sheet, sheet.filter(ImageFilter.MaxFilter(3) if weight > 0 else ImageFilter.MinFilter(3)), abs(weight)
    )


def _key(recipe: Recipe, files: Sequence[Path]) -> str:
    """Hash everything that the pixels depend on."""
    try:
        faces = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    except OSError as error:
        raise NearkinError(f"glyphs: cannot read the font {error.filename}: {error.strerror}.") from None
    parts = {"generator": GENERATOR, "pillow": PIL.__version__, "recipe": asdict(recipe), "faces": faces}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _read(store: Path, recipe: Recipe) -> _Made | None:
    """Read the cache; None if there is none or it is damaged."""
    try:
        tensors, about = read_tensors(store)
        made = _Made(about["letters"], about["dropped"], tensors["pixels"])
    except (NearkinError, OSError, KeyError):
        return None
    complete = made.pixels.shape[:2] == (recipe.classes, recipe.samples) and len(made.letters) == recipe.classes
    return made if complete else None


def _write(store: Path, made: _Made) -> list[str]:
    """Cache the pixels. If that fails, return a note."""
    try:
        write_tensors(store, {"pixels": made.pixels}, {"letters": made.letters, "dropped": made.dropped})
    except NearkinError as error:
        return [f"Not cached: {error}"]
    return []
