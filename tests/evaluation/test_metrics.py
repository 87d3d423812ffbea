"""Metrics as functions of ranks: Table 3 of the MPA paper, names, means by class."""

import math

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.evaluation import by_class, evaluate, parse_metric
from nearkin.evaluation.metrics import depth_of
from nearkin.evaluation.positive_ranks import BEYOND, Depth, Ranks

# Table 3 of Multi Proxy Anchor: four relevant items; which of the ten nearest are, and what that scores. All 25 values
# agree with the definitions; the printed ones are rounded to a tenth (MAP@10 of the fourth row is 24.952…).
COLUMNS = ("R@10", "P@10", "MAP@R", "MAP@10", "nDCG@10")
TABLE_3 = [
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 0], (100, 10, 25.0, 10.0, 39.0)),
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], (100, 20, 25.0, 12.0, 50.3)),
    ([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], (100, 20, 41.7, 16.7, 58.6)),
    ([1, 0, 1, 0, 0, 0, 1, 0, 0, 1], (100, 40, 41.7, 25.0, 82.9)),
    ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], (100, 40, 100.0, 40.0, 100.0)),
]


@pytest.mark.parametrize(("found", "printed"), TABLE_3)
def test_table_3_from_ranks(found: list[int], printed: tuple[float, ...]) -> None:
    places = [i + 1 for i, hit in enumerate(found) if hit]
    ranks = Ranks(torch.tensor([places + [BEYOND] * (4 - len(places))]), torch.tensor([4]))
    for name, value in zip(COLUMNS, printed, strict=True):
        assert round(parse_metric(name).values(ranks).item(), 1) == value


@pytest.mark.parametrize(("found", "printed"), TABLE_3)
def test_table_3_from_embeddings(found: list[int], printed: tuple[float, ...]) -> None:
    labels = (
        found + [1] * (4 - sum(found)) + [0] * 5
    )  # the relevant items that were not found come right after place 10
    angle = torch.linspace(0.1, 3.0, len(labels))
    gallery = torch.stack([angle.cos(), angle.sin()], dim=1)
    scores = evaluate(
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([1]),
        gallery=gallery,
        gallery_labels=torch.tensor(labels),
        metrics=COLUMNS,
    )
    assert [round(scores[name], 1) for name in COLUMNS] == list(printed)


def test_ndcg_is_relative_to_the_best_of_the_first_k() -> None:
    ranks = Ranks(torch.tensor([[1, 2, 9]]), torch.tensor([3]))
    assert parse_metric("nDCG@2").values(ranks).item() == pytest.approx(100)
    best = 1 + 1 / math.log2(3) + 1 / 2
    assert parse_metric("nDCG@3").values(ranks).item() == pytest.approx(100 * (1 + 1 / math.log2(3)) / best)


def test_a_query_without_relevant_items_is_nan() -> None:
    ranks = Ranks(torch.tensor([[BEYOND], [1]]), torch.tensor([0, 1]))
    for name in ("R@1", "P@2", "P@R", "MAP@R", "MAP@2", "nDCG@2"):
        values = parse_metric(name).values(ranks)
        assert values[0].isnan()
        assert values[1] > 0


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("map@r", "MAP@R"),
        ("recall@10", "R@10"),
        ("Precision@5", "P@5"),
        ("nDGC@7", "nDCG@7"),
        ("nmi", "NMI"),
        ("R@0", "R@1"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(NearkinError, match=f"no metric '{name}'. Did you mean '{suggestion}'"):
        parse_metric(name)


@pytest.mark.parametrize("name", ["R@R", "nDCG@R", "R@", "R@-1", "R@1.5", "@1", "", "R@1 ", "wholly unlike"])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(NearkinError, match="There are: R@k"):
        parse_metric(name)


def test_depth() -> None:
    assert depth_of([parse_metric("R@8"), parse_metric("nDCG@3")]) == Depth(8, False)
    assert depth_of([parse_metric("P@R")]) == Depth(1, True)
    assert Depth(4, True).of(torch.tensor([2, 9])).tolist() == [4, 9]
    assert Depth(4, False).of(torch.tensor([2, 9])).tolist() == [4, 4]


def test_by_class() -> None:
    values = torch.tensor([100.0, 0.0, 50.0, math.nan, math.nan], dtype=torch.float64)
    classes, means = by_class(values, torch.tensor([2**40, 2**40, 7, 7, 3]))
    assert classes.tolist() == [3, 7, 2**40]
    assert means[0].isnan()
    assert means[1:].tolist() == [50.0, 50.0]
