"""Charts and pieces of a page: their numbers, colours and escaped text."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data.images import Images
from nearkin.report.charts import MARKERS, PALETTE, Line, critical_difference, curve_style, histogram, line_chart
from nearkin.report.html import Html, Thumbnails, escape, join, table


def words(svg):
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


@pytest.fixture(scope="module")
def chart():
    return line_chart([Line("one", [1, 2], [3, 4]), Line("two", [1, 2], [4, 3])], x="epoch", y="loss", title="a < b")


def test_a_chart_is_inline_svg(chart):
    assert chart.startswith('<svg viewBox="0 0 ')
    assert 'aria-label="a &lt; b"' in chart
    assert {"epoch", "loss", "one", "two"} <= set(words(chart))
    assert not re.search("metadata|<style|<!DOCTYPE|<[?]xml", chart)
    assert not set(re.findall(r"https?://[^\"]+", chart)) - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_chart_uses_the_colours_of_the_page(chart):
    assert "var(--c0)" in chart
    assert "var(--c1)" in chart
    assert "currentColor" in chart
    assert not re.search("#(?:333333|dddddd|0072b2|d55e00)", chart)


def test_ids_differ_between_charts_and_are_all_used(chart):
    other = line_chart([Line("one", [1, 2], [3, 9])], x="epoch", y="loss", title="other")
    ids = [set(re.findall(r'\sid="([^"]+)"', svg)) for svg in (chart, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', chart))
    assert used == ids[0]


def test_equal_numbers_give_equal_bytes(chart):
    again = line_chart([Line("one", [1, 2], [3, 4]), Line("two", [1, 2], [4, 3])], x="epoch", y="loss", title="a < b")
    assert again == chart


def test_curves_with_one_label_share_style_and_legend_entry():
    svg = line_chart([Line("a", [1, 2], [1, 2]), Line("a", [1, 2], [2, 3]), Line("b", [1], [1])], x="", y="", title="t")
    assert words(svg).count("a") == 1
    assert len({tuple(curve_style(n).items()) for n in range(len(PALETTE) * len(MARKERS))}) == len(PALETTE) * len(
        MARKERS
    )


def test_empty_histograms_are_drawn():
    svg = histogram({"a": np.array([]), "b": np.array([0.1, 0.2])}, x="x", y="y", title="t")
    assert "x" in words(svg)
    assert histogram({"a": np.array([])}, x="x", y="y", title="t").startswith("<svg")


def test_the_critical_difference_diagram_names_all_methods():
    svg = critical_difference(["low", "best", "mid"], [2.8, 1.1, 2.1], [(2, 0)], 0.9, title="ranks")
    assert {"best (1.10)", "mid (2.10)", "low (2.80)", "critical difference 0.90", "1", "2", "3"} <= set(words(svg))
    assert svg.count("var(--c0)") == 1  # one bar
    none = critical_difference(["a", "b", "c"], [1.0, 2.0, 3.0], [], 0.5, title="ranks")
    assert "var(--c0)" not in none


def test_text_is_escaped_once():
    assert escape("<b>") == "&lt;b&gt;"
    assert escape(Html("<b>")) == "<b>"
    assert escape(join([escape("<"), Html("<br>")])) == "&lt;<br>"


def test_a_table_has_headers_rows_and_buttons():
    html = table(["name", "x", "look"], [["<a>", 1.5, Html("<i>y</i>")]], label="l & m", sortable=True, pictures=(2,))
    assert '<th scope="row" class="t">&lt;a&gt;</th><td>1.5</td><td><i>y</i></td>' in html
    assert html.count("<button") == 2
    assert 'aria-label="l &amp; m" tabindex="0"' in html
    assert "<button" not in table(["name"], [], label="x")


def test_pictures_are_inside_the_page(tmp_path):
    path = tmp_path / "photo.png"
    Image.new("RGB", (300, 200), (200, 10, 10)).save(path)
    thumbnails = Thumbnails(Images([path], torch.tensor([0]), ("a",)))
    html = thumbnails.image(0, 'a "b"')
    assert 'alt="a &quot;b&quot;"' in html
    assert "pixels" not in html
    data = base64.b64decode(re.search(r"data:image/jpeg;base64,([^\"]+)", html)[1])
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (112, 75)
    small = Thumbnails(Images(torch.full((1, 1, 8, 8), 90, dtype=torch.uint8), torch.tensor([0]), ("a",))).image(0, "")
    data = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", small)[1])
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (8, 8)
        assert picture.getpixel((3, 3)) == (90, 90, 90)
    assert 'class="pixels"' in small
