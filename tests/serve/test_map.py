"""The map: the same index gives the same places, kin lie together, and it is drawn once."""

import time

import numpy as np
import pytest
from starlette.testclient import TestClient

from nearkin.serve import make_app
from nearkin.serve import map as maps


def clusters(*, classes=6, each=20, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, dim))
    labels = np.repeat(np.arange(classes), each)
    x = (centres[labels] + 0.1 * rng.normal(size=(len(labels), dim))).astype(np.float32)
    return x, [str(label) for label in labels]


def part_of_kin(places, labels):
    """How many points have a nearest neighbour of their own class."""
    labels = np.array(labels)
    distance = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(len(places))
    return (labels[distance.argmin(1)] == labels).mean()


def test_principal_components_are_those_of_the_covariance():
    x, _ = clusters()
    places = maps.principal_components_map(x).positions
    centred = x - x.mean(0)
    u, s, _ = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    expected = u[:, :2] * s[:2]
    for axis in range(2):
        assert abs(np.corrcoef(places[:, axis], expected[:, axis])[0, 1]) > 1 - 1e-9
    assert places.min() >= 0
    assert places.max() <= 1
    assert np.ptp(places[:, 0]) == pytest.approx(1, abs=1e-6)


def test_kin_lie_together_and_the_map_repeats_itself():
    x, labels = clusters()
    first, second = maps.tsne_map(x, labels), maps.tsne_map(x, labels)
    assert first.method == "t-SNE"
    assert np.array_equal(first.positions, second.positions)
    assert part_of_kin(first.positions, labels) == 1


def test_a_large_index_lies_between_landmarks(monkeypatch):
    monkeypatch.setattr(maps, "LANDMARKS", 60)
    x, labels = clusters(each=30)
    places = maps.tsne_map(x, labels).positions
    assert len(places) == 180
    assert part_of_kin(places, labels) > 0.98


def test_a_sample_is_fair_to_every_class():
    labels = ["a"] * 700 + ["b"] * 200 + ["c"] * 100
    rows = maps.sample(labels, 100)
    chosen = [labels[row] for row in rows]
    assert [chosen.count(label) for label in "abc"] == pytest.approx([70, 20, 10], abs=1)
    assert len(set(rows.tolist())) == 100
    assert list(rows) == sorted(rows)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_few_points_have_a_map_too(count):
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    places = maps.tsne_map(x, ["a"] * count).positions
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()


def test_all_in_one_place_has_a_map_too():
    places = maps.tsne_map(np.ones((8, 5), np.float32), ["a"] * 8).positions
    assert np.isfinite(places).all()


def test_a_map_is_drawn_once_for_the_same_embeddings(tmp_path):
    x, _ = clusters(each=3)
    drawn = []

    def draw():
        drawn.append(1)
        return maps.principal_components_map(x)

    first, second = (maps.cached_map(x, draw, folder=tmp_path) for _ in range(2))
    assert np.array_equal(first.positions, second.positions)
    assert second.method == "principal components"
    assert len(drawn) == 1
    maps.cached_map(x + 1, draw, folder=tmp_path)
    assert len(drawn) == 2
    for path in (tmp_path / "maps").iterdir():
        path.write_bytes(b"damaged")
    maps.cached_map(x, draw, folder=tmp_path)
    assert len(drawn) == 3


def test_the_server_gives_a_rough_map_then_a_careful_one(index, model, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    with TestClient(make_app(index, model)) as client:
        first = client.get("/api/map").json()
        assert first["state"] == "drawing"
        while (last := client.get("/api/map").json())["state"] == "drawing":
            time.sleep(0.05)
    assert (first["method"], last["method"]) == ("principal components", "t-SNE")
    assert last["ids"] == index.items().ids
    assert [last["labels"][number] for number in last["label"]] == index.items().labels
    assert {len(last[column]) for column in ("x", "y", "ids", "label")} == {len(index)}
    assert last["total"] == len(index)
    assert last["x"] != first["x"]
