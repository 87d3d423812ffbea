"""The built-in data set: reproducible from the seed, no look-alikes, cached completely or not at all."""

import hashlib
import os
import subprocess
import sys
from math import cos, sin
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data import Dataset, load_dataset
from nearkin.data.glyphs import Recipe, _inverse_map, _sample, make_glyphs
from nearkin.data.letters import EM, Font, candidates, distinct_letters, draw, font_files, matplotlib_fonts, open_font
from nearkin.errors import NearkinError

SMALL = "glyphs(classes=12, samples=3, seed=4)"
DIGEST = (
    "import hashlib, sys; from pathlib import Path; from nearkin.data import load_dataset\n"
    "d = load_dataset(sys.argv[1], cache=Path(sys.argv[2]))\n"
    "print(hashlib.sha256(d.train.sources.numpy().tobytes() + d.test.sources.numpy().tobytes()).hexdigest())"
)


def digest(dataset: Dataset) -> str:
    return hashlib.sha256(dataset.train.sources.numpy().tobytes() + dataset.test.sources.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def fonts() -> list[Font]:
    return [open_font(file) for file in font_files()]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Dataset:
    return load_dataset(SMALL, cache=tmp_path_factory.mktemp("cache"))


def test_shapes_and_disjoint_halves(small):
    for part in (small.train, small.test):
        assert part.sources.shape == (18, 1, 32, 32)
        assert part.sources.dtype == torch.uint8
        assert part.labels.tolist() == [c for c in range(6) for _ in range(3)]
        assert part.query is None
    assert len({*small.train.names, *small.test.names}) == 12
    assert all("letter" in name or name[-2] == " " for name in small.train.names)


def test_another_process_renders_the_same_bits(small, tmp_path):
    """Another hash seed and thread count, an empty cache."""
    source = str(Path(sys.modules["nearkin.data.glyphs"].__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "PYTHONPATH": source}
    command = [sys.executable, "-c", DIGEST, SMALL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == digest(small)


def test_the_seed_decides(small, tmp_path):
    other = load_dataset("glyphs(classes=12, samples=3, seed=5)", cache=tmp_path)
    assert set(other.train.names) != set(small.train.names)


def test_more_classes_do_not_change_the_first_ones(small, tmp_path):
    more = load_dataset("glyphs(classes=24, samples=3, seed=4)", cache=tmp_path)
    assert more.train.names == small.train.names + small.test.names
    assert torch.equal(more.train.sources, torch.cat([small.train.sources, small.test.sources]))


def test_the_fonts_have_enough_letters_for_the_default(tmp_path):
    seen = []
    dataset = make_glyphs(samples=1, cache=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert dataset.train.classes + dataset.test.classes >= 600
    assert not set(dataset.train.names) & set(dataset.test.names)
    classes = dataset.train.classes + dataset.test.classes
    assert seen == [(n, classes) for n in range(1, classes + 1)]
    for part in (dataset.train, dataset.test):  # both halves have all scripts
        scripts = {name.split()[0] for name in part.names}
        assert {"latin", "greek", "cyrillic", "armenian", "georgian", "lao"} <= scripts
    ink = torch.cat([dataset.train.sources, dataset.test.sources]).float().flatten(1)
    assert ink.std(1).min() > 20  # no image is blank


def test_look_alikes_are_dropped(fonts):
    found = list(distinct_letters(["A", "Α", "А", "B", "В", "o", "O", "q"], fonts))  # Latin, Greek, Cyrillic
    assert [letter.letter if letter else None for letter in found] == ["A", None, None, "B", None, "o", None, "q"]
    assert len(found[0].drawings) == len(fonts)


def test_no_two_chosen_letters_are_alike_in_any_face(fonts):
    letters = candidates(fonts)[::9]
    chosen = [found.letter for found in distinct_letters(letters, fonts) if found is not None]
    assert 20 < len(chosen) < len(letters)
    for font in fonts[::5]:
        squares = []
        for letter in chosen:
            drawing = draw(font, letter)
            if drawing is not None:
                squares.append(centred(drawing))
        for i, a in enumerate(squares):
            for b in squares[:i]:
                cosine = (a * b).sum() / ((a * a).sum() * (b * b).sum()) ** 0.5
                assert cosine < 0.945  # 0.94 plus the rounding to six bits per pixel


def centred(drawing: Image.Image) -> np.ndarray:
    grow = 24 / max(drawing.size)
    width, height = max(1, round(drawing.width * grow)), max(1, round(drawing.height * grow))
    square = np.zeros((24, 24))
    top, left = (24 - height) // 2, (24 - width) // 2
    square[top : top + height, left : left + width] = np.asarray(
        drawing.resize((width, height), Image.Resampling.BILINEAR)
    )
    return square


def test_candidates_are_letters_of_enough_faces(fonts):
    letters = candidates(fonts)
    assert all(letter.isalpha() for letter in letters)
    assert all(sum(draw(font, letter) is not None for font in fonts) >= 8 for letter in letters[::40])
    assert "LastResort" not in " ".join(str(file) for file in font_files(str(matplotlib_fonts())))


def still(**changes) -> Recipe:
    """A recipe without randomness."""
    plain = {"rotation": 0, "scale": (1.0, 1.0), "aspect": 0, "shear": 0, "shift": 0, "stroke": 0, "noise": 0}
    return Recipe(classes=4, samples=1, seed=0, **{**plain, **changes})


def test_an_untransformed_letter_fills_the_middle():
    drawing = Image.new("L", (EM // 2, EM), 255)
    image = _sample(drawing, still(), np.random.default_rng(0))
    rows, columns = (image > 127).any(1).nonzero()[0], (image > 127).any(0).nonzero()[0]
    assert (rows[0], rows[-1]) == (5, 26)  # 44 of 64 canvas pixels are 22 of 32
    assert abs(columns[0] - 10.5) <= 0.5
    assert abs(columns[-1] - 20.5) <= 0.5


def test_strokes_grow_and_shrink():
    drawing = Image.new("L", (40, 40))
    drawing.paste(255, (18, 0, 22, 40))
    rng = np.random.default_rng(1)
    ink = [int(_sample(drawing, still(stroke=1.0), rng).astype(int).sum()) for _ in range(20)]
    plain = int(_sample(drawing, still(), rng).astype(int).sum())
    assert min(ink) < 0.9 * plain < 1.1 * plain < max(ink)


@pytest.mark.parametrize(
    "change", [{"rotation": 30}, {"shift": 4}, {"noise": 0.2}, {"shear": 0.4}, {"aspect": 0.6}, {"scale": (0.5, 0.6)}]
)
def test_every_random_option_changes_the_pixels(change):
    drawing = Image.new("L", (40, 20), 255)
    image = _sample(drawing, still(**change), np.random.default_rng(3))
    plain = _sample(drawing, still(), np.random.default_rng(3))
    assert (image.astype(int) - plain).__abs__().mean() > 2


def test_inverse_map():
    size, angle, stretch, shear = 0.8, 0.3, 1.1, -0.2
    turn = np.array([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
    forth = turn @ np.array([[1, shear], [0, 1]]) @ np.diag([size * stretch, size / stretch])
    np.testing.assert_allclose(np.reshape(_inverse_map(size, angle, stretch, shear), (2, 2)), np.linalg.inv(forth))


def test_the_cache_is_read_and_rebuilt_if_damaged(tmp_path, monkeypatch):
    first = load_dataset(SMALL, cache=tmp_path)
    (file,) = tmp_path.iterdir()  # nothing half written is left
    calls = []
    load_dataset(SMALL, cache=tmp_path, progress=lambda *at: calls.append(at))
    assert not calls
    file.write_bytes(file.read_bytes()[:-100])
    again = load_dataset(SMALL, cache=tmp_path, progress=lambda *at: calls.append(at))
    assert calls[-1] == (12, 12)
    assert digest(again) == digest(first)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    calls.clear()
    load_dataset(SMALL, progress=lambda *at: calls.append(at))
    assert not calls


def test_a_flipped_bit_in_the_cache_does_not_change_the_letters(tmp_path):
    first = load_dataset(SMALL, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(100, len(whole), len(whole) // 12):  # header and pixels
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert digest(load_dataset(SMALL, cache=tmp_path)) == digest(first)


def test_an_unwritable_cache_gives_only_a_note(tmp_path):
    (tmp_path / "file").write_text("in the way")
    dataset = load_dataset(SMALL, cache=tmp_path / "file")
    assert any("Not cached" in note for note in dataset.notes)


def test_more_fonts_on_request(tmp_path):
    extra = tmp_path / "fonts"
    extra.mkdir()
    (extra / "More.ttf").write_bytes((matplotlib_fonts() / "cmr10.ttf").read_bytes())
    (extra / "LastResort.ttf").write_bytes((matplotlib_fonts() / "LastResortHE-Regular.ttf").read_bytes())
    assert [file.name for file in font_files(str(extra))[16:]] == ["More.ttf"]
    dataset = load_dataset(f"glyphs(classes=6, samples=2, fonts={str(extra)!r})", cache=tmp_path / "cache")
    assert dataset.train.classes == 3
    (extra / "More.ttf").write_bytes(b"no font")
    with pytest.raises(NearkinError, match=r"Cannot open the font .*More.ttf"):
        load_dataset(f"glyphs(classes=6, fonts={str(extra)!r})", cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("glyphs(classes=2)", "classes must be a number from 4"),
        ("glyphs(classes=5000)", "use fewer"),
        ("glyphs(classes=10.5)", "classes must be a whole number"),
        ("glyphs(samples=0)", "samples must be a number from 1"),
        ("glyphs(seed=-1)", "seed must be a number from 0"),
        ("glyphs(scale=2)", "scale must be"),
        ("glyphs(scale=(2, 1))", "smaller first"),
        ("glyphs(noise=-0.1)", "noise must be"),
        ("glyphs(fonts='/no/such/place')", "no font file"),
    ],
)
def test_wrong_options_are_refused(tmp_path, spec, says):
    with pytest.raises(NearkinError, match=says):
        load_dataset(spec, cache=tmp_path)
