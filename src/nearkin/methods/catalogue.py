"""The methods as text: the list, and the header of each one's file."""

import inspect

from nearkin.methods.base import Method
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.spec import look_up, option_names


def header(entry: type[Method]) -> str:
    """The docstring of the file beside the paper."""
    module = inspect.getmodule(entry)
    return inspect.cleandoc(module.__doc__ or "") if module else ""


def citation(entry: type[Method]) -> str:
    """The header's first paragraph: short name and reference."""
    return " ".join(header(entry).split("\n\n")[0].split())


def sentence(entry: type[Method]) -> str:
    """The header's second paragraph: what the method does."""
    return " ".join(header(entry).split("\n\n")[1].split())


def kind(entry: type[Method]) -> str:
    """Proxy loss, pair loss or strategy, by what the entry is built from."""
    if entry in STRATEGIES.values():
        return "strategy"
    return "proxy loss" if "per_class" in option_names(entry) else "pair loss"


def method_rows() -> list[list[str]]:
    """Name, kind and sentence of every method."""
    return [[name, kind(entry), sentence(entry)] for name, entry in sorted({**LOSSES, **STRATEGIES}.items())]


def method_page(name: str) -> str:
    """A method's header, and the options its signature has."""
    table: dict[str, type[Method]] = {**LOSSES, **STRATEGIES}
    entry = look_up(name, table, what="method")
    parameters = inspect.signature(entry).parameters
    options = [n for n in option_names(entry) if n not in ("classes", "dim")]
    lines = [f"    {n} = {parameters[n].default!r}" for n in options]
    return "\n".join([header(entry), "", "Options", *(lines or ["    none"])])
