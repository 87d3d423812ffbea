"""The report in a real browser: desktop and phone width, light and dark, mouse and keyboard, no network."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def opened(browser, path, **options) -> Iterator[object]:
    """The page open in a window; requests and console messages fail the test."""
    page = browser.new_page(**options)
    requests, messages = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert messages == []


WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.mark.parametrize(
    ("name", "window", "scheme"),
    [
        ("one", WIDE, "light"),
        ("one", WIDE, "dark"),
        ("one", NARROW, "light"),
        ("three", WIDE, "light"),
        ("three", NARROW, "dark"),
    ],
)
def test_the_page_fits_the_window(browser, pages, picture, name, window, scheme):
    with opened(browser, pages[name], viewport=window, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == window["width"]
        sizes = page.evaluate(
            "[...document.images].map(each => [each.naturalWidth, each.getBoundingClientRect().width])"
        )
        assert len(sizes) > 50
        assert all(natural > 0 and shown >= 20 for natural, shown in sizes)
        letters = page.evaluate(
            "[...document.querySelectorAll('.chart text')].map(t => t.getBoundingClientRect().height)"
        )
        assert min(letters) >= 7
        inks = page.evaluate("[...document.querySelectorAll('.chart text')].map(t => getComputedStyle(t).fill)")
        assert set(inks) == {page.evaluate("getComputedStyle(document.body).color")}, "text must contrast with the page"
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(253, 253, 252)"
        assert light == (scheme == "light")
        page.screenshot(path=picture(f"report-{name}-{window['width']}-{scheme}"), full_page=True)


def column(page, place):
    return page.evaluate(
        f"[...document.querySelectorAll('#classes tbody tr')].map(row => row.cells[{place}].textContent)"
    )


def test_the_class_table_is_sorted_by_mouse_and_keyboard(browser, pages):
    with opened(browser, pages["one"], viewport=WIDE) as page:
        heads = page.locator("#classes thead th")
        before = column(page, 2)
        assert [float(v) for v in before] == sorted(map(float, before)), "hardest first"
        heads.nth(2).locator("button").click()
        down = [float(v) for v in column(page, 2)]
        assert down == sorted(down, reverse=True)
        assert heads.nth(2).get_attribute("aria-sort") == "descending"
        heads.nth(0).locator("button").focus()
        page.keyboard.press("Enter")
        names = column(page, 0)
        assert names == sorted(names, key=str.casefold)
        assert heads.nth(0).get_attribute("aria-sort") == "ascending"
        assert heads.nth(2).get_attribute("aria-sort") is None
        page.keyboard.press("Enter")
        assert column(page, 0) == names[::-1]
        heads.nth(1).locator("button").click()
        assert sorted(column(page, 0)) == sorted(names), "rows stay whole"


def test_a_class_is_highlighted_on_every_map(browser, pages, picture):
    with opened(browser, pages["three"], viewport=WIDE) as page:
        select = page.locator(".pick select")
        value = select.locator("option").nth(3).get_attribute("value")
        select.select_option(value)
        assert page.locator("svg.map.dim").count() == 3
        chosen = page.evaluate("[...document.querySelectorAll('svg.map .on')].map(each => each.dataset.class)")
        assert chosen == [value] * 3
        page.locator("#map").screenshot(path=picture("report-map-picked"))
        select.select_option("")
        assert page.locator("svg.map.dim").count() == 0


def test_all_controls_can_be_reached_by_keyboard(browser, pages):
    with opened(browser, pages["one"], viewport=NARROW) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName"))
        assert {"A", "BUTTON", "DIV", "SELECT", "SUMMARY"} <= reached, (
            "links, sorting, scrolling boxes, highlighting, settings"
        )


def test_all_is_printed(browser, pages):
    with opened(browser, pages["one"], viewport=WIDE) as page:
        page.emulate_media(media="print")
        assert not page.locator("nav").is_visible()
        tall = page.evaluate("getComputedStyle(document.querySelector('.scroll.tall')).maxHeight")
        assert tall == "none"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("details[open]").count() == page.locator("details").count() == 1
