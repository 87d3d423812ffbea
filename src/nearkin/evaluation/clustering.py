"""Clustering metrics: k-means on the embeddings with as many clusters as there are classes, compared with the classes.

NMI and AMI are scikit-learn's with arithmetic averaging. F1 is the pairwise one of the lifted-structure evaluation
(Song et al., Deep metric learning via lifted structured feature embedding, CVPR 2016): over all pairs of items, a pair
in one cluster is a true positive if both are of one class.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.space import Space

STARTS = 10
WORK = 20_000_000
"""Limit of items × clusters × starts: a problem beyond a tenth of it gets fewer than ten starts, but at least one."""


def cluster(points: Tensor, labels: Tensor, *, space: Space, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The class [N] and the cluster [N] of each point [N, D], with as many clusters as classes."""
    classes = np.unique(labels.cpu().numpy(), return_inverse=True)[1]
    return classes, k_means(space.project(points).cpu().numpy(), int(classes.max()) + 1, seed=seed)


def starts_for(items: int, clusters: int) -> int:
    """The number of k-means starts."""
    return max(1, min(STARTS, WORK // (items * clusters)))


def k_means(points: NDArray[Any], clusters: int, *, seed: int) -> NDArray[Any]:
    """The cluster of each point [N]: the best of several starts of scikit-learn's k-means, greedily seeded.

    The seeding (k-means++ with several candidates per centre) takes most of the time and decides the result: for
    classes of few items, random centres find half the same-class pairs that it finds, as does mini-batch k-means.
    """
    from sklearn.cluster import KMeans, kmeans_plusplus
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    exact = points.astype(np.float64)  # converted once here, not by the seeding for each centre

    def start(state: int) -> Any:
        centres, _ = kmeans_plusplus(exact, clusters, random_state=state)
        return KMeans(clusters, init=centres, n_init=1, random_state=state).fit(points)

    def start_on_one_core(state: int) -> Any:
        with threadpool_limits(1, user_api="openmp"):  # OpenMP's limit is per thread, BLAS's global
            return start(state)

    states = [int(state) for state in np.random.SeedSequence(seed).generate_state(starts_for(len(points), clusters))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: the score shows it
        if len(states) == 1:
            return np.asarray(start(states[0]).labels_)
        workers = min(len(states), torch.get_num_threads())
        # A start's products are small: one core per start. BLAS threads inside these threads could hang.
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
            fits = list(pool.map(start_on_one_core, states))
    return np.asarray(min(fits, key=lambda fit: fit.inertia_).labels_)


def pairwise_f1(classes: NDArray[Any], clusters: NDArray[Any]) -> float:
    """Harmonic mean of pair precision and pair recall, from the sizes of classes, clusters and their intersections."""

    def pairs(groups: NDArray[Any]) -> float:
        size = np.unique(groups, return_counts=True)[1].astype(np.float64)
        return float((size * (size - 1)).sum() / 2)

    both = pairs(classes.astype(np.int64) * (int(clusters.max()) + 1) + clusters)
    either = pairs(classes) + pairs(clusters)
    return 2 * both / either if either else 0.0


def _nmi(classes: NDArray[Any], clusters: NDArray[Any]) -> float:
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(classes, clusters))


def _ami(classes: NDArray[Any], clusters: NDArray[Any]) -> float:
    from sklearn.metrics import adjusted_mutual_info_score

    return float(adjusted_mutual_info_score(classes, clusters))


CLUSTERING: dict[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {"NMI": _nmi, "AMI": _ami, "F1": pairwise_f1}
"""Name → score from 0 to 1 of the classes [N] and the clusters [N]."""
