"""The page in a real browser: mouse, keyboard, touch, drop, paste, back button, light and dark, large and small."""

import base64
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from page_helpers import until

import nearkin.serve
from nearkin.search.index import create_index
from nearkin.serve import Limits, make_app

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

STATIC = Path(nearkin.serve.__file__).parent / "static"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def opened(browser, address, *, viewport=None, complaints=(), **context):
    """A page that must log nothing unexpected and send no request to another host."""
    context = {"viewport": viewport or WIDE, "reduced_motion": "reduce", **context}
    with_context = browser.new_context(**context)
    page = with_context.new_page()
    heard, elsewhere = [], []
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda line: heard.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda r: None if r.url.startswith((address, "blob:")) else elsewhere.append(r.url))
    page.goto(address)
    try:
        yield page
    finally:
        with_context.close()
    assert [line for line in heard if not any(known in line for known in complaints)] == []
    assert elsewhere == []


@pytest.fixture
def page(browser, server):
    with opened(browser, server) as page:
        expect(page.locator("#hits a")).to_have_count(20)
        yield page


def hits(page):
    return page.locator("#hits a")


def searched(page):
    """The page after a search was answered."""
    expect(page.locator("#status")).to_contain_text("the nearest")
    return page


def drawn(page):
    """The page after its map was drawn."""
    expect(page.locator("#map-state")).to_contain_text("t-SNE")
    return page


def test_assets_are_local():
    for path in STATIC.iterdir():
        foreign = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", path.read_text())
        assert [link for link in foreign if link != "http://www.w3.org/2000/svg"] == [], path.name


def test_first_view(page, index, picture):
    expect(page.locator("#about")).to_have_text(f"letters: {len(index)} pictures, {len(index.label_names())} labels")
    drawn(page)
    page.screenshot(path=picture("serve-first-1280"))


def test_chosen_picture_finds_itself(page, pictures, picture, shown):
    path = pictures[3][0]
    page.locator("#file").set_input_files(path)
    searched(page)
    expect(hits(page)).to_have_count(20)
    expect(hits(page).first).to_have_attribute("title", shown(path))
    expect(page.locator("#query")).to_contain_text("Your picture")
    expect(page.locator(".cut").first).to_contain_text("80 % of such pairs were of the same class")
    assert page.locator("#hits a.same").count() >= 1
    drawn(page).screenshot(path=picture("serve-search-1280"))


def test_picture_chosen_while_the_page_loads_is_searched(browser, server, pictures, shown):
    with opened(browser, server) as page:
        held = []
        page.route("**/api/about", lambda route: held.append(route))  # the page waits for this answer
        with page.expect_request("**/api/about"):
            page.reload()
        page.locator("#file").set_input_files(pictures[3][0])
        held[0].continue_()
        searched(page)
        expect(hits(page).first).to_have_attribute("title", shown(pictures[3][0]))


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_picture_can_be_dropped_and_pasted(page, pictures, shown, how):
    path = pictures[10][0]
    page.evaluate(
        """([how, data]) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], "mine.png", { type: "image/png" }));
            const kind = how === "drop" ? DragEvent : ClipboardEvent;
            const options = { bubbles: true, cancelable: true, dataTransfer: carried, clipboardData: carried };
            if (how === "drop") document.body.dispatchEvent(new DragEvent("dragenter", options));
            window.overlayShown = !document.getElementById("overlay").hidden;
            document.body.dispatchEvent(new kind(how, options));
        }""",
        [how, base64.b64encode(path.read_bytes()).decode()],
    )
    searched(page)
    expect(hits(page).first).to_have_attribute("title", shown(path))
    assert page.evaluate("window.overlayShown") is (how == "drop")
    expect(page.locator("#overlay")).to_be_hidden()


def test_hits_with_another_label_are_marked(page):
    hits(page).first.click()
    searched(page)
    wanted = page.locator("#query .label").inner_text()
    labels = page.locator("#hits .label").all_inner_texts()
    marked = page.locator("#hits .hit").evaluate_all("(all) => all.map((hit) => !!hit.querySelector('.badge'))")
    assert marked == [label != wanted for label in labels]
    assert True in marked
    bars = "(all) => all.map((bar) => getComputedStyle(bar).backgroundImage.match(/rgb[^)]*[)]/)[0])"
    assert len(set(page.locator("#hits .like i").evaluate_all(bars))) == 1


