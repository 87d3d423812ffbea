"""The grammar of methods, data sets, views and poolings: `name`, `name(key=value, …)`, `outer(inner, key=value)`.

Values are Python literals; a bare word is a string, so that `contrastive(form=c1)` needs no quotes in a shell.
"""

import ast
import difflib
import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from nearkin.errors import NearkinError

T = TypeVar("T")


class Call(NamedTuple):
    """A parsed spec: a name, the specs inside it, and its options."""

    name: str
    args: tuple["Call", ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 (never mutated: parse always makes a new one)

    def __str__(self) -> str:
        inside = [str(a) for a in self.args] + [f"{key}={value!r}" for key, value in self.options.items()]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


_KEYWORD = re.compile(rf"[(,]\s*({'|'.join(keyword.kwlist)})\s*=")  # as in f(lambda=20)


def parse(text: str) -> Call:
    """Parse a spec such as `xbm(contrastive(form=c1), size=1024)`."""
    try:
        return _call(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError:
        if word := _KEYWORD.search(text):
            raise NearkinError(f"Cannot read {text!r}: there is no option {word[1]!r}.") from None
        raise NearkinError(f"Cannot read {text!r}: write name(key=value, …), as in proxy_anchor(alpha=32).") from None
    except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
        raise NearkinError(f"Cannot read {text!r}: it holds bytes that are not UTF-8; type it again.") from None
    except (RecursionError, MemoryError):  # which of them depends on the nesting and on Python's version
        raise NearkinError(f"Cannot read {text[:40] + '…'!r}: it is nested too deeply; use fewer brackets.") from None


def _call(node: ast.expr, text: str) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise NearkinError(f"Cannot read {ast.unparse(node)!r} in {text!r}: expected a name or name(key=value, …).")
    options: dict[str, Any] = {}
    for option in node.keywords:
        if option.arg is None or option.arg in options:
            raise NearkinError(f"Cannot read {text!r}: write every option once, as key=value.")
        options[option.arg] = _value(option.value, text)
    return Call(node.func.id, tuple(_call(arg, text) for arg in node.args), options)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # not a literal, or a dictionary with a key that is not hashable
        raise NearkinError(
            f"Cannot read the value {ast.unparse(node)!r} in {text!r}: write a number, a word or a tuple."
        ) from None


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the most similar name, or nothing if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def look_up(name: str, table: Mapping[str, T], *, what: str) -> T:
    """Return an entry of a table, or raise an error that suggests the most similar name and lists all."""
    if name not in table:
        raise NearkinError(f"There is no {what} {name!r}.{nearest(name, table)} There are: {', '.join(sorted(table))}.")
    return table[name]


def option_names(function: Callable[..., Any]) -> list[str]:
    """Return the keyword-only arguments of a function or class: the signature is the schema."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def check_options(call: Call, function: Callable[..., Any], *, reserved: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a call, checked against the function; `reserved` arguments are not options."""
    known = [name for name in option_names(function) if name not in set(reserved)]
    hints = get_type_hints(vars(function)["__init__"] if isinstance(function, type) else function)
    for key, value in call.options.items():
        if key not in known:
            choices = f"It has: {', '.join(known)}." if known else "It has none."
            raise NearkinError(f"{call.name} has no option {key!r}.{nearest(key, known)} {choices}")
        if not fits(value, hints[key]):
            raise NearkinError(f"{call.name}: {key} must be {words(hints[key])}, not {value!r}.")
    return dict(call.options)


def resolve_options(call: Call, function: Callable[..., Any], *, reserved: Iterable[str] = ()) -> dict[str, Any]:
    """Return all options with the defaults of the signature, as a run's configuration stores them."""
    chosen = check_options(call, function, reserved=reserved)
    parameters = inspect.signature(function).parameters
    return {
        name: chosen.get(name, parameters[name].default) for name in option_names(function) if name not in set(reserved)
    }


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a hint; an int is also a float."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if isinstance(value, tuple) and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(fits, value, parts))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def words(hint: Any) -> str:
    """Describe a type hint for error messages."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(words(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return "a tuple" if get_args(hint)[-1] is Ellipsis else f"a tuple of {len(get_args(hint))}"
    names = {float: "a number", int: "a whole number", str: "a word", bool: "True or False", type(None): "None"}
    return names.get(hint, str(hint))
