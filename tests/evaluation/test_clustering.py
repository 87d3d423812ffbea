"""Clustering metrics against scikit-learn and a naive count of pairs."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from nearkin.evaluation import clustering as cluster_module
from nearkin.evaluation import evaluate
from nearkin.evaluation.clustering import CLUSTERING, k_means, pairwise_f1, starts_for

RNG = torch.Generator().manual_seed(0)
X = torch.nn.functional.normalize(torch.randn(90, 6, generator=RNG), dim=1)
Y = torch.randint(12, (90,), generator=RNG) + 2**40


def naive_f1(classes: list[int], clusters: list[int]) -> float:
    both = one_class = one_cluster = 0
    for i, j in itertools.combinations(range(len(classes)), 2):
        one_class += classes[i] == classes[j]
        one_cluster += clusters[i] == clusters[j]
        both += classes[i] == classes[j] and clusters[i] == clusters[j]
    precision, recall = both / one_cluster, both / one_class
    return 2 * precision * recall / (precision + recall)


def test_scores_are_those_of_k_means_with_as_many_clusters_as_classes() -> None:
    scores = evaluate(X, Y, metrics=("F1", "R@1", "AMI", "NMI"), seed=3)
    clusters = k_means(X.numpy(), len(torch.unique(Y)), seed=3)
    assert list(scores) == ["F1", "R@1", "AMI", "NMI"]
    assert scores["NMI"] == pytest.approx(100 * normalized_mutual_info_score(Y.tolist(), clusters))
    assert scores["AMI"] == pytest.approx(100 * adjusted_mutual_info_score(Y.tolist(), clusters))
    assert scores["F1"] == pytest.approx(100 * naive_f1(Y.tolist(), clusters.tolist()))


def test_pairwise_f1_against_a_count_of_pairs() -> None:
    rng = np.random.default_rng(1)
    classes, clusters = rng.integers(5, size=60), rng.integers(9, size=60)
    assert pairwise_f1(classes, clusters) == pytest.approx(naive_f1(classes.tolist(), clusters.tolist()))
    assert pairwise_f1(classes, classes) == 1
    assert pairwise_f1(np.arange(4), np.arange(4)) == 0  # no pair of one class: nothing to find


def test_separate_classes_score_100_and_equal_vectors_little() -> None:
    labels = torch.arange(40) % 4
    centres = torch.eye(4)[labels]
    assert evaluate(centres, labels, metrics=tuple(CLUSTERING)) == pytest.approx({"NMI": 100, "AMI": 100, "F1": 100})
    scores = evaluate(torch.ones(40, 4), labels, metrics=tuple(CLUSTERING))
    assert scores["NMI"] == pytest.approx(0)
    assert scores["AMI"] == pytest.approx(0)
    assert scores["F1"] < 40


@pytest.mark.parametrize("work", [cluster_module.WORK, 0])
def test_k_means_is_seeded(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "WORK", work)
    first, again = (k_means(X.numpy(), 12, seed=5) for _ in range(2))
    assert (first == again).all()
    assert len(np.unique(first)) == 12
    assert any((k_means(X.numpy(), 12, seed=other) != first).any() for other in (6, 7, 8))


def inertia(clusters: np.ndarray) -> float:
    points = X.numpy().astype(np.float64)
    groups = [points[clusters == c] for c in np.unique(clusters)]
    return float(sum(((group - group.mean(0)) ** 2).sum() for group in groups))


def test_the_best_of_several_starts_is_as_good_as_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    best = [inertia(k_means(X.numpy(), 12, seed=seed)) for seed in range(4)]
    theirs = [KMeans(12, n_init=10, random_state=seed).fit(X.numpy()).inertia_ for seed in range(4)]
    assert np.mean(best) <= np.mean(theirs) * 1.02
    monkeypatch.setattr(cluster_module, "STARTS", 1)
    assert np.mean(best) < np.mean([inertia(k_means(X.numpy(), 12, seed=seed)) for seed in range(4)])


def test_large_problems_begin_less_often() -> None:
    sizes = ((5_924, 100), (8_131, 98), (20_000, 250), (26_830, 3_985), (60_502, 11_316))
    assert [starts_for(*size) for size in sizes] == [10, 10, 4, 1, 1]


@pytest.mark.parametrize("starts", [1, 2])
def test_threads_of_blas_do_not_meet_those_of_openmp(
    starts: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """OpenBLAS warns on the error stream that it may hang where it is to use threads within a parallel loop."""
    points = np.random.default_rng(0).standard_normal((3000, 64)).astype(np.float32)
    monkeypatch.setattr(cluster_module, "WORK", starts * 3000 * 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * starts)
    assert starts_for(3000, 60) == starts
    k_means(points, 60, seed=0)
    assert capfd.readouterr().err == ""


def test_clustering_takes_queries_and_gallery_together() -> None:
    apart = evaluate(X[:40], Y[:40], gallery=X[40:], gallery_labels=Y[40:], metrics=("NMI",), seed=2)
    assert apart["NMI"] == evaluate(X, Y, metrics=("NMI",), seed=2)["NMI"]


def test_clustering_alone_needs_no_query_that_counts() -> None:
    scores = evaluate(X[:5], torch.arange(5), metrics=("NMI",))
    assert (scores["NMI"], scores.queries, scores.left_out) == (pytest.approx(100), 0, 5)