def test_click_on_a_hit_and_back_button(page, pictures, shown):
    page.locator("#file").set_input_files(pictures[3][0])
    searched(page)
    second = hits(page).nth(1)
    chosen = second.get_attribute("title")
    second.click()
    expect(page.locator("#query .path")).to_have_text(chosen)
    searched(page)
    assert "id=" in page.url
    page.go_back()
    expect(page.locator("#query")).to_contain_text("Your picture")
    expect(hits(page).first).to_have_attribute("title", shown(pictures[3][0]))
    page.go_back()
    expect(page.locator("#status")).to_have_text("Or start with one of these.")
    expect(page.locator("#query")).to_be_empty()
    page.go_forward()
    page.go_forward()
    expect(page.locator("#query .path")).to_have_text(chosen)
    page.reload()  # the address holds the whole state
    expect(page.locator("#query .path")).to_have_text(chosen)


def test_upload_is_lost_on_reload(page, pictures):
    page.locator("#file").set_input_files(pictures[3][0])
    searched(page).reload()
    expect(page.locator("#status")).to_contain_text("choose the picture again")


def test_number_of_hits_and_label_filter(page, pictures, index):
    hits(page).first.click()
    searched(page)
    page.locator("#k").select_option("10")
    expect(hits(page)).to_have_count(10)
    label = pictures[-1][1]
    page.locator("#label").fill(label)
    page.locator("#label").press("Enter")
    expect(hits(page)).to_have_count(3)
    assert f"label={label}" in page.url
    page.locator("#label").fill("nobody")
    page.locator("#label").press("Enter")
    expect(page.locator("#status")).to_have_text("There is no label “nobody”.")
    page.locator("#chosen button").click()
    expect(hits(page)).to_have_count(10)
    assert "label=" not in page.url


def test_label_box_finds_parts_of_names(page, index):
    word, names = "with", [name for name in index.label_names() if "with" in name]
    assert 1 < len(names) <= 50
    page.locator("#label").press_sequentially(word.upper())
    options = page.locator("#labels [role=option]")
    expect(options).to_have_count(len(names))
    assert {option.split("\n")[0] for option in options.all_inner_texts()} == set(names)
    page.locator("#label").press("Enter")
    expect(page.locator("#status")).to_contain_text("choose one from the list")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp"):  # from the first one up is the last one
        page.locator("#label").press(key)
    chosen = page.locator("#labels [aria-selected=true]")
    expect(page.locator("#label")).to_have_attribute("aria-activedescendant", chosen.get_attribute("id"))
    name = chosen.locator("span").inner_text()
    assert name == options.last.locator("span").inner_text()
    page.locator("#label").press("Enter")
    expect(page.locator("#chosen")).to_contain_text(name)
    expect(page.locator("#labels")).to_be_hidden()
    page.locator("#label").fill("photog")
    options.click()
    expect(page.locator("#chosen li")).to_have_count(2)
    page.locator("#label").fill("photog")
    page.locator("#label").press("Escape")
    expect(page.locator("#labels")).to_be_hidden()


def test_label_filter_applies_to_examples(page, pictures):
    page.locator("#label").fill(pictures[-1][1])
    page.locator("#label").press("Enter")
    expect(hits(page)).to_have_count(3)
    expect(page.locator("#hits .label").first).to_have_text("photograph")
    page.locator("#chosen button").click()
    expect(hits(page)).to_have_count(20)
    page.locator("#k").select_option("10")
    expect(hits(page)).to_have_count(10)


def test_labels_are_escaped(page, index):
    """One label is a tag that would run a script."""
    item = next(i for i, label in zip(index.items().ids, index.items().labels, strict=True) if "onerror" in label)
    page.goto(page.url + "?id=" + item.replace(" ", "%20"))
    searched(page)
    expect(page.locator("#query .label")).to_contain_text("<img src=x onerror")
    assert page.locator("img[src='x']").count() == 0
    assert page.title() == "letters · nearkin"


