"""Links inside the project point to files and headings that exist; the site lists every page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.site_pages import ROOT_PAGES

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / name for name in ROOT_PAGES), *DOCS]

_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)|(?:href|src)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
_ID = re.compile(r"(?:id|name)=\"([^\"]+)\"")


def anchors(text: str) -> set[str]:
    """The anchors of a page: ids in HTML, and headings in lower case with hyphens, as forges and the site make them."""
    headings = _HEADING.findall(re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings)
    slugs = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).lower()) for heading in plain}
    return slugs | set(_ID.findall(text))


def links(text: str) -> list[str]:
    """Targets inside the project."""
    found = (a or b for a, b in _LINK.findall(_CODE.sub("", text)))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    """Links of a page whose file or heading does not exist."""
    wrong = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            wrong.append(target)
    return wrong


def test_the_checker_sees_broken_links(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A *good* `name`: it works\n[a](page.md#a-good-name-it-works) [b](none.md) [c](#none) `[d](none.md)`\n"
        '<img src="none.png"> [e](https://example.org/none)\n'
    )
    assert broken(page) == ["none.md", "#none", "none.png"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_files_and_headings(page):
    assert broken(page) == []


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for each in below for page in nav_pages(each)]


def test_the_site_lists_every_page():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = nav_pages(yaml.safe_load(text)["nav"])
    assert sorted(listed) == sorted([*ROOT_PAGES.values(), *(str(p.relative_to(ROOT / "docs")) for p in DOCS)])


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)\b[^>]*(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert loaded == [], page.name
