"""TODO."""

from collections.abc import Callable, Mapping

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Method
from nearkin.space import Space
from nearkin.spec import Call, look_up, option_names, parse, resolve_options


def method(spec: str, *, classes: int, dim: int, space: str | None = None) -> Method:
    """Build a method from its spec, for `classes` training classes and `dim`-dimensional embeddings."""
    return _build(parse(spec), {"classes": classes, "dim": dim}, None if space is None else Space(space))


def _build(call: Call, given: Mapping[str, int], space: Space | None) -> Method:
    from nearkin.methods.losses import LOSSES  # here, since the tables' entries are built on this module
    from nearkin.methods.strategies import STRATEGIES

    table: dict[str, Callable[..., Method]] = {**LOSSES, **STRATEGIES}
    entry = look_up(call.name, table, what="method")
    options = resolve_options(call, entry, given=given)
    wanted = {name: value for name, value in given.items() if name in option_names(entry)}
    inner = [_build(arg, given, space) for arg in call.args]
    if call.name in LOSSES:
        if inner:
            raise NearkinError(f"{call.name} is a loss and takes no inner method; got {call.args[0]}.")
        built = entry(**options, **wanted)
    else:
        inner = inner or [_build(parse(STRATEGIES[call.name].natural_inner), given, space)]
        if len(inner) > 1 or not isinstance(inner[0], Loss):
            raise NearkinError(f"{call.name} takes one loss, as in {call.name}({STRATEGIES[call.name].natural_inner}).")
        built = entry(inner[0], **options, **wanted)
    if space is not None:
        built.space = space
    built.spec = Call(call.name, tuple(m.spec for m in inner), options)
    return built