def test_keyboard_reaches_everything(page):
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for wanted in (".name", "header > a:last-child", "#file", "#k", "#label"):
        page.keyboard.press("Tab")
        expect(page.locator(wanted)).to_be_focused()
    page.keyboard.press("Tab")
    expect(hits(page).first).to_be_focused()
    outline = "(node) => getComputedStyle(node).outlineWidth + getComputedStyle(node).outlineStyle"
    assert hits(page).first.evaluate(outline) == "3pxsolid"
    page.keyboard.press("ArrowRight")
    expect(hits(page).nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    below = page.evaluate("[...document.querySelectorAll('#hits a')].indexOf(document.activeElement)")
    boxes = [hits(page).nth(n).bounding_box() for n in (1, below)]
    assert boxes[0]["x"] == boxes[1]["x"]
    assert boxes[0]["y"] < boxes[1]["y"]
    page.keyboard.press("End")
    expect(hits(page).last).to_be_focused()
    page.keyboard.press("Home")
    chosen = hits(page).first.get_attribute("title")
    page.keyboard.press("Enter")
    searched(page)
    expect(page.locator("#query .path")).to_have_text(chosen)
    expect(hits(page).first).to_be_focused()  # so the keyboard can continue there
    page.keyboard.press("Escape")
    expect(page.locator("#file")).to_be_focused()


def places(page, server):
    """Screen positions of the map's points, computed independently of the page."""
    found = page.request.get(f"{server}/api/map").json()
    box = page.locator("#canvas").bounding_box()
    x, y = found["x"], found["y"]
    wide, tall = (box["width"] - 60) / (max(x) - min(x)), (box["height"] - 60) / (max(y) - min(y))
    wide, tall = min(wide, 2 * tall), min(tall, 2 * wide)  # the map fills its panel, stretched at most twofold
    middle = [(min(x) + max(x)) / 2, (min(y) + max(y)) / 2]
    left, top = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    spots = [(left + wide * (a - middle[0]), top + tall * (b - middle[1])) for a, b in zip(x, y, strict=True)]
    return dict(zip(found["ids"], spots, strict=True))


def alone(spots):
    """An item whose point is far from all others."""

    def nearest(item):
        return min((a - spots[item][0]) ** 2 + (b - spots[item][1]) ** 2 for o, (a, b) in spots.items() if o != item)

    return max(spots, key=nearest)


def test_click_on_a_map_point_searches(page, server):
    spots = places(drawn(page), server)
    item = alone(spots)
    page.mouse.move(*spots[item])
    expect(page.locator("#tip")).to_be_visible()
    page.mouse.click(*spots[item])
    expect(page.locator("#query .path")).to_have_text(item)


def test_map_moves_and_zooms(page, server):
    canvas = drawn(page).locator("#canvas")
    spots = places(page, server)
    item = alone(spots)
    x, y = spots[item]
    box = canvas.bounding_box()
    page.mouse.move(x, y)
    page.mouse.wheel(0, -600)  # the point under the pointer stays under it
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 100, steps=4)
    page.mouse.up()
    assert "id=" not in page.url  # dragging is not a click
    page.mouse.click(box["x"] + 100, box["y"] + 100)
    expect(page.locator("#query .path")).to_have_text(item)
    page.locator("#zoom-all").click()
    page.mouse.click(*spots[item])
    expect(page.locator("#query .path")).to_have_text(item)


def test_map_works_by_keyboard(page, server):
    spots = places(drawn(page), server)
    page.locator("#tab-results").evaluate("(node) => node.focus()")
    page.locator("#canvas").focus()
    page.keyboard.press("0")
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    nearest = min(spots, key=lambda item: (spots[item][0] - x) ** 2 + (spots[item][1] - y) ** 2)
    expect(page.locator("#map-point")).to_contain_text("Enter searches with it")
    page.keyboard.press("+")
    page.keyboard.press("-")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#query .path")).to_have_text(nearest)


WRITTEN = """() => {
    window.written = {};
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        window.written[text] = [x, y];
        return write.call(this, text, x, y);
    };
}"""


def written(page):
    """What the map writes, with its place on the canvas, when it is drawn again."""
    page.evaluate("window.written = {}")
    page.locator("#zoom-all").click()
    return until(page, "Object.keys(window.written).length && window.written")


def test_map_names_compact_classes(browser, live, tmp_path, picture):
    rng = np.random.default_rng(0)
    labels = [name for name in ("north", "south", "east") for _ in range(12)] + ["everywhere"] * 36
    centres = dict(zip(("north", "south", "east"), 9 * np.eye(3, 8), strict=True))
    around = [centres.get(label, list(centres.values())[n % 3]) for n, label in enumerate(labels)]
    x = (np.stack(around) + 0.3 * rng.normal(size=(len(labels), 8))).astype(np.float32)
    index = create_index(tmp_path / "few", dim=8, space="euclidean")
    index.add(x, paths=[f"/{n}.png" for n in range(len(labels))], labels=labels)
    with opened(browser, live(make_app(index, None)), complaints=("404",)) as page:
        drawn(page).evaluate(WRITTEN)
        assert set(written(page)) == {"north", "south", "east"}
        page.locator("#map").screenshot(path=picture("serve-names"))


