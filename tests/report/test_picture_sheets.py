"""Picture sheets: positions of pictures, colours of frames, text that fits."""

import pytest
import torch
from PIL import Image

from nearkin.data import Images
from nearkin.errors import NearkinError
from nearkin.report.picture_sheets import CAPTION, GAP, RIGHT, WRONG, _fit, _font, _lines, class_sheet, contact_sheet

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def rgb(text: str) -> tuple[int, ...]:
    return tuple(int(text[n : n + 2], 16) for n in (1, 3, 5))


def test_pictures_stand_row_by_row():
    red, blue = (
        Image.new("RGB", (20, 20), RED),
        torch.tensor([0, 0, 255], dtype=torch.uint8).view(3, 1, 1).expand(3, 9, 9),
    )
    sheet = contact_sheet([red, None, blue], columns=2, cell=40)
    assert sheet.size == (GAP + 2 * (40 + GAP), GAP + 2 * (40 + GAP))
    middle = GAP + 20
    assert sheet.getpixel((middle, middle)) == RED
    assert sheet.getpixel((middle + 40 + GAP, middle)) == WHITE
    assert sheet.getpixel((middle, middle + 40 + GAP)) == BLUE


def test_shape_is_kept():
    sheet = contact_sheet([Image.new("RGB", (100, 50), RED)], columns=1, cell=40)
    assert sheet.getpixel((GAP + 2, GAP + 20)) == RED
    assert sheet.getpixel((GAP + 20, GAP + 5)) == WHITE


def test_grey_tensors_are_drawn():
    sheet = contact_sheet([torch.full((1, 4, 4), 90, dtype=torch.uint8)], columns=1, cell=8)
    assert sheet.getpixel((GAP + 4, GAP + 4)) == (90, 90, 90)


def test_frames_differ_in_colour_and_in_dashes():
    sheet = contact_sheet([Image.new("L", (8, 8))] * 3, frames=[RIGHT, WRONG, None], columns=3, cell=64)
    lefts = [GAP + n * (64 + GAP) for n in range(3)]
    right, wrong, bare = ({sheet.getpixel((left, y)) for y in range(GAP, GAP + 64)} for left in lefts)
    assert right == {rgb(RIGHT.colour)}
    assert wrong == {rgb(WRONG.colour), WHITE}
    assert bare == {(0, 0, 0)}


def test_captions_are_broken_between_words_and_at_line_breaks():
    assert _lines("✓ 0.90\nsong thrush", CAPTION, 400, 4) == ["✓ 0.90", "song thrush"]
    narrow = _lines("✓ 0.90\nblack footed albatross of the far southern seas", CAPTION, 80, 3)
    assert narrow[:2] == ["✓ 0.90", "black footed"]
    assert narrow[2].endswith("…")
    assert all(_font(CAPTION).getlength(line) <= 80 for line in narrow)
    one, two = (contact_sheet([Image.new("L", (8, 8))], captions=[text]).height for text in ("a", "a\nb"))
    assert two == one + CAPTION + 3


def test_captions_labels_and_title_are_drawn_in_their_places():
    picture = Image.new("RGB", (8, 8), WHITE)
    bare = contact_sheet([picture], columns=1, cell=60)
    told = contact_sheet(
        [picture], captions=["wren 3"], row_labels=["a long name of a class"], title="birds", columns=1, cell=60
    )
    assert told.width > bare.width
    assert told.height > bare.height

    def ink(box):
        return told.crop(box).convert("L").point(lambda value: 255 - value).getbbox() is not None

    left, top = told.width - 60 - GAP, told.height - 60 - GAP - CAPTION - 6
    assert ink((0, 0, told.width, top))
    assert ink((0, top, left, told.height))
    assert ink((left, top + 60, told.width, told.height))
    assert not ink((left, top, left + 60, top + 60))


def test_text_is_cut_to_the_width():
    words = _fit("a very long caption that cannot fit", CAPTION, 80)
    assert words.endswith("…")
    assert _font(CAPTION).getlength(words) <= 80
    assert _fit("short", CAPTION, 80) == "short"


def test_counts_must_match():
    with pytest.raises(NearkinError, match="needs 2 captions, not 1"):
        contact_sheet([Image.new("L", (4, 4))] * 2, captions=["one"])
    with pytest.raises(NearkinError, match="needs 1 row labels, not 2"):
        contact_sheet([Image.new("L", (4, 4))] * 2, row_labels=["one", "two"])
    with pytest.raises(NearkinError, match=r"uint8 \[1 or 3, H, W\], not float32"):
        contact_sheet([torch.zeros(3, 4, 4)])


def test_class_sheet_crosses_out_unreadable_files(tmp_path):
    paths = [tmp_path / f"{n}.png" for n in range(3)]
    for path, colour in zip(paths, (RED, BLUE, RED), strict=True):
        Image.new("RGB", (40, 30), colour).save(path)
    paths[2].write_bytes(b"broken")
    images = Images(paths, torch.tensor([1, 0, 1]), ("blue", "red"))
    sheet = class_sheet(images, each=2, cell=40, title="two classes")
    left, top = sheet.width - 2 * (40 + GAP), sheet.height - 2 * (40 + GAP)
    assert sheet.getpixel((left + 20, top + 20)) == BLUE
    assert sheet.getpixel((left + 40 + GAP + 20, top + 20)) == WHITE
    assert sheet.getpixel((left + 20, top + 40 + GAP + 20)) == RED
    crossed = sheet.crop((left + 40 + GAP, top + 40 + GAP, left + 80 + GAP, top + 80 + GAP))
    assert RED not in {colour for _, colour in crossed.getcolors()}
    assert len(crossed.getcolors()) > 1


def test_class_sheet_spreads_over_the_classes():
    images = Images(torch.zeros(30, 1, 4, 4, dtype=torch.uint8), torch.arange(30), tuple(f"c{n}" for n in range(30)))
    sheet = class_sheet(images, classes=3, each=1, cell=20)
    assert sheet.height == GAP + 3 * (20 + GAP)
