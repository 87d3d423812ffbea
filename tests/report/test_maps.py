"""t-SNE maps: samples, layout and drawing."""

import numpy as np
import torch

from nearkin.report.maps import make_map, map_svg, sample_per_class, tsne

RNG = np.random.default_rng(3)


def test_a_sample_has_equally_many_of_each_class():
    labels = torch.arange(10).repeat_interleave(7)
    rows = sample_per_class(labels, points=30, classes=100, seed=0)
    assert torch.bincount(labels[rows], minlength=10).tolist() == [3] * 10
    few = sample_per_class(labels, points=30, classes=4, seed=0)
    assert sorted(torch.bincount(labels[few], minlength=10).tolist()) == [0] * 6 + [7] * 4
    assert torch.equal(few, sample_per_class(labels, points=30, classes=4, seed=0))
    assert len(few.unique()) == len(few)


def test_a_map_is_the_same_twice_and_keeps_clusters_together(make_run):
    labels = np.repeat(np.arange(4), 10)
    centres = np.eye(4) * 5
    run = make_run(
        centres[labels] + 0.1 * RNG.normal(size=(40, 4)), labels, proxies=np.concatenate([centres, -centres])
    )
    found = make_map(run)
    assert np.array_equal(found.positions, make_map(run).positions)
    assert found.positions.shape == (40, 2)
    assert found.proxies.shape == (8, 2)
    assert 0 <= found.positions.min() <= found.positions.max() <= 1
    of = run.images.labels[found.rows]
    d = np.linalg.norm(found.positions[:, None] - found.positions[None], axis=2)
    d[np.diag_indices(40)] = 9
    assert (of[d.argmin(1)] == of).all()
    near = np.linalg.norm(found.proxies[:4, None] - found.positions[None], axis=2).argmin(1)
    assert of[near].tolist() == [0, 1, 2, 3]


def test_few_or_equal_points_are_laid_out():
    assert tsne(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist() == [[1, 2], [4, 5]]
    assert tsne(np.array([[1.0], [2.0]])).tolist() == [[1, 0], [2, 0]]
    assert tsne(np.ones((9, 4))).shape == (9, 2)


def test_the_svg_has_one_named_group_per_class(make_run):
    labels = np.repeat(np.arange(3), 4)
    run = make_run(
        RNG.normal(size=(12, 3)), labels, names=("a", "<b>", "c"), proxies=RNG.normal(size=(2, 3)).astype(np.float32)
    )
    found = make_map(run)
    svg = map_svg(found, run.images.labels, run.images.names, title="a & b")
    assert svg.count('class="class ') == 3
    assert "<title>&lt;b&gt;</title>" in svg
    assert 'aria-label="a &amp; b"' in svg
    assert svg.count('class="proxies"') == 1
    assert svg.count("M") == 12 + 2