def test_map_names_some_of_many_classes_from_afar(browser, live, tmp_path, picture):
    rng = np.random.default_rng(0)
    x = np.repeat(9 * rng.normal(size=(100, 8)), 2, axis=0) + 0.1 * rng.normal(size=(200, 8))
    labels = [f"bird of the kind {number // 2}" for number in range(200)]
    index = create_index(tmp_path / "many", dim=8, space="euclidean")
    index.add(x.astype(np.float32), paths=[f"/{n}.png" for n in range(200)], labels=labels)
    with opened(browser, live(make_app(index, None)), complaints=("404",)) as page:
        drawn(page).evaluate(WRITTEN)
        names = written(page)
        assert 12 <= len(names) < 50
        assert len({(round(x), round(y)) for x, y in names.values()}) == len(names)
        page.locator("#map").screenshot(path=picture("serve-many-names"))


def test_map_places_an_uploaded_picture(page, pictures, server, shown, picture):
    path = pictures[10][0]
    page.locator("#file").set_input_files(path)
    drawn(searched(page)).evaluate(WRITTEN)
    box, (x, y) = page.locator("#canvas").bounding_box(), written(page)["your picture"]
    spot = places(page, server)[shown(path)]  # the picture itself is in the index
    assert abs(box["x"] + x - spot[0]) < 45  # half the words, if they had to move from the edge
    assert abs(box["y"] + y - spot[1]) < 40
    page.locator("#map").screenshot(path=picture("serve-upload-map"))
    page.evaluate("window.written = {}")
    for _ in range(8):
        page.locator("#zoom-in").click()
    x, y = until(page, "window.written['your picture']")
    assert abs(x - box["width"] / 2) < 40  # the buttons bring it to the middle
    assert abs(y - box["height"] / 2) < 60
    hits(page).nth(3).click()
    expect(page.locator("#query")).not_to_contain_text("Your picture")
    assert "your picture" not in written(page)


def test_pictures_appear_when_zoomed_in(page, server, picture):
    spots = places(drawn(page), server)
    page.mouse.move(*spots[alone(spots)])
    item = alone(spots)
    x, y = spots[item]
    with page.expect_response(lambda answer: "side=64" in answer.url):
        page.mouse.wheel(0, -1200)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=picture("serve-close-1280"))
    page.mouse.click(x + 19, y - 19)  # near a corner of the picture, which is 48 pixels wide
    expect(page.locator("#query .path")).to_have_text(item)


