"""The grammar of specs, and the sentences it answers with."""

from typing import Literal

import pytest

from nearkin.errors import NearkinError
from nearkin.spec import Call, check_options, look_up, nearest, option_names, parse, resolve_options


class Thing:
    def __init__(
        self,
        first: int = 0,
        *,
        alpha: float = 32.0,
        count: int = 1,
        form: Literal["c1", "c2"] = "c2",
        warm: bool = False,
        name: str = "x",
        scale: tuple[float, float] = (0.08, 1.0),
        size: int | None = None,
        classes: int = 0,
    ) -> None: ...


def test_names_options_and_inner_specs():
    assert parse("proxy_anchor") == Call("proxy_anchor")
    assert parse("  proxy_anchor()  ") == Call("proxy_anchor")
    assert parse("proxy_anchor(alpha=32, delta=-1e-1)") == Call("proxy_anchor", (), {"alpha": 32, "delta": -0.1})
    text = "xbm(contrastive(form=c1), size=1024, weight=0.5)"
    assert parse(text) == Call("xbm", (Call("contrastive", (), {"form": "c1"}),), {"size": 1024, "weight": 0.5})


def test_an_option_that_python_has_as_a_word_of_its_own_is_named():
    with pytest.raises(NearkinError, match="there is no option 'lambda'"):
        parse("soft_triple(per_class=3, lambda=20)")


def test_values_are_literals_and_bare_words_are_strings():
    options = parse("f(a=word, b='two words', c=(0.08, 1), d=True, e=None, g=-3, h=[1, 2])").options
    assert options == {"a": "word", "b": "two words", "c": (0.08, 1), "d": True, "e": None, "g": -3, "h": [1, 2]}


@pytest.mark.parametrize("text", ["f", "f(a=1, b='w', c=(1, 2.5), d=None)", "o(i(x=1), n(m), y=2)"])
def test_a_call_prints_as_what_it_reads(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f(",
        "f(a=1",
        "f(1)",
        "f('inner')",
        "proxy-anchor",
        "f.g(a=1)",
        "f(a=1)(b=2)",
        "f(**x)",
        "f(*x)",
        "f(a=1, a=2)",
        "f(a=b+c)",
        "f(a=open('x'))",
        "f(a={[]: 1})",
        "f(a=__import__('os').getcwd())",
        "f\0",
        "lambda: 0",
        "[f]",
        "f(a='\udcff')",
        "\udcff",
        "f(" * 150 + "a=1" + ")" * 150 + ".b" * 5000,
        "f(" * 5000 + ")" * 5000,
        "f(a=" + "-" * 100_000 + "1)",
        "f(a=" + "1+" * 5000 + "x)",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_no_spec_is_refused_in_a_sentence(text):
    with pytest.raises(NearkinError, match=r"^Cannot read") as caught:
        parse(text)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_and_deep_nesting_are_named():
    with pytest.raises(NearkinError, match="bytes that are not UTF-8") as caught:
        parse("f(a='\udcff')")
    str(caught.value).encode()  # the sentence itself can be printed
    with pytest.raises(NearkinError, match="nested too deeply") as caught:
        parse("f(a=" + "-" * 100_000 + "1)")
    assert len(str(caught.value)) < 150


def test_nearest_names_only_what_is_near():
    assert nearest("proxy_ancor", ["contrastive", "proxy_anchor"]) == " Did you mean 'proxy_anchor'?"
    assert nearest("zzz", ["contrastive", "proxy_anchor"]) == ""
    assert nearest("zzz", []) == ""


def test_look_up_names_the_nearest_and_lists_what_there_is():
    table = {"proxy_nca": 1, "proxy_anchor": 2, "contrastive": 3}
    assert look_up("contrastive", table, what="method") == 3
    with pytest.raises(NearkinError) as caught:
        look_up("proxy_ancor", table, what="method")
    assert str(caught.value) == (
        "There is no method 'proxy_ancor'. Did you mean 'proxy_anchor'? "
        "There are: contrastive, proxy_anchor, proxy_nca."
    )


def test_options_are_the_keyword_only_arguments():
    assert option_names(Thing) == ["alpha", "count", "form", "warm", "name", "scale", "size", "classes"]


def test_an_unknown_option_names_the_nearest_and_lists_what_there_is():
    with pytest.raises(NearkinError) as caught:
        check_options(parse("thing(alhpa=1)"), Thing, reserved=["classes"])
    assert str(caught.value) == (
        "thing has no option 'alhpa'. Did you mean 'alpha'? It has: alpha, count, form, warm, name, scale, size."
    )


def test_what_the_program_fills_in_is_no_option():
    with pytest.raises(NearkinError, match="thing has no option 'classes'"):
        check_options(parse("thing(classes=3)"), Thing, reserved=["classes"])
    with pytest.raises(NearkinError, match="thing has no option 'first'"):
        check_options(parse("thing(first=3)"), Thing)


def test_a_function_without_options_says_so():
    def plain() -> None: ...

    with pytest.raises(NearkinError, match=r"^plain has no option 'a'\. It has none\.$"):
        check_options(parse("plain(a=1)"), plain)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("alpha=high", "thing: alpha must be a number, not 'high'."),
        ("alpha=True", "thing: alpha must be a number, not True."),
        ("alpha=None", "thing: alpha must be a number, not None."),
        ("count=1.5", "thing: count must be a whole number, not 1.5."),
        ("count=False", "thing: count must be a whole number, not False."),
        ("form=c3", "thing: form must be one of c1, c2, not 'c3'."),
        ("warm=1", "thing: warm must be True or False, not 1."),
        ("name=1", "thing: name must be a word, not 1."),
        ("scale=0.5", "thing: scale must be a tuple of 2, not 0.5."),
        ("scale=(1, 2, 3)", "thing: scale must be a tuple of 2, not (1, 2, 3)."),
        ("scale=(1, x)", None),
        ("size=x", "thing: size must be a whole number or None, not 'x'."),
        ("form=[]", "thing: form must be one of c1, c2, not []."),
    ],
)
def test_wrong_types_are_refused_in_words(option, sentence):
    with pytest.raises(NearkinError) as caught:
        check_options(parse(f"thing({option})"), Thing)
    assert sentence is None or str(caught.value) == sentence


@pytest.mark.parametrize(
    "option",
    ["alpha=1", "alpha=.5", "count=2", "form=c1", "warm=True", "name=y", "scale=(0, 1)", "size=None", "size=4"],
)
def test_right_types_pass(option):
    call = parse(f"thing({option})")
    assert check_options(call, Thing) == call.options


def test_resolved_options_hold_the_defaults_too():
    want = {"alpha": 32.0, "count": 5, "form": "c2", "warm": False, "name": "x", "scale": (0.08, 1.0), "size": None}
    assert resolve_options(parse("thing(count=5)"), Thing, reserved=["classes"]) == want


def test_tuples_of_any_length():
    def many(*, ks: tuple[int, ...] = ()) -> None: ...

    assert check_options(parse("many(ks=(1, 2, 3))"), many) == {"ks": (1, 2, 3)}
    with pytest.raises(NearkinError, match="ks"):
        check_options(parse("many(ks=(1, x))"), many)
