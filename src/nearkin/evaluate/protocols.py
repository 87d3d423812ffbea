"""Who is searched for where, as data: ids of the queries, ids of the gallery, and whether an item may find itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload
from typing import Protocol as Structure

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.evaluate.metrics import DEFAULT_METRICS
from nearkin.evaluate.ranks import Sides
from nearkin.evaluate.score import Progress, Scores, checked, score
from nearkin.similarity import Space


@dataclass(frozen=True)
class Protocol:
    """Ids are row numbers of the embeddings; an item may stand on both sides, or on none."""

    query: Tensor  # [Q] int64
    gallery: Tensor  # [G] int64
    drop_self: bool = True  # an item on both sides never finds itself; without it, it counts as two items


class Labelled(Structure):
    """What a protocol is made from: labels, and masks where the data set names its queries and its gallery."""

    @property
    def labels(self) -> Tensor: ...  # [N] int64
    @property
    def query(self) -> Tensor | None: ...  # [N] bool
    @property
    def gallery(self) -> Tensor | None: ...  # [N] bool


def leave_self_out(count: int) -> Protocol:
    """Each item is searched among all the others."""
    return Protocol(torch.arange(count), torch.arange(count))


def protocol_of(images: Labelled) -> Protocol:
    """Query/gallery where the images name both, else leave-self-out."""
    if images.query is None and images.gallery is None:
        return leave_self_out(len(images.labels))
    if images.query is None or images.gallery is None:
        raise NearkinError("Only one of query and gallery is marked: mark the items of both, or of neither.")
    protocol = Protocol(images.query.nonzero().flatten(), images.gallery.nonzero().flatten())
    for side, ids in (("query", protocol.query), ("gallery", protocol.gallery)):
        if not len(ids):
            raise NearkinError(f"No item is marked as {side}: mark some, or mark neither queries nor gallery.")
    return protocol


@overload
def evaluate_under(
    protocol: Protocol,
    embeddings: Tensor,
    labels: Tensor,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[False] = False,
    space: Space = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores: ...
@overload
def evaluate_under(
    protocol: Protocol,
    embeddings: Tensor,
    labels: Tensor,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[True],
    space: Space = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Tensor]: ...
def evaluate_under(
    protocol: Protocol,
    embeddings: Tensor,
    labels: Tensor,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: bool = False,
    space: Space = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores | dict[str, Tensor]:
    """As `evaluate`, from embeddings [N, D] and labels [N] of all items; `per_query` in the order of protocol.query."""
    x, y = checked(embeddings, labels, what="embeddings")
    sides = _sides(protocol, x, y)
    return score(sides, metrics=metrics, per_query=per_query, space=space, seed=seed, progress=progress)


def _sides(protocol: Protocol, x: Tensor, y: Tensor) -> Sides:
    query, gallery = (_checked_ids(ids, len(y)).to(y.device) for ids in (protocol.query, protocol.gallery))
    place = torch.full_like(y, -1)
    if protocol.drop_self:
        place[gallery] = torch.arange(len(gallery), device=y.device)
    own = place[query]
    return Sides(_rows(x, query), y[query], _rows(x, gallery), y[gallery], own)


def _checked_ids(ids: Tensor, count: int) -> Tensor:
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= count or len(torch.unique(ids)) != len(ids):
        raise NearkinError(
            f"A protocol's ids must be some of the rows 0 to {count - 1}, each at most once: check who made it."
        )
    return ids


def _rows(x: Tensor, ids: Tensor) -> Tensor:
    """Those rows; x itself where they are all of it, in order, since a large gallery is better not copied."""
    return x if len(ids) == len(x) and bool((ids == torch.arange(len(x), device=x.device)).all()) else x[ids]
