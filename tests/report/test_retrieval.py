"""Pairs, classes and confusions of the test set against naive loops."""

import numpy as np
import pytest
import torch

from nearkin.report.retrieval import class_rows, find_confusions, pair_similarities, positive_pairs, separation
from nearkin.space import Space

RNG = np.random.default_rng(3)
LABELS = np.array([0, 1, 0, 2, 1, 0, 2, 2, 3, 1, 3, 0])
POINTS = RNG.normal(size=(12, 3))


def naive_similarity(x, y, space):
    if space == "cosine":
        return x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    if space == "inner":
        return x @ y
    return 1 - ((x - y) ** 2).sum() / 2


@pytest.mark.parametrize("space", [Space.COSINE, Space.INNER, Space.EUCLIDEAN])
def test_all_pairs_against_two_loops(make_run, space):
    found = pair_similarities(make_run(POINTS, LABELS, space=space))
    positive, negative = [], []
    for i in range(12):
        for j in range(12):
            if i != j:
                (positive if LABELS[i] == LABELS[j] else negative).append(naive_similarity(POINTS[i], POINTS[j], space))
    assert found.complete
    assert np.sort(found.positive) == pytest.approx(np.sort(positive))
    assert np.sort(found.negative) == pytest.approx(np.sort(negative))
    chance = np.mean([(a > b) + 0.5 * (a == b) for a in positive for b in negative])
    assert found.separation == pytest.approx(chance)


def test_ties_count_half():
    assert separation(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert np.isnan(separation(np.array([]), np.array([1.0])))


def test_pairs_join_queries_and_gallery_but_never_an_image_with_itself():
    labels = torch.tensor([0, 0, 0, 1, 1, 0])
    query, gallery = torch.tensor([0, 3]), torch.tensor([1, 0, 4, 5])  # row 0 is on both sides
    q, g, whole = positive_pairs(labels, query, gallery, limit=100, rng=torch.Generator())
    assert whole
    assert sorted(zip(q.tolist(), g.tolist(), strict=True)) == [(0, 1), (0, 5), (3, 4)]


def test_a_sample_of_positive_pairs_is_reproducible():
    labels = torch.arange(40) % 4
    rows = torch.arange(40)
    first, second = (
        positive_pairs(labels, rows, rows, limit=50, rng=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert not first[2]
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert len(first[0]) == 50
    assert torch.equal(labels[first[0]], labels[first[1]])
    assert not (first[0] == first[1]).any()


def test_many_negative_pairs_are_sampled(make_run):
    labels = np.arange(60) % 6
    one = make_run(RNG.normal(size=(60, 3)), labels)
    found, again = (pair_similarities(one, limit=200) for _ in range(2))
    assert 100 < len(found.negative) <= 200
    assert np.array_equal(found.negative, again.negative)
    assert not found.complete
    assert len(found.positive) == 200


def test_confusions_against_a_loop(make_run):
    run = make_run(POINTS, LABELS)
    counts = {}
    for i in range(12):
        s = [naive_similarity(POINTS[i], POINTS[j], "cosine") if j != i else -9 for j in range(12)]
        other = LABELS[int(np.argmax(s))]
        if other != LABELS[i]:
            counts[LABELS[i], other] = counts.get((LABELS[i], other), 0) + 1
    found = find_confusions(run)
    assert {(c.label, c.other): c.times for c in found} == counts
    assert [c.times for c in found] == sorted(counts.values(), reverse=True)
    for c in found:
        assert c.share == pytest.approx(100 * c.times / (c.label == LABELS).sum())
        assert LABELS[c.query] == c.label
        assert LABELS[c.found] == c.other


def test_a_class_with_one_image_has_no_find_confusions(make_run):
    found = find_confusions(make_run(POINTS[:5], np.array([0, 0, 1, 1, 2])))
    assert all(c.label != 2 for c in found)


def test_classes_come_hardest_first(make_run):
    run = make_run(POINTS, LABELS)
    rows = class_rows([[run], [make_run(POINTS[::-1].copy(), LABELS, name="other")]])
    means = [np.mean([each["MAP@R"] for each in row.scores]) for row in rows]
    assert means == sorted(means)
    assert {row.name: row.queries for row in rows} == {"class 0": 4, "class 1": 3, "class 2": 3, "class 3": 2}
    for row in rows:
        values = run.values["R@1"][torch.tensor(row.label == LABELS)]
        assert row.scores[0]["R@1"] == pytest.approx(float(values.mean()))
        worst = [c for c in find_confusions(run) if c.label == row.label]
        assert row.confused_with == (f"class {worst[0].other}" if worst else "")
