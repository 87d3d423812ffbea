"""What strategies ask of their inner loss: that it has proxies or that it has none, and its value at other proxies."""

from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Strategy
from nearkin.methods.proxies import Proxies
from nearkin.methods.relation import relate
from nearkin.space import Space


def require_pairs(inner: Loss, strategy: str) -> None:
    """Refuse a loss with proxies."""
    if inner.proxies is not None:
        raise NearkinError(f"{strategy} needs a loss on pairs of samples; {_name(inner)} compares with proxies.")


def require_proxies(inner: Loss, strategy: str) -> Proxies:
    """The proxies of the inner loss; refuse a loss without any."""
    if inner.proxies is None:
        raise NearkinError(f"{strategy} needs a loss with proxies; {_name(inner)} has none.")
    if inner.proxies.samples:
        raise NearkinError(f"{strategy} works on the proxies of all classes: leave out sample_rate.")
    return inner.proxies


def _name(inner: Loss) -> str:
    return inner.spec.name or "this one"


def _proxies(strategy: Strategy) -> Proxies:
    assert strategy.inner.proxies is not None
    return strategy.inner.proxies


inner_proxies = property(_proxies, doc="The proxies of the inner loss.")
"""For strategies that have none of their own: `proxies = inner_proxies`."""


def objective_at(vectors: Tensor, inner: Loss, x: Tensor, y: Tensor, space: Space) -> Tensor:
    """The inner loss of a batch, with its proxies at `vectors`."""
    assert inner.proxies is not None
    references = inner.proxies.references()._replace(vectors=vectors)
    return inner.objective(relate(x, y, references, space))
