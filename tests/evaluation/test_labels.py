"""Strings and several labels per item, class averages, and metrics of the whole ranking, against the oracle."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from evaluation import naive
from scipy import sparse
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.evaluation import Protocol, by_class, counting, evaluate, evaluate_under
from nearkin.evaluation import labels as labels_module
from nearkin.evaluation import positive_ranks as ranks_module
from nearkin.evaluation.labels import read_labels

METRICS = (*naive.METRICS, *naive.OF_ALL)


def made(count: int = 60, classes: int = 8, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Integer points, many of them tied, with labels of skewed frequency."""
    rng = torch.Generator().manual_seed(seed)
    skew = torch.rand(count, generator=rng) ** 2
    return torch.randint(-2, 3, (count, 4), generator=rng).float(), (skew * classes).long()


def sets_of(count: int = 60, labels: int = 9, *, seed: int = 0, chance: float = 0.15) -> list[set[int]]:
    """No label, one or several per item."""
    has = torch.rand(count, labels, generator=torch.Generator().manual_seed(seed)) < chance
    return [set(row.nonzero().flatten().tolist()) for row in has]


def as_matrix(sets: list[set[int]], labels: int = 9) -> Tensor:
    matrix = torch.zeros(len(sets), labels, dtype=torch.bool)
    for item, one in enumerate(sets):
        matrix[item, sorted(one)] = True
    return matrix


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(ours) == list(expected)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("classes", [40, 4])
def test_metrics_of_the_whole_ranking_agree_with_the_oracle(
    classes: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "FEW", few)
    x, y = made(classes=classes)
    expected = naive.per_query(x, y, x, y, list(range(60)), "inner", naive.OF_ALL)
    assert_same(evaluate(x, y, metrics=naive.OF_ALL, per_query=True, space="inner"), expected)
    q, g = slice(0, 20), slice(20, None)
    ours = evaluate(x[q], y[q], gallery=x[g], gallery_labels=y[g], metrics=METRICS, per_query=True, space="inner")
    assert_same(ours, naive.per_query(x[q], y[q], x[g], y[g], [-1] * 20, "inner", METRICS))


def test_full_map_and_mrr_agree_with_pytorch_metric_learning() -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    y = made(200, 30)[1]
    include = ("mean_average_precision", "mean_reciprocal_rank", "precision_at_1")
    unit = torch.nn.functional.normalize(x, dim=1)
    for by_classes in (False, True):
        theirs = AccuracyCalculator(include=include, avg_of_avgs=by_classes, device=torch.device("cpu"))
        expected = theirs.get_accuracy(unit, y)
        ours = evaluate(x, y, metrics=("MAP", "MRR", "R@1"), average="class" if by_classes else "query")
        for score, name in zip(ours.values(), include, strict=True):
            assert score / 100 == pytest.approx(expected[name], abs=1e-5)


def names(y: Tensor) -> list[str]:
    return [("ünïcode", "cat", "Cat", "dog", "", "10", "2")[label % 7] + "." * (label // 7) for label in y.tolist()]


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, lambda y: np.array(y, dtype=object), lambda y: np.array(y)[::1]]
)
def test_labels_may_be_strings(form: Any) -> None:
    x, y = made()
    metrics = ("R@1", "MAP@R", "NMI")
    assert evaluate(x, form(names(y)), metrics=metrics) == pytest.approx(evaluate(x, y, metrics=metrics))
    q, g = slice(0, 25), slice(25, None)  # the gallery lacks some classes and has others first
    ours = evaluate(
        x[q], form(names(y[q])), gallery=x[g], gallery_labels=form(names(y[g])), metrics=METRICS, per_query=True
    )
    assert_same(ours, evaluate(x[q], y[q], gallery=x[g], gallery_labels=y[g], metrics=METRICS, per_query=True))


def forms(sets: list[set[int]]) -> dict[str, Any]:
    matrix = as_matrix(sets)
    return {
        "sets": sets,
        "frozen sets of strings": tuple(frozenset(f"tag {label}" for label in one) for one in sets),
        "booleans": matrix,
        "integers": matrix.to(torch.uint8),
        "floats": matrix.float(),
        "numpy": matrix.numpy(),
        "lists": matrix.long().tolist(),
        "sparse": matrix.to_sparse(),
    }


@pytest.mark.parametrize("rows", [7, 64])
def test_several_labels_per_item_agree_with_the_oracle(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = made()
    sets = sets_of()
    assert any(not one for one in sets)
    assert any(len(one) > 2 for one in sets)
    monkeypatch.setattr(ranks_module, "_split_work", lambda *_: (2, rows))
    ours = evaluate(x, sets, metrics=METRICS, per_query=True, space="inner")
    assert_same(ours, naive.per_query(x, sets, x, sets, list(range(60)), "inner", METRICS))
    q, g = slice(0, 25), slice(25, None)
    sides = {"gallery": x[g], "gallery_labels": sets[g], "space": "inner"}
    ours = evaluate(x[q], sets[q], **sides, metrics=METRICS, per_query=True)
    assert_same(ours, naive.per_query(x[q], sets[q], x[g], sets[g], [-1] * 25, "inner", METRICS))


@pytest.mark.parametrize("form", forms([{0}]))
def test_several_labels_in_any_form(form: str) -> None:
    x, _ = made()
    sets, q, g = sets_of(), slice(0, 25), slice(25, None)
    labels = forms(sets)[form]
    assert_same(
        evaluate(x, labels, metrics=METRICS, per_query=True), evaluate(x, sets, metrics=METRICS, per_query=True)
    )
    sides = (forms(sets[q])[form], forms(sets[g])[form])
    ours = evaluate(x[q], sides[0], gallery=x[g], gallery_labels=sides[1], metrics=METRICS)
    assert ours == evaluate(x[q], sets[q], gallery=x[g], gallery_labels=sets[g], metrics=METRICS)


def test_sets_of_one_label_are_classes() -> None:
    x, y = made()
    one = [{label} for label in y.tolist()]
    assert_same(evaluate(x, one, metrics=METRICS, per_query=True), evaluate(x, y, metrics=METRICS, per_query=True))


def test_an_item_without_labels_is_left_out_and_found_by_none() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]])
    scores = evaluate(x, [{1}, set(), {1, 2}, {3}], metrics=("R@1", "MRR"))
    assert (scores.queries, scores.left_out) == (2, 2)
    assert scores == {"R@1": 0, "MRR": 50}
    labels, _ = read_labels([{1}, set(), {1, 2}, {3}])
    sides = ranks_module.Sides(x, labels, x, labels, torch.arange(4))
    assert ranks_module.count_relevant(sides).tolist() == [1, 0, 1, 0]


