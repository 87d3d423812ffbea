"""Protocols: which items are queries and which the gallery."""

from typing import NamedTuple

import pytest
import torch
from evaluation import naive
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.evaluation import Protocol, evaluate, evaluate_under, leave_self_out, protocol_of

RNG = torch.Generator().manual_seed(0)
X = torch.randn(60, 6, generator=RNG)
Y = torch.randint(9, (60,), generator=RNG)


class Items(NamedTuple):
    labels: Tensor
    query: Tensor | None = None
    gallery: Tensor | None = None


def mask(*ids: int) -> Tensor:
    return torch.zeros(60, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)


def test_without_masks_each_item_is_searched_among_the_others() -> None:
    scores = evaluate_under(protocol_of(Items(Y)), X, Y)
    assert scores == evaluate(X, Y)
    assert (scores.queries, scores.left_out) == (60, 0)


def test_with_masks_queries_are_searched_in_the_gallery() -> None:
    query, gallery = mask(*range(0, 40, 2)), mask(*range(1, 60, 2))
    ours = evaluate_under(protocol_of(Items(Y, query, gallery)), X, Y, per_query=True)
    expected = evaluate(X[query], Y[query], gallery=X[gallery], gallery_labels=Y[gallery], per_query=True)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("drop_self", [True, False])
def test_an_item_on_both_sides_does_not_find_itself(drop_self: bool) -> None:
    query, gallery = [3, 17, 4, 50], [50, 2, 3, 4, 10, 11, 12, 13]
    protocol = Protocol(torch.tensor(query), torch.tensor(gallery), drop_self)
    ours = evaluate_under(protocol, X, Y, metrics=naive.METRICS, per_query=True)
    own = [gallery.index(i) if i in gallery and drop_self else -1 for i in query]
    expected = naive.per_query(X[query], Y[query], X[gallery], Y[gallery], own, "cosine")
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, equal_nan=True)


def test_clustering_takes_each_item_of_the_protocol_once() -> None:
    protocol = Protocol(torch.arange(0, 40), torch.arange(20, 60))
    order = torch.cat([torch.arange(20), torch.arange(20, 60)])
    assert evaluate_under(protocol, X, Y, metrics=("NMI",)) == evaluate(X[order], Y[order], metrics=("NMI",))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (Items(Y, query=mask(1)), "Only one of query and gallery"),
        (Items(Y, gallery=mask(1)), "Only one of query and gallery"),
        (Items(Y, mask(1), mask(1) & mask(2)), "No item is marked as gallery"),
        (Items(Y, mask(1) & mask(2), mask(1)), "No item is marked as query"),
    ],
)
def test_half_a_protocol_is_refused(items: Items, message: str) -> None:
    with pytest.raises(NearkinError, match=message):
        protocol_of(items)


@pytest.mark.parametrize("ids", [[], [60], [-1], [1, 1]])
def test_ids_must_be_rows(ids: list[int]) -> None:
    with pytest.raises(NearkinError, match="rows 0 to 59"):
        evaluate_under(Protocol(torch.tensor(ids, dtype=torch.int64), leave_self_out(60).gallery), X, Y)
