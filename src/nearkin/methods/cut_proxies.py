"""Proxies cut between classes: of several ranks each holds those of some classes, with all that belongs to them.

A module names what it keeps per proxy in `per_proxy`: attribute → the dimension along which the proxies are. Everything
else is the same on all ranks. Files hold the proxies of all classes, so that any number of ranks can read them.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.methods.proxies import Proxies


def cut(method: nn.Module) -> None:
    """Keep the proxies of this rank's share of the classes, and what belongs to them."""
    found = [module for module in method.modules() if isinstance(module, Proxies)]
    if ranks.size() == 1:
        return
    if len(found) != 1:
        raise NearkinError("This method has no proxies that processes could share out: leave out cut_proxies.")
    (proxies,) = found
    if any(
        module is not proxies and any(True for _ in module.parameters(recurse=False)) for module in method.modules()
    ):
        raise NearkinError("This method trains more than its proxies, which cannot be cut: leave out cut_proxies.")
    if proxies.classes < ranks.size():
        raise NearkinError(
            f"The proxies of {proxies.classes} classes cannot be cut between {ranks.size()} processes: leave out "
            "cut_proxies."
        )
    proxies.held = ranks.share(proxies.classes)
    for module, name, dim in _per_proxy(method):
        held = getattr(module, name)
        part = _rows(held.detach(), proxies, dim).clone()
        if isinstance(held, nn.Parameter):
            setattr(module, name, nn.Parameter(part))
        else:
            module.register_buffer(name, part)


def _per_proxy(method: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    for module in method.modules():
        for name, dim in getattr(module, "per_proxy", {}).items():
            if isinstance(getattr(module, name, None), Tensor):
                yield module, name, dim


def _rows(t: Tensor, proxies: Proxies, dim: int) -> Tensor:
    return t.narrow(dim, proxies.rows.start, proxies.rows.stop - proxies.rows.start)


def _cut_proxies(method: nn.Module) -> Proxies | None:
    return next((m for m in method.modules() if isinstance(m, Proxies) and m.whole), None)


def cut_parameters(method: nn.Module) -> list[Tensor]:
    """The parameters of which this rank has only a part."""
    if _cut_proxies(method) is None:
        return []
    held = (getattr(module, name) for module, name, _ in _per_proxy(method))
    return [t for t in held if isinstance(t, nn.Parameter)]


def _dimensions(method: nn.Module) -> dict[str, int]:
    """The names in the state of what is cut, with their dimensions."""
    names = {id(module): prefix for prefix, module in method.named_modules()}
    return {f"{names[id(m)]}.{name}".removeprefix("."): dim for m, name, dim in _per_proxy(method)}


def joined(method: nn.Module, t: Tensor, dim: int = 0) -> Tensor:
    """A tensor with the proxies of all ranks along a dimension, in the memory of rank 0; elsewhere its own part."""
    proxies = _cut_proxies(method)
    if proxies is None:
        return t
    rows = [classes * proxies.per_class for classes in ranks.shares(proxies.classes)]
    return ranks.on_host_of_first(t.movedim(dim, 0), rows).movedim(0, dim)


def whole_state(method: nn.Module) -> dict[str, Tensor]:
    """The state of a method with the proxies of all ranks, on rank 0; elsewhere with its own."""
    state = method.state_dict()
    if _cut_proxies(method) is None:
        return state
    dimensions = _dimensions(method)
    return {name: joined(method, t, dimensions[name]) if name in dimensions else t for name, t in state.items()}


def same_on_all(method: nn.Module) -> list[Tensor]:
    """The tensors of the state that all ranks have alike."""
    dimensions = {} if _cut_proxies(method) is None else _dimensions(method)
    return [t for name, t in method.state_dict().items() if name not in dimensions]


def own_state(method: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the state of all proxies."""
    dimensions = _dimensions(method)
    return {name: own_part(method, t, dimensions[name]) if name in dimensions else t for name, t in state.items()}


def own_part(method: nn.Module, t: Tensor, dim: int = 0) -> Tensor:
    """This rank's part of a tensor with the proxies of all ranks along a dimension."""
    proxies = _cut_proxies(method)
    return t if proxies is None else _rows(t, proxies, dim)
