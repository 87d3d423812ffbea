"""Methods by name: build one from its spec, list all, print the header of one."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Method
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.space import Space
from nearkin.spec import Call, look_up, option_names, parse, resolve_options

METHODS: dict[str, type[Method]] = {**LOSSES, **STRATEGIES}


def method(
    spec: str | type[Method],
    *,
    inner: str | type[Method] | None = None,
    classes: int | None = None,
    dim: int | None = None,
    space: str | None = None,
    **options: Any,
) -> Method:
    """Build a method from its spec or its class, for `classes` training classes and `dim`-dimensional embeddings.

    Options are written in the spec, "proxy_anchor(alpha=16)", or as keywords, `method("proxy_anchor", alpha=16)` or
    `method(nk.losses.ProxyAnchor, alpha=16)`; `inner` is the loss of a strategy. Only methods with proxies or a memory
    need `classes` and `dim`. `space` (cosine, ball, ball_inner, euclidean or inner) replaces the one the method was
    published with.
    """
    call = _call(spec)
    if twice := sorted(call.options.keys() & options.keys()):
        raise NearkinError(f"{call.name} has {twice[0]} in its spec and as a keyword: give it once.")
    if inner is not None:
        if call.args:
            raise NearkinError(f"{call.name} has an inner method in its spec and as inner: give it once.")
        call = call._replace(args=(_call(inner),))
    call = call._replace(options={**call.options, **options})
    return _build(call, {"classes": classes, "dim": dim}, None if space is None else Space(space))


def _call(spec: str | type[Method]) -> Call:
    if isinstance(spec, str):
        return parse(spec)
    names = [name for name, entry in METHODS.items() if entry is spec]
    if not names:
        raise NearkinError(
            f"A method is a spec such as 'proxy_anchor(alpha=16)' or a class of nearkin.losses or nearkin.strategies, "
            f"not {spec!r}."
        )
    return Call(names[0])


def _build(call: Call, sizes: Mapping[str, int | None], space: Space | None) -> Method:
    entry: Callable[..., Method] = look_up(call.name, METHODS, what="method")
    options = resolve_options(call, entry, reserved=sizes)
    required = {name: value for name, value in sizes.items() if name in option_names(entry)}
    if missing := [name for name, value in required.items() if value is None]:
        raise NearkinError(
            f"{call.name} needs {' and '.join(missing)}, for its proxies or its memory: "
            f"method({call.name!r}, {', '.join(f'{name}=…' for name in missing)})."
        )
    inner = [_build(arg, sizes, space) for arg in call.args]
    if call.name in LOSSES:
        if inner:
            raise NearkinError(f"{call.name} is a loss and takes no inner method; got {call.args[0]}.")
        built = entry(**options, **required)
    else:
        inner = inner or [_build(parse(STRATEGIES[call.name].natural_inner), sizes, space)]
        if len(inner) > 1 or not isinstance(inner[0], Loss):
            raise NearkinError(f"{call.name} takes one loss, as in {call.name}({STRATEGIES[call.name].natural_inner}).")
        built = entry(inner[0], **options, **required)
    if space is not None:
        built.space = space
    built.spec = Call(call.name, tuple(m.spec for m in inner), options)
    built.written = call
    return built


def header(entry: type[Method]) -> str:
    """The docstring of the file that implements the paper."""
    module = inspect.getmodule(entry)
    return inspect.cleandoc(module.__doc__ or "") if module else ""


def citation(entry: type[Method]) -> str:
    """The header's first paragraph: short name and reference."""
    return " ".join(header(entry).split("\n\n")[0].split())


def sentence(entry: type[Method]) -> str:
    """What the method does: the header's second paragraph, or the class's docstring if the file has several methods."""
    several = sum(other.__module__ == entry.__module__ for other in METHODS.values()) > 1
    return inspect.getdoc(entry) or "" if several else " ".join(header(entry).split("\n\n")[1].split())


def kind(entry: type[Method]) -> str:
    """Proxy loss, pair loss or strategy."""
    if entry in STRATEGIES.values():
        return "strategy"
    return "proxy loss" if "per_class" in option_names(entry) else "pair loss"


def method_rows() -> list[list[str]]:
    """Name, kind and sentence of every method."""
    return [[name, kind(entry), sentence(entry)] for name, entry in sorted(METHODS.items())]


def method_page(name: str) -> str:
    """The header of a method, followed by its options and their defaults."""
    entry = look_up(name, METHODS, what="method")
    parameters = inspect.signature(entry).parameters
    options = [n for n in option_names(entry) if n not in ("classes", "dim")]
    lines = [f"    {n} = {parameters[n].default!r}" for n in options]
    return "\n".join([header(entry), "", "Options", *(lines or ["    none"])])
