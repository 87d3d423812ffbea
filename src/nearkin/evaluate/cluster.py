"""Clustering metrics: k-means on the embeddings with as many clusters as there are classes, compared with the classes.

NMI and AMI are scikit-learn's with arithmetic averaging. F1 is the pairwise one of the lifted-structure evaluation
(Song et al., Deep metric learning via lifted structured feature embedding, CVPR 2016): over all pairs of items, a pair
in one cluster is a true positive if it is of one class.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.similarity import Space, project

MANY = 2_000_000
"""Items × clusters beyond which restarts and k-means++ seeding take minutes."""


def clustering_scores(
    points: Tensor, labels: Tensor, *, metrics: Iterable[str], space: Space, seed: int
) -> dict[str, float]:
    """The asked-for of NMI, AMI and F1, in percent, of k-means on the points [N, D] against their classes [N]."""
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    measures = {"NMI": normalized_mutual_info_score, "AMI": adjusted_mutual_info_score, "F1": pairwise_f1}
    classes = np.unique(labels.cpu().numpy(), return_inverse=True)[1]
    clusters = k_means(project(points, space).cpu().numpy(), int(classes.max()) + 1, seed=seed)
    return {name: 100 * float(measures[name](classes, clusters)) for name in metrics}


def k_means(points: NDArray[Any], clusters: int, *, seed: int) -> NDArray[Any]:
    """The cluster of each point [N]: best of ten k-means++ starts; one random start where the problem is large.

    Mini-batch k-means is no way out there: with thousands of clusters of a few items it finds half of what Lloyd finds.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    large = len(points) * clusters > MANY
    model = KMeans(clusters, init="random" if large else "k-means++", n_init=1 if large else 10, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: the score tells
        return np.asarray(model.fit_predict(points))


def pairwise_f1(classes: NDArray[Any], clusters: NDArray[Any]) -> float:
    """Harmonic mean of pair precision and pair recall, from the sizes of classes, clusters and their intersections."""

    def pairs(groups: NDArray[Any]) -> float:
        size = np.unique(groups, return_counts=True)[1].astype(np.float64)
        return float((size * (size - 1)).sum() / 2)

    both = pairs(classes.astype(np.int64) * (int(clusters.max()) + 1) + clusters)
    either = pairs(classes) + pairs(clusters)
    return 2 * both / either if either else 0.0
