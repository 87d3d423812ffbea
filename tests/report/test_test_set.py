"""What a report says about test images, against naive loops: pairs, classes, confusions, the map."""

import numpy as np
import pytest
import torch

from nearkin.report.maps import layout, make_map, map_svg, some_of_each
from nearkin.report.pairs import kin_pairs, pair_similarities, separation
from nearkin.report.picture_sections import class_rows, confusions

RNG = np.random.default_rng(3)
LABELS = np.array([0, 1, 0, 2, 1, 0, 2, 2, 3, 1, 3, 0])
POINTS = RNG.normal(size=(12, 3))


def naive_similarity(x, y, space):
    if space == "cosine":
        return x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    if space == "inner":
        return x @ y
    return 1 - ((x - y) ** 2).sum() / 2


@pytest.mark.parametrize("space", ["cosine", "inner", "euclidean"])
def test_all_pairs_are_those_of_two_loops(made_study, space):
    found = pair_similarities(made_study(POINTS, LABELS, space=space))
    kin, strangers = [], []
    for i in range(12):
        for j in range(12):
            if i != j:
                (kin if LABELS[i] == LABELS[j] else strangers).append(naive_similarity(POINTS[i], POINTS[j], space))
    assert found.all_kin
    assert np.sort(found.kin) == pytest.approx(np.sort(kin))
    assert np.sort(found.strangers) == pytest.approx(np.sort(strangers))
    chance = np.mean([(a > b) + 0.5 * (a == b) for a in kin for b in strangers])
    assert found.separation == pytest.approx(chance)


def test_ties_count_half():
    assert separation(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert np.isnan(separation(np.array([]), np.array([1.0])))


def test_queries_meet_the_gallery_and_never_themselves():
    labels = torch.tensor([0, 0, 0, 1, 1, 0])
    query, gallery = torch.tensor([0, 3]), torch.tensor([1, 0, 4, 5])  # row 0 is on both sides
    q, g, whole = kin_pairs(labels, query, gallery, limit=100, rng=torch.Generator())
    assert whole
    assert sorted(zip(q.tolist(), g.tolist(), strict=True)) == [(0, 1), (0, 5), (3, 4)]


def test_a_sample_is_the_same_every_time_and_of_the_right_kind():
    labels = torch.arange(40) % 4
    rows = torch.arange(40)
    first, second = (kin_pairs(labels, rows, rows, limit=50, rng=torch.Generator().manual_seed(0)) for _ in range(2))
    assert not first[2]
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert len(first[0]) == 50
    assert torch.equal(labels[first[0]], labels[first[1]])
    assert not (first[0] == first[1]).any()


def test_strangers_are_sampled_where_there_are_many(made_study):
    labels = np.arange(60) % 6
    one = made_study(RNG.normal(size=(60, 3)), labels)
    found, again = (pair_similarities(one, limit=200) for _ in range(2))
    assert 100 < len(found.strangers) <= 200
    assert np.array_equal(found.strangers, again.strangers)
    assert not found.all_kin
    assert len(found.kin) == 200


def test_confusions_are_those_of_a_loop(made_study):
    study = made_study(POINTS, LABELS)
    counts = {}
    for i in range(12):
        s = [naive_similarity(POINTS[i], POINTS[j], "cosine") if j != i else -9 for j in range(12)]
        other = LABELS[int(np.argmax(s))]
        if other != LABELS[i]:
            counts[LABELS[i], other] = counts.get((LABELS[i], other), 0) + 1
    found = confusions(study)
    assert {(c.label, c.other): c.times for c in found} == counts
    assert [c.times for c in found] == sorted(counts.values(), reverse=True)
    for c in found:
        assert c.share == pytest.approx(100 * c.times / (c.label == LABELS).sum())
        assert LABELS[c.query] == c.label
        assert LABELS[c.found] == c.other


def test_a_query_without_kin_confuses_nobody(made_study):
    found = confusions(made_study(POINTS[:5], np.array([0, 0, 1, 1, 2])))
    assert all(c.label != 2 for c in found)


def test_classes_come_hardest_first(made_study):
    study = made_study(POINTS, LABELS)
    rows = class_rows([[study], [made_study(POINTS[::-1].copy(), LABELS, name="other")]])
    means = [np.mean([each["MAP@R"] for each in row.scores]) for row in rows]
    assert means == sorted(means)
    assert {row.name: row.queries for row in rows} == {"class 0": 4, "class 1": 3, "class 2": 3, "class 3": 2}
    for row in rows:
        own = study.values["R@1"][torch.tensor(row.label == LABELS)]
        assert row.scores[0]["R@1"] == pytest.approx(float(own.mean()))
        worst = [c for c in confusions(study) if c.label == row.label]
        assert row.taken_for == (f"class {worst[0].other}" if worst else "")


# The map.


def test_some_of_each_class_as_many_as_there_is_room_for():
    labels = torch.arange(10).repeat_interleave(7)
    rows = some_of_each(labels, points=30, classes=100, seed=0)
    assert torch.bincount(labels[rows], minlength=10).tolist() == [3] * 10
    few = some_of_each(labels, points=30, classes=4, seed=0)
    assert sorted(torch.bincount(labels[few], minlength=10).tolist()) == [0] * 6 + [7] * 4
    assert torch.equal(few, some_of_each(labels, points=30, classes=4, seed=0))
    assert len(few.unique()) == len(few)


def test_a_map_is_the_same_twice_and_keeps_clusters_together(made_study):
    labels = np.repeat(np.arange(4), 10)
    centres = np.eye(4) * 5
    study = made_study(
        centres[labels] + 0.1 * RNG.normal(size=(40, 4)), labels, proxies=np.concatenate([centres, -centres])
    )
    found = make_map(study)
    assert np.array_equal(found.places, make_map(study).places)
    assert found.places.shape == (40, 2)
    assert found.proxies.shape == (8, 2)
    assert 0 <= found.places.min() <= found.places.max() <= 1
    of = study.images.labels[found.rows]
    d = np.linalg.norm(found.places[:, None] - found.places[None], axis=2)
    d[np.diag_indices(40)] = 9
    assert (of[d.argmin(1)] == of).all()
    near = np.linalg.norm(found.proxies[:4, None] - found.places[None], axis=2).argmin(1)
    assert of[near].tolist() == [0, 1, 2, 3]


def test_few_points_and_none_apart_are_laid_out():
    assert layout(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist() == [[1, 2], [4, 5]]
    assert layout(np.array([[1.0], [2.0]])).tolist() == [[1, 0], [2, 0]]
    assert layout(np.ones((9, 4))).shape == (9, 2)


def test_the_drawing_has_a_group_a_class_and_names_in_it(made_study):
    labels = np.repeat(np.arange(3), 4)
    study = made_study(
        RNG.normal(size=(12, 3)), labels, names=("a", "<b>", "c"), proxies=RNG.normal(size=(2, 3)).astype(np.float32)
    )
    found = make_map(study)
    svg = map_svg(found, study.images.labels, study.images.names, title="a & b")
    assert svg.count('class="class ') == 3
    assert "<title>&lt;b&gt;</title>" in svg
    assert 'aria-label="a &amp; b"' in svg
    assert svg.count('class="proxies"') == 1
    assert svg.count("M") == 12 + 2
