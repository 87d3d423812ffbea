"""The keywords of train: those of Plan, for editors and for people; progress in notebooks."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import get_type_hints

from torch import nn

import nearkin as nk
from nearkin import console
from nearkin.data.labelled_items import Items
from nearkin.training.plan import Plan
from nearkin.training.settings import Settings


def test_the_typed_keywords_are_the_fields_of_the_plan():
    """A new field of Plan needs its line in Settings."""
    wanted = get_type_hints(Plan) | {"metrics": str | Sequence[str]}
    wanted |= {"data": str | Items | tuple[Items, Items], "backbone": str | nn.Module}
    assert get_type_hints(Settings) == wanted
    assert list(get_type_hints(Settings)) == [field.name for field in dataclasses.fields(Plan)]


def test_signature_and_docstring_show_every_setting():
    parameters = inspect.signature(nk.train).parameters
    for field in dataclasses.fields(Plan):
        assert field.name in parameters
        assert field.metadata["help"] in nk.train.__doc__
    assert parameters["epochs"].default == 60
    assert str(parameters["backbone"].default) == "<lite0 for photographs, conv4 for small grey images>"
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def test_progress_is_shown_in_notebooks_only(monkeypatch):
    assert console.notebook_reporter().console is None
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda _, text: shown.append(text))
    reporter = console.notebook_reporter()
    reporter.epoch("epoch 1/2")
    assert shown == ["epoch 1/2\n"]