def test_on_a_phone(browser, server, pictures, picture):
    with opened(browser, server, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2) as page:
        page.locator("#file").set_input_files(pictures[3][0])
        searched(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        expect(page.locator("#canvas")).to_be_hidden()
        page.screenshot(path=picture("serve-search-390"))
        hits(page).nth(1).tap()
        expect(page.locator("#query .path")).to_be_visible()
        page.locator("#tab-map").tap()
        expect(page.locator("#hits")).to_be_hidden()
        drawn(page)
        box = page.locator("#canvas").bounding_box()
        assert box["y"] + box["height"] <= PHONE["height"]  # the map needs no scrolling
        page.screenshot(path=picture("serve-map-390"))
        for target in ("#zoom-in", "#tab-map", "label[for=file]"):
            assert page.locator(target).bounding_box()["height"] >= 34
        pinch(page, box)
        page.screenshot(path=picture("serve-pinched-390"))


def pinch(page, box):
    """Pinch to zoom: the map changes and no point is selected."""
    before = page.locator("#canvas").screenshot()
    touch = page.context.new_cdp_session(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, apart in [("touchStart", 40), ("touchMove", 80), ("touchMove", 140), ("touchEnd", None)]:
        fingers = [] if apart is None else [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})
    address = page.url
    page.wait_for_timeout(100)
    assert page.locator("#canvas").screenshot() != before
    assert page.url == address  # two fingers select no point


def test_dark_mode(browser, server, pictures, picture):
    backgrounds = {}
    for scheme in ("light", "dark"):
        with opened(browser, server, color_scheme=scheme) as page:
            page.locator("#file").set_input_files(pictures[3][0])
            drawn(searched(page))
            backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            if scheme == "dark":
                page.screenshot(path=picture("serve-dark-1280"))
    assert sum(map(int, re.findall(r"\d+", backgrounds["dark"]))) < 150
    assert sum(map(int, re.findall(r"\d+", backgrounds["light"]))) > 650


def test_upload_errors_are_shown(browser, index, model, live, tmp_path, picture):
    address = live(make_app(index, model, limits=Limits(upload_bytes=5000)))
    text, large = tmp_path / "text.png", tmp_path / "large.png"
    text.write_text("no picture")
    large.write_bytes(b"\x89PNG" + b"\0" * 6000)
    with opened(browser, address, complaints=("415",)) as page:
        page.locator("#file").set_input_files(text)
        expect(page.locator("#status.error")).to_contain_text("not a picture of a known format")
        page.screenshot(path=picture("serve-error-1280"))
        page.locator("#file").set_input_files(large)
        expect(page.locator("#status.error")).to_contain_text("has 0.00573 MB; the limit is 0.00477 MB")


def test_busy_server_is_retried(browser, server, pictures):
    with opened(browser, server, complaints=("503",)) as page:
        refusals = iter([True, True])

        def sometimes(route):
            if next(refusals, False):
                route.fulfill(status=503, headers={"Retry-After": "0.05"}, json={"error": "Busy."})
            else:
                route.continue_()

        page.route("**/api/search*", sometimes)
        page.locator("#file").set_input_files(pictures[3][0])
        searched(page)


def test_unreachable_server_is_shown(browser, index, live, picture):
    address = live(make_app(index, None, why="The run is gone."))
    with opened(browser, address, complaints=("ERR_CONNECTION_REFUSED", "Failed to load")) as page:
        expect(page.locator("#hint")).to_contain_text("The run is gone.")
        expect(page.locator("#file")).to_be_disabled()
        page.route("**/api/search*", lambda route: route.abort("connectionrefused"))
        hits(page).first.click()
        expect(page.locator("#status.error")).to_contain_text("does not answer")


def test_empty_index_and_missing_files(browser, live, tmp_path, picture):
    empty = create_index(tmp_path / "empty", dim=2, space="cosine")
    with opened(browser, live(make_app(empty, None))) as page:
        expect(page.locator("#status")).to_contain_text("The index is empty")
        expect(page.locator("#map-state")).to_contain_text("empty")
    gone = create_index(tmp_path / "gone", dim=2, space="cosine")
    gone.add([[1.0, 0.0], [0.0, 1.0]], paths=["/a.png", "/b.png"], labels=[None, None])
    with opened(browser, live(make_app(gone, None)), complaints=("404",)) as page:
        expect(page.locator("#hits .frame").first).to_have_text("The picture cannot be shown.")
        expect(page.locator("#hits")).to_contain_text("no label")


def test_token_is_asked_for_once(browser, index, live, picture):
    address = live(make_app(index, None, token="correct horse"))
    with opened(browser, address, complaints=("401",)) as page:
        page.screenshot(path=picture("serve-token-1280"))
        page.locator("#token").fill("wrong horse")
        page.keyboard.press("Enter")
        expect(page.locator("p")).to_contain_text("The token is wrong.")
        page.locator("#token").fill("correct horse")
        page.keyboard.press("Enter")
        expect(hits(page)).to_have_count(20)
        assert "token" not in page.url
        page.reload()
        expect(hits(page)).to_have_count(20)


def test_first_map_becomes_tsne(browser, index, live, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))  # nothing is cached yet
    address = live(make_app(index, None))
    with opened(browser, address, reduced_motion="no-preference") as page:
        expect(page.locator("#map-state")).to_contain_text("a better one is being drawn")
        drawn(page).wait_for_timeout(900)  # points glide to their places
        spots = places(page, address)
        item = alone(spots)
        page.mouse.click(*spots[item])
        expect(page.locator("#query .path")).to_have_text(item)


def test_every_control_has_an_accessible_name(page):
    """For screen readers: every control has a name, results are a list, the status is announced."""
    hits(page).first.click()
    searched(page)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in tree if not node["ignored"]]

    def is_focusable(node):
        return any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", []))

    controls = [(node["role"]["value"], node["name"]["value"]) for node in seen if is_focusable(node)]
    assert len(controls) > 20
    assert [role for role, name in controls if not name.strip() and role != "RootWebArea"] == []
    roles = {node["role"]["value"] for node in seen}
    assert {"list", "listitem", "status", "application", "combobox", "link", "button"} <= roles


def test_api_page(browser, server, picture):
    with opened(browser, server) as page:
        page.locator("header > a:last-child").click()
        expect(page.locator("article").first).to_contain_text("/api/about")
        expect(page.locator("body")).to_contain_text("curl --data-binary @picture.jpg")
        page.screenshot(path=picture("serve-api-1280"))
