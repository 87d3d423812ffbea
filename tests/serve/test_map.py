"""The map: deterministic, similar items close together, computed once."""

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


def same_class_fraction(positions, labels):
    """The fraction of points whose nearest neighbour is of the same class."""
    labels = np.array(labels)
    distance = np.linalg.norm(positions[:, None] - positions[None], axis=2) + 1e9 * np.eye(len(positions))
    return (labels[distance.argmin(1)] == labels).mean()


def test_first_map_is_the_principal_components():
    x, _ = clusters()
    positions = maps.principal_components_map(x).positions
    centred = x - x.mean(0)
    u, s, _ = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    expected = u[:, :2] * s[:2]
    for axis in range(2):
        assert abs(np.corrcoef(positions[:, axis], expected[:, axis])[0, 1]) > 1 - 1e-9
    assert positions.min() >= 0
    assert positions.max() <= 1
    assert np.ptp(positions[:, 0]) == pytest.approx(1, abs=1e-6)


def test_classes_lie_together_and_the_map_is_deterministic():
    x, labels = clusters()
    first, second = maps.tsne_map(x, labels), maps.tsne_map(x, labels)
    assert first.method == "t-SNE"
    assert np.array_equal(first.positions, second.positions)
    assert same_class_fraction(first.positions, labels) == 1


def test_large_index_is_placed_between_landmarks(monkeypatch):
    monkeypatch.setattr(maps, "LANDMARKS", 60)
    x, labels = clusters(each=30)
    positions = maps.tsne_map(x, labels).positions
    assert len(positions) == 180
    assert same_class_fraction(positions, labels) > 0.98


def test_sample_has_the_same_fraction_of_every_class():
    labels = ["a"] * 700 + ["b"] * 200 + ["c"] * 100
    rows = maps.sample(labels, 100)
    chosen = [labels[row] for row in rows]
    assert [chosen.count(label) for label in "abc"] == pytest.approx([70, 20, 10], abs=1)
    assert len(set(rows.tolist())) == 100
    assert list(rows) == sorted(rows)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_map_of_few_points(count):
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    positions = maps.tsne_map(x, ["a"] * count).positions
    assert positions.shape == (count, 2)
    assert np.isfinite(positions).all()


def test_map_of_identical_points():
    positions = maps.tsne_map(np.ones((8, 5), np.float32), ["a"] * 8).positions
    assert np.isfinite(positions).all()


def test_map_is_cached_by_embeddings(tmp_path):
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


def test_server_gives_a_first_map_then_tsne(index, model, shown, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    with TestClient(make_app(index, model)) as client:
        first = client.get("/api/map").json()
        assert first["state"] == "drawing"
        while (last := client.get("/api/map").json())["state"] == "drawing":
            time.sleep(0.05)
    assert (first["method"], last["method"]) == ("principal components", "t-SNE")
    assert last["ids"] == [shown(item) for item in index.items().ids]
    assert [last["labels"][number] for number in last["label"]] == index.items().labels
    assert {len(last[column]) for column in ("x", "y", "ids", "label")} == {len(index)}
    assert last["total"] == len(index)
    assert last["x"] != first["x"]
