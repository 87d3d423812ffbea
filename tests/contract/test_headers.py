"""Every row of the tables has an oracle, settings that test its options, and a header."""

import importlib
import inspect
from typing import Literal, get_args, get_origin, get_type_hints

import oracles
import pytest
from contract.cases import LOSSES, QUICK, STRATEGIES, build, signature_of

from nearkin.methods.base import Method

SIZES = {"classes", "dim"}
NOT_IN_THE_VALUE = {"speed", "initial", "sample_rate"}  # how proxies are made and moved, not what a batch costs
SECTIONS = ("Symbols", "Settings", "Departures", "Relations")


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_an_oracle_and_settings(name):
    assert name in oracles.ORACLES, f"write oracles.{name}, naively, from the paper"
    weights = "weights" in inspect.signature(oracles.ORACLES[name]).parameters
    assert weights, f"oracles.{name} takes weights, which multiply inside the exponent or the hinge"
    assert name in oracles.SETTINGS, f"list in oracles.SETTINGS the options of {name} to test"
    assert name in oracles.LARGE, f"list in oracles.LARGE options that drive {name}'s exponent to ±100, or {{}}"


@pytest.mark.parametrize("name", LOSSES)
def test_defaults_are_the_published_settings(name):
    assert name in oracles.PUBLISHED, f"list in oracles.PUBLISHED the published settings of {name}"
    options = build(name).spec.options
    assert {key: options[key] for key in oracles.PUBLISHED[name]} == oracles.PUBLISHED[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_quick_setting(name):
    assert name in QUICK, f"list in contract/cases.py QUICK settings in which {name} acts within a few steps"


def test_tables_are_sorted():
    assert list(LOSSES) == sorted(LOSSES)
    assert list(STRATEGIES) == sorted(STRATEGIES)


@pytest.mark.parametrize("name", LOSSES)
def test_every_option_is_tried(name):
    """Each option is set away from its default in some setting, each word of a choice at least once."""
    hints = get_type_hints(LOSSES[name].__init__)
    for option, parameter in signature_of(LOSSES[name]).items():
        if option in SIZES | NOT_IN_THE_VALUE:
            continue
        tried = {repr(parameter.default)} | {repr(s[option]) for s in oracles.SETTINGS[name] if option in s}
        hint = hints[option]
        wanted = {repr(word) for word in get_args(hint)} if get_origin(hint) is Literal else set()
        assert wanted <= tried, f"{name}: {option} is never {wanted - tried}"
        assert len(tried) > 1, f"{name}: {option} is never anything but {parameter.default!r}"


@pytest.mark.parametrize("name", [*LOSSES, *STRATEGIES])
def test_the_signature_is_a_schema(name):
    """Every option is keyword-only, typed and has a default; a method without any builds from its bare name."""
    entry = {**LOSSES, **STRATEGIES}[name]
    hints = get_type_hints(entry.__init__)
    positional = [p for p in inspect.signature(entry).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in positional] == (["inner"] if name in STRATEGIES else [])
    for option, parameter in signature_of(entry).items():
        assert option in hints
        assert option in SIZES or parameter.default is not parameter.empty, f"{name}: {option} needs a default"
    assert build(name).spec.name == name


@pytest.mark.parametrize("name", [*LOSSES, *STRATEGIES])
def test_a_paper_class_is_final(name):
    entry = {**LOSSES, **STRATEGIES}[name]
    assert not entry.__subclasses__()
    assert entry.__mro__.index(Method) == 2


@pytest.mark.parametrize("name", [*LOSSES, *STRATEGIES])
def test_the_header_has_its_sections(name):
    entry = {**LOSSES, **STRATEGIES}[name]
    header = inspect.getdoc(importlib.import_module(entry.__module__))
    lines = header.splitlines()
    sections = [line for line in lines if line in (*SECTIONS, "Algorithm")]
    for section in (*SECTIONS, *(("Algorithm",) if name in STRATEGIES else ())):
        assert sections.count(section) == 1, f"{name}: the header needs one section {section}"
    assert "(" in header[: header.index("Symbols")], f"{name}: equations are numbered"


@pytest.mark.parametrize("name", LOSSES)
def test_how_a_batch_is_made(name):
    """Pair losses need several images per class; for proxy losses that depends on the paper."""
    m = build(name)
    assert m.images_per_class >= (2 if m.proxies is None else 0)
