"""Votes of neighbours, mixed classes and isolation, on neighbours written by hand."""

import pytest
import torch

from nearkin.evaluation.suspects import Neighbours, confused_pairs, isolation, label_votes


def neighbours(rows, s=None):
    rows = torch.tensor(rows)
    return Neighbours(rows, torch.full(rows.shape, 0.5) if s is None else torch.tensor(s))


def test_equally_near_neighbours_have_equal_votes():
    labels = torch.tensor([0, 0, 1, 1, 2])
    votes = label_votes(neighbours([[1, 2, 3, 4]] + [[0, 0, 0, 0]] * 4), labels)
    assert votes.own[0] == pytest.approx(0.25)
    assert votes.other[0] == pytest.approx(0.5)
    assert votes.label[0] == 1


def test_nearer_neighbours_count_more():
    labels = torch.tensor([0, 1, 2, 2])
    votes = label_votes(neighbours([[1, 2, 3]] + [[0, 0, 0]] * 3, [[0.9, 0.2, 0.1]] + [[0.5] * 3] * 3), labels)
    assert votes.label[0] == 1
    assert votes.other[0] > 0.7


def test_missing_neighbours_do_not_vote():
    labels = torch.tensor([0, 0, 1])
    votes = label_votes(neighbours([[1, -1], [-1, -1], [0, 1]]), labels)
    assert votes.own.tolist() == pytest.approx([1, 0, 0])
    assert votes.other.tolist() == pytest.approx([0, 0, 1])
    assert votes.label.tolist() == [0, 0, 0]


def test_only_classes_mixed_both_ways_are_a_pair():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    found = neighbours([[1, 2], [0, 3], [0, 3], [1, 2], [0, 5], [1, 4]])  # 0 and 1 mix; 2 leans on 0, not back
    (pair,) = confused_pairs(found, labels, least=0.25)
    assert (pair.first, pair.second) == (0, 1)
    assert pair.both_ways == pytest.approx(0.5)
    assert confused_pairs(found, labels, least=0.6) == []


def test_a_far_image_is_isolated():
    s = torch.linspace(0.7, 0.8, 9)[:, None].expand(9, 2)
    found = Neighbours(torch.zeros(10, 2, dtype=torch.int64), torch.cat([s, torch.tensor([[0.1, 0.0]])]))
    far = isolation(found)
    assert int(far.argmax()) == 9
    assert far[9] > 10
    assert far[:9].abs().max() < 3