def test_a_protocol_takes_sets_and_strings() -> None:
    x, y = made()
    sets, query, gallery = sets_of(), torch.arange(0, 40), torch.arange(59, 19, -1)
    protocol = Protocol(query, gallery)
    ours = evaluate_under(protocol, x, sets, metrics=METRICS, per_query=True, space="inner")
    own = [(gallery == i).nonzero().flatten().tolist() for i in query.tolist()]
    expected = naive.per_query(
        x[query], sets[:40], x[gallery], [sets[i] for i in gallery], [o[0] if o else -1 for o in own], "inner", METRICS
    )
    assert_same(ours, expected)
    assert evaluate_under(protocol, x, names(y)) == evaluate_under(protocol, x, y)


def test_class_averages_agree_with_the_oracle() -> None:
    x, y = made(classes=30)
    sets = sets_of(labels=30, chance=0.08)
    for labels, plain in ((y, y.tolist()), (names(y), names(y)), (sets, sets)):
        values = evaluate(x, labels, per_query=True, metrics=METRICS)
        scores = evaluate(x, labels, metrics=METRICS, average="class")
        assert scores.left_out
        assert scores != evaluate(x, labels, metrics=METRICS)
        for name in METRICS:
            assert scores[name] == pytest.approx(naive.class_average(values[name].tolist(), plain))
    assert float(by_class(evaluate(x, y, per_query=True)["R@1"], y)[1].nanmean()) == pytest.approx(
        evaluate(x, y, average="class")["R@1"]
    )


X, Y = made(20, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": Y[:, None]}, r"shape of the labels of the embeddings is \(20, 1\)"),
        ({"labels": torch.stack([Y, Y], 1)}, "A matrix of labels holds a row per item, a column per label"),
        ({"labels": np.array([["a", "b"]] * 20)}, "A matrix of labels holds"),
        ({"labels": [[0, 1]] * 19 + [[1]]}, "A matrix of labels holds"),
        ({"labels": [{1}] * 19}, "20 rows and there are labels of 19"),
        ({"labels": [{1}] * 19 + [1]}, "cannot be read from list: give one integer or string per item"),
        ({"labels": [set()] * 20}, "No query has a relevant item"),
        ({"labels": names(Y), "gallery": X, "gallery_labels": Y}, "the embeddings cannot be read from list"),
        ({"labels": [{1}] * 20, "gallery": X, "gallery_labels": Y}, "the embeddings cannot be read from list"),
        ({"labels": Y, "gallery": X, "gallery_labels": torch.eye(4)[Y]}, "Only one of labels and gallery_labels has"),
        ({"labels": torch.eye(4)[Y], "gallery": X, "gallery_labels": torch.eye(5)[Y]}, "have 4 and 5 columns"),
        ({"labels": [{1}] * 20, "metrics": ("R@1", "NMI")}, "NMI needs one class per item"),
        ({"labels": Y, "average": "clas"}, 'no average \'clas\': it is "query" or "class"'),
        ({"labels": Y, "average": "class", "per_query": True}, "Values per query are not averaged"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(NearkinError, match=message):
        evaluate(X, **arguments)


def test_the_reciprocal_rank_is_of_the_whole_ranking() -> None:
    x = torch.cat([torch.tensor([[1.0, 0.0]]), torch.stack([torch.ones(50), torch.linspace(0.1, 2, 50)], 1)])
    y = torch.tensor([0] + [1] * 49 + [0])
    values = evaluate(x, y, metrics=("MRR", "MRR@49", "MRR@50"), per_query=True)
    assert [float(value[0]) for value in values.values()] == [2.0, 0.0, 2.0]
    assert not math.isnan(values["MRR"].sum())


def test_a_dense_product_finds_the_same_items_as_a_sparse_one(monkeypatch):
    rng = np.random.default_rng(0)
    queries, gallery = (labels_module.LabelSets(rng.random((n, 6)) < 0.3) for n in (30, 40))
    found = []
    for cost, kind in ((0, sparse.csr_matrix), (10**9, np.ndarray)):
        monkeypatch.setattr(labels_module, "SPARSE_COST", cost)
        transposed = gallery.transposed(queries)
        assert isinstance(transposed, kind)
        columns, counts = queries.sharing(transposed, torch.arange(5, 25))
        items = [set(row[kept].tolist()) for row, kept in zip(columns, counts, strict=True)]
        found.append((items, queries.count_sharing(gallery).tolist()))
    assert found[0] == found[1]
    assert [len(items) for items in found[0][0]] == found[0][1][5:25]
