"""`evaluate`: embeddings and labels in, percentages out; `evaluate_under`: the same for a data set's protocol.

A protocol is data: the ids of the queries, the ids of the gallery, and whether an item may find itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload
from typing import Protocol as Structure

import torch
from torch import Tensor

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.evaluation.clustering import cluster
from nearkin.evaluation.labels import Labels, LabelSets, read_labels
from nearkin.evaluation.metrics import (
    DEFAULT_METRICS,
    ClusteringMetric,
    RetrievalMetric,
    by_class,
    depth_of,
    parse_metric,
)
from nearkin.evaluation.positive_ranks import Sides, count_relevant, stream_ranks
from nearkin.space import Space, at_least_float32

Progress = Callable[[int, int], None]
Average = Literal["query", "class"]


class Scores(dict[str, float]):
    """Metric name → percent (0 to 100), the mean over the queries that count."""

    queries: int  # number of queries that count
    left_out: int  # number of queries without a relevant item, which do not count

    def __init__(self, values: dict[str, float], *, queries: int, left_out: int) -> None:
        super().__init__(values)
        self.queries, self.left_out = queries, left_out


@overload
def evaluate(
    embeddings: Tensor,
    labels: Labels,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Labels | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[False] = False,
    average: Average = "query",
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> Scores: ...
@overload
def evaluate(
    embeddings: Tensor,
    labels: Labels,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Labels | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[True],
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> dict[str, Tensor]: ...
def evaluate(
    embeddings: Tensor,
    labels: Labels,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Labels | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: bool = False,
    average: Average = "query",
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> Scores | dict[str, Tensor]:
    """Search each embedding [Q, D] among all others, or in a gallery [G, D], and score the ranking.

    `labels` are integers or strings, one per item. With several labels per item, two items are relevant to each other
    if they share at least one: give a list of sets, or a matrix [Q, L] with a one for each label an item has.

    `metrics` are names such as R@1, P@10, P@R, MAP@R, MAP@10, MAP, MRR, nDCG@10, NMI, AMI, F1. With `per_query` each
    retrieval metric is a tensor [Q] on the CPU, NaN where a query has no relevant item. Otherwise it is the mean over
    queries, or with `average="class"` the mean over classes of the mean over a class's queries. NMI, AMI and F1 cluster
    all items, queries and gallery together, by k-means seeded with `seed`. `progress` is called with (queries done,
    queries). With `over_ranks` the processes of a group share the work: all of them call this with the same arguments,
    and each gets what one process would get.
    """
    if (gallery is None) != (gallery_labels is None):
        raise NearkinError("A gallery needs its labels and gallery_labels need their gallery: give both or neither.")
    known, gallery_known = read_labels(labels, gallery_labels)
    x, y = checked(embeddings, known, what="embeddings", space=Space(space))
    if gallery is None:
        sides = Sides(x, y, x, y, torch.arange(len(y), device=x.device))
    else:
        v, z = checked(gallery, gallery_known, what="gallery", space=Space(space))
        if v.shape[1] != x.shape[1]:
            raise NearkinError(
                f"The embeddings have {x.shape[1]} dimensions and the gallery {v.shape[1]}: they must agree."
            )
        dtype = torch.promote_types(x.dtype, v.dtype)
        sides = Sides(x.to(dtype), y, v.to(x.device, dtype), z.to(x.device), torch.full((len(y),), -1, device=x.device))
    return score(
        sides,
        metrics=metrics,
        per_query=per_query,
        average=average,
        space=Space(space),
        seed=seed,
        progress=progress,
        over_ranks=over_ranks,
    )


def _dense(values: object, *, what: str, form: str = "a tensor or an array of numbers") -> Tensor:
    """A tensor without gradient, from a tensor, an array or nested lists."""
    try:
        t = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError):  # torch raises any of them, by the type and shape of the input
        kind = type(values).__name__
        raise NearkinError(f"The {what} cannot be read from {kind}: give {form}.") from None
    if t.layout != torch.strided:
        raise NearkinError(f"The {what} must not be sparse: call to_dense() on the tensor.")
    return t


def checked(embeddings: Tensor, labels: Any, *, what: str, space: Space = Space.COSINE) -> tuple[Tensor, Any]:
    """Embeddings [N, D] of float32 or float64 and labels of N items on one device, or a sentence on what is wrong.

    Labels are LabelSets, or become int64 [N].
    """
    v = _dense(embeddings, what=what)
    if v.ndim != 2 or not v.numel():
        raise NearkinError(
            f"The {what} must be a matrix, one row per item, and not empty: its shape is {tuple(v.shape)}."
        )
    y = labels if isinstance(labels, LabelSets) else _integers(labels, what=what)
    if len(y) != len(v):
        raise NearkinError(f"The {what} have {len(v)} rows and there are labels of {len(y)}: give labels for each row.")
    v = at_least_float32(v if v.is_cuda else v.cpu())
    # A row below the limit cannot overflow a product or a squared distance with another such row; NaN is not below it.
    limit = space.norm_limit(v.dtype, factors=2)
    bad = torch.cat([~(part.norm(dim=1) < limit) for part in torch.split(v, 8192)])
    if bad.any():
        raise NearkinError(
            f"The {what} hold NaN, infinite or overflowing values in {int(bad.sum())} of {len(v)} rows, "
            f"the first of them row {int(bad.nonzero()[0])}: look for a diverged model."
        )
    return v, y.to(v.device)


def _integers(labels: object, *, what: str) -> Tensor:
    """Labels [N] of int64."""
    y = _dense(labels, what=f"labels of the {what}", form="one integer or string per item")
    if y.ndim != 1:
        raise NearkinError(f"The shape of the labels of the {what} is {tuple(y.shape)}: give one label per row.")
    if y.is_floating_point() or y.is_complex():
        raise NearkinError(
            f"The labels of the {what} are {y.dtype}: give integers, since floats cannot tell large ids apart."
        )
    return y.long()


@torch.no_grad()
def score(
    sides: Sides,
    *,
    metrics: Sequence[str],
    per_query: bool,
    average: Average,
    space: Space,
    seed: int,
    progress: Progress | None,
    over_ranks: bool,
) -> Scores | dict[str, Tensor]:
    """Score checked sides: the values of each query, or their means and the clustering metrics."""
    asked = [parse_metric(name) for name in ([metrics] if isinstance(metrics, str) else metrics)]
    if not asked:
        raise NearkinError("No metric was asked for: name one, for example R@1.")
    retrieval = [metric for metric in asked if isinstance(metric, RetrievalMetric)]
    clustering = [metric for metric in asked if isinstance(metric, ClusteringMetric)]
    if per_query and clustering:
        raise NearkinError(f"{clustering[0].name} has no value per query: leave it out, or ask without per_query.")
    if clustering and isinstance(sides.query_labels, LabelSets):
        raise NearkinError(f"{clustering[0].name} needs one class per item, and these items have several labels.")
    if average not in get_args(Average):
        raise NearkinError(f'There is no average {average!r}: it is "query" or "class".')
    if per_query and average != "query":
        raise NearkinError("Values per query are not averaged: leave out average or per_query.")
    counted = int((count_relevant(sides) > 0).sum())
    if retrieval and not counted:
        raise NearkinError(
            "No query has a relevant item to find: some class needs another item, in the gallery if there is one."
        )
    values = {}
    if retrieval:
        values = _per_query(sides, retrieval, space=space, progress=progress, over_ranks=over_ranks)
    if per_query:
        return values
    scores = {name: _mean(value, sides.query_labels, average) for name, value in values.items()}
    if clustering:

        def clustered() -> dict[str, float]:
            found = cluster(*_all_items(sides), space=space, seed=seed)
            return {metric.name: metric.value(*found) for metric in clustering}

        scores |= ranks.on_first(clustered) if over_ranks else clustered()
    total = len(sides.query_labels)
    return Scores({metric.name: scores[metric.name] for metric in asked}, queries=counted, left_out=total - counted)


def _mean(values: Tensor, labels: Any, average: Average) -> float:
    """The mean over the queries that count, or over the classes of such queries; a query is in each of its classes."""
    if average == "class":
        rows, labels = labels.pairs() if isinstance(labels, LabelSets) else (slice(None), labels)
        values = by_class(values[rows], labels)[1]
    return float(values.nanmean())


def _per_query(
    sides: Sides, metrics: list[RetrievalMetric], *, space: Space, progress: Progress | None, over_ranks: bool
) -> dict[str, Tensor]:
    total = len(sides.query_labels)
    values = torch.zeros(len(metrics), total, dtype=torch.float64, device=sides.queries.device)
    done = 0
    for queries, found in stream_ranks(sides, space=space, depth=depth_of(metrics), over_ranks=over_ranks):
        for value, metric in zip(values, metrics, strict=True):
            value[queries] = metric.values(found)
        done += len(queries) * (ranks.size() if over_ranks else 1)
        if progress:
            progress(min(done, total), total)
    if over_ranks:
        values = ranks.total(values)  # each query is 0 on all ranks but one
    return dict(zip((metric.name for metric in metrics), values.cpu(), strict=True))


def _all_items(sides: Sides) -> tuple[Tensor, Tensor]:
    """Queries and gallery together, each item once, with their labels: papers cluster the whole test set."""
    alone = sides.self_row < 0
    if not alone.any():
        return sides.gallery, sides.gallery_labels
    return (
        torch.cat([sides.queries[alone], sides.gallery]),
        torch.cat([sides.query_labels[alone], sides.gallery_labels]),
    )


@dataclass(frozen=True)
class Protocol:
    """Which rows of the embeddings are queries and which are the gallery; an item may be in both, or in neither."""

    query: Tensor  # [Q] int64
    gallery: Tensor  # [G] int64
    drop_self: bool = True  # a query never finds itself in the gallery; False: it counts as another item there


class Labelled(Structure):
    """Labels, and masks if the data set names its queries and its gallery."""

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
    """Query/gallery if the images name both, else leave-self-out."""
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
    labels: Labels,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[False] = False,
    average: Average = "query",
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> Scores: ...
@overload
def evaluate_under(
    protocol: Protocol,
    embeddings: Tensor,
    labels: Labels,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: Literal[True],
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> dict[str, Tensor]: ...
def evaluate_under(
    protocol: Protocol,
    embeddings: Tensor,
    labels: Labels,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    per_query: bool = False,
    average: Average = "query",
    space: str = "cosine",
    seed: int = 0,
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> Scores | dict[str, Tensor]:
    """`evaluate` with embeddings [N, D] and labels [N] of all items; `per_query` in the order of protocol.query."""
    x, y = checked(embeddings, read_labels(labels)[0], what="embeddings", space=Space(space))
    sides = _sides(protocol, x, y)
    return score(
        sides,
        metrics=metrics,
        per_query=per_query,
        average=average,
        space=Space(space),
        seed=seed,
        progress=progress,
        over_ranks=over_ranks,
    )


def _sides(protocol: Protocol, x: Tensor, y: Any) -> Sides:
    query, gallery = (_checked_ids(ids, len(x)).to(x.device) for ids in (protocol.query, protocol.gallery))
    place = torch.full((len(x),), -1, device=x.device)
    if protocol.drop_self:
        place[gallery] = torch.arange(len(gallery), device=x.device)
    return Sides(_rows(x, query), y[query], _rows(x, gallery), y[gallery], place[query])


def _checked_ids(ids: Tensor, count: int) -> Tensor:
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= count or len(torch.unique(ids)) != len(ids):
        raise NearkinError(f"A protocol's ids must be some of the rows 0 to {count - 1}, each at most once.")
    return ids


def _rows(x: Tensor, ids: Tensor) -> Tensor:
    """The rows with these ids; x itself if they are all rows in order, to avoid copying a large gallery."""
    return x if len(ids) == len(x) and bool((ids == torch.arange(len(x), device=x.device)).all()) else x[ids]
