"""Run every command and every line of Python of docs/folder-to-page.md, in order, on letters.

NEARKIN_TUTORIAL=full runs it in full size and updates the tutorial's pictures.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from page_helpers import until
from PIL import Image
from typer.testing import CliRunner

from nearkin.cli import app

for package in ("fastapi", "onnxruntime", "httpx2"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "folder-to-page.md"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", PAGE.read_text(), re.DOTALL)
FULL = os.environ.get("NEARKIN_TUTORIAL") == "full"
SMALLER = ("glyphs(classes=200, samples=12)", "glyphs(classes=48, samples=8)")
QUICK = ["--epochs", "30", "--batch", "36", "--dim", "32"]
PICTURES_SHOWN = """() => [...document.images]
    .filter((image) => image.getBoundingClientRect().top < innerHeight && image.getClientRects().length)
    .every((image) => image.complete && image.naturalWidth)"""


def nearkin(words: list[str]) -> str:
    """Run a command and return what it prints."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.exception}\n{result.output}"
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Follow the tutorial up to the page; return its folder and what each step printed."""
    place = tmp_path_factory.mktemp("tutorial")
    printed: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for kind, text in BLOCKS:
            if kind == "python":
                with redirect_stdout(io.StringIO()) as said:
                    exec(text if FULL else text.replace(*SMALLER), {})
                printed[text] = said.getvalue()
                continue
            for line in text.splitlines():
                words = shlex.split(line)
                if words[:2] == ["nearkin", "train"] and not FULL:
                    words += QUICK
                if words[0] == "nearkin" and words[1] != "serve":
                    printed[words[1]] = nearkin(words[1:])
    return place, printed


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    """Start the server as in the tutorial, but on a free port; return its address."""
    words = next(shlex.split(line) for _, text in BLOCKS for line in text.splitlines() if "serve" in line.split())
    command = [sys.executable, "-m", *words, "--port", "0"]
    with subprocess.Popen(command, cwd=folder[0], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        finally:
            server.terminate()


def test_the_tutorial_has_these_steps():
    commands = [line.split()[:2] for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    steps = ["data", "train", "calibrate", "index", "search", "serve", "serve", "export"]
    assert [second for first, second in commands if first == "nearkin"] == steps
    assert [first for first, _ in commands if first != "nearkin"] == ["curl"]


def test_every_step_leads_to_the_next(folder):
    place, printed = folder
    with Image.open(place / "photos.png") as sheet:
        assert sheet.width > 100
    images = len(list((place / "photos").rglob("*.png")))
    assert f"{images:,} images in photos.index" in printed["index"]
    assert "Same class above a similarity of" in printed["calibrate"]
    assert printed["search"].count("photos/") == 5
    assert "<img" in (place / "found.html").read_text()
    assert "Largest difference from PyTorch" in printed["export"]
    assert any("resize to a short side" in text for text in printed.values())


def test_the_api_answers_as_the_tutorial_asks(folder, address):
    place, _ = folder
    asked = next(shlex.split(line) for _, text in BLOCKS for line in text.splitlines() if line.startswith("curl"))
    asked[-1] = asked[-1].replace("http://127.0.0.1:8000/", address)
    if shutil.which("curl"):
        answer = subprocess.run(asked, cwd=place, capture_output=True, check=True, timeout=60).stdout
    else:
        data = (place / asked[2].removeprefix("@")).read_bytes()
        answer = urlopen(Request(asked[-1], data=data), timeout=60).read()
    assert len(json.loads(answer)["hits"]) == 3


def test_a_token_admits_others(folder, monkeypatch):
    from starlette.testclient import TestClient

    words = next(shlex.split(line)[1:] for _, text in BLOCKS for line in text.splitlines() if "--token" in line)
    words[words.index("0.0.0.0")] = "127.0.0.1"  # a test must not be reachable
    served = []
    monkeypatch.setattr("nearkin.serve.server.run_app", lambda app, _listener: served.append(app))
    monkeypatch.chdir(folder[0])
    printed = nearkin([*words, "--port", "0"])
    way_in = re.search(r"http://127.0.0.1:\d+(/\S+)", printed)[1]
    with TestClient(served[0], base_url="http://127.0.0.1") as client:
        assert client.get("/").status_code == 401
        assert client.get(way_in).status_code == 200
        assert client.get("/api/about").status_code == 200


def test_the_page_looks_as_shown(folder, address, browser, picture):
    from playwright.sync_api import expect

    place, _ = folder
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(address)
    expect(page.locator("#map-state")).to_contain_text("t-SNE", timeout=120_000)
    page.wait_for_timeout(1000)  # points move to their places
    take(page, "page-first", picture)
    page.locator("#file").set_input_files(place / "mine.png")
    expect(page.locator("#status")).to_contain_text("the nearest")
    until(page, PICTURES_SHOWN)
    take(page, "page-search", picture)
    with page.expect_response(lambda answer: "side=64" in answer.url):  # zoomed in, points become pictures
        for _ in range(7):
            page.locator("#zoom-in").click()
    page.wait_for_load_state("networkidle")
    take(page.locator("#map"), "page-map", picture)
    page.close()
    phone = browser.new_page(viewport={"width": 390, "height": 700}, is_mobile=True, has_touch=True)
    phone.goto(address)
    phone.locator("#file").set_input_files(place / "mine.png")
    expect(phone.locator("#status")).to_contain_text("the nearest")
    until(phone, PICTURES_SHOWN)
    take(phone, "page-phone", picture)
    phone.close()
    for name in re.findall(r"\]\(pictures/(.*?)\)", PAGE.read_text()):
        assert (PAGE.parent / "pictures" / name).stat().st_size < 200_000


def take(what, name: str, picture: Callable[[str], str]) -> None:
    """Take a screenshot of the page or a part of it; in full size also update the tutorial's picture."""
    path = picture(name)
    what.screenshot(path=path)
    if FULL:
        with Image.open(path) as image:
            small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            small.save(PAGE.parent / "pictures" / f"{name}.png", optimize=True)
