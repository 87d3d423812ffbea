"""Covering radius and distances between classes, against plain loops and cases one sees."""

import math

import pytest
import torch
from methods.strategies import oracle_ccp
from nearkin.space import Space


from nearkin.studies import geometry as module
from nearkin.studies.geometry import covering_radii, geometry, inter_class_distance, proxy_spread


def cloud(seed, classes=5, dim=3):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (30,), generator=rng) * 7
    return torch.randn(30, dim, generator=rng, dtype=torch.float64), labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL, Space.EUCLIDEAN])
def test_both_numbers_are_those_of_plain_loops(seed, space):
    x, y = cloud(seed)
    found = geometry(x, y, space=space)
    points = space.project(x)
    assert found.radius == pytest.approx(oracle_ccp.covering_radius(points, y), rel=1e-9)
    assert found.between == pytest.approx(oracle_ccp.inter_class_distance(points, y), rel=1e-6)


def test_blocks_do_not_matter(monkeypatch):
    x, y = cloud(0)
    whole = geometry(x, y)
    monkeypatch.setattr(module, "_AT_ONCE", 40)
    assert geometry(x, y) == pytest.approx(whole, rel=1e-9)


def test_classes_one_sees():
    """Two points at 4: radii 4 and 0. Three on a line: the middle covers at 3, then 1, 0. One point alone: 0."""
    x = torch.tensor([[0.0], [4.0], [10.0], [13.0], [14.0], [99.0]])
    y = torch.tensor([3, 3, 1, 1, 1, 0])
    torch.testing.assert_close(covering_radii(x, y), torch.tensor([0.0, 4 / 3, 2.0]))
    assert covering_radii(x[-1:], y[-1:]).tolist() == [0.0]


def test_distance_between_classes():
    x, y = torch.tensor([[0.0, 0], [0, 2], [3, 0]]), torch.tensor([0, 0, 1])
    assert inter_class_distance(x, y) == pytest.approx((3 + 13**0.5) / 2)
    assert math.isnan(inter_class_distance(x, torch.zeros(3, dtype=torch.int64)))


def test_tighter_classes_have_a_smaller_radius():
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 4, generator=rng).repeat_interleave(10, 0)
    noise, labels = torch.randn(60, 4, generator=rng), torch.arange(6).repeat_interleave(10)
    tight, loose = (geometry(centres + s * noise, labels, space="euclidean").radius for s in (0.1, 0.2))
    assert loose == pytest.approx(2 * tight, rel=1e-4)


def test_how_far_proxies_of_a_class_are_apart():
    v = torch.tensor([[0.0, 0], [3, 4], [100, 0], [100, 1]])
    assert proxy_spread(v, torch.tensor([0, 0, 1, 1])) == pytest.approx(3.0)
    assert math.isnan(proxy_spread(v, torch.arange(4))), "no class has two"
