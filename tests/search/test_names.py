"""Escaped names are plain text, differ if the names differ, and give the exact names back."""

import os
from itertools import product

import pytest

from nearkin.search.names import escape_name, unescape_name


@pytest.mark.parametrize("name", ["plain.png", "ü/日本.png", "C:\\pictures\\a.png", "a\\n", ""])
def test_ordinary_names_stay(name):
    assert escape_name(name) == name == unescape_name(name)


def test_bytes_that_are_not_utf8_are_shown():
    assert escape_name(os.fsdecode(b"caf\xe9.png")) == "caf\\xe9.png"


def test_names_come_back_exactly():
    pieces = ["\\", "x", "e9", "5c", "\udce9", "\udc5c", "\ud800", "u", "dce9"]
    names = {"".join(chosen) for length in range(1, 5) for chosen in product(pieces, repeat=length)}
    shown = {escape_name(name): name for name in names}
    assert len(shown) == len(names)
    for text, name in shown.items():
        text.encode()
        assert unescape_name(text) == name
