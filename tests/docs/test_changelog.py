"""The table of moved modules names modules that exist, and the version has an entry."""

import importlib.util
import re
from pathlib import Path

from nearkin.files import VERSION

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


def test_new_places_of_modules_exist():
    rows = re.findall(r"^\| `nearkin\..*\| (.*) \|$", CHANGELOG, re.MULTILINE)
    modules = [name for row in rows for name in re.findall(r"`(nearkin[\w.]*)`", row)]
    assert len(modules) > 40
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_version_has_an_entry():
    assert f"## [{VERSION}]" in CHANGELOG
