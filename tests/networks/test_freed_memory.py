"""A process keeps freed memory, unless its environment says how memory is to be handled."""

import ctypes
import os
import sys
from types import SimpleNamespace

import pytest

from nearkin.networks.freed_memory import LARGEST, keep_freed_memory


@pytest.mark.parametrize(
    ("environment", "calls"), [({}, 2), ({"MALLOC_ARENA_MAX": "2"}, 0), ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, 0)]
)
def test_the_environment_is_preferred(environment, calls, monkeypatch):
    made = []
    library = SimpleNamespace(mallopt=lambda name, value: made.append((name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in list(os.environ):
        if "MALLOC_" in name or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    keep_freed_memory.__wrapped__()
    assert [value for _, value in made] == calls * [LARGEST]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory.__wrapped__()
