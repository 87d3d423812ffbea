"""All metrics by name, in percent. A retrieval metric is a short function of the ranks of a query's relevant items, a
clustering metric (NMI, AMI, F1; see `clustering`) one of the classes and the clusters found.

With r_1 < r_2 < … the ranks of the relevant items, R their number and k the search length (k = R in P@R and MAP@R):

    R@k     100 if r_1 ≤ k, else 0
    P@k     100 · #{j: r_j ≤ k} / k
    MAP@k   100 · Σ_{j: r_j ≤ k} (j / r_j) / k
    MAP     100 · Σ_j (j / r_j) / R             over the whole ranking
    MRR@k   100 / r_1 if r_1 ≤ k, else 0;       MRR over the whole ranking
    nDCG@k  100 · Σ_{j: r_j ≤ k} 1/log2(r_j + 1)  /  Σ_{i ≤ min(R, k)} 1/log2(i + 1)

P@k and MAP@k divide by k even where R < k: they cannot reach 100 then. nDCG@k can.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.evaluation.clustering import CLUSTERING
from nearkin.evaluation.counting import BEYOND
from nearkin.evaluation.positive_ranks import Depth, Ranks

WHOLE = BEYOND - 1
"""The search length of a metric of the whole ranking: larger than any gallery."""

DEFAULT_METRICS = ("R@1", "R@2", "R@4", "R@8", "P@R", "MAP@R", "nDCG@10")


class RetrievalMetric(NamedTuple):
    """A metric with a value per query, and its search length."""

    name: str
    function: Callable[[Ranks, Tensor], Tensor]
    k: int | None  # None: R, the number of the query's relevant items; WHOLE: all items
    per_query: bool = True

    def values(self, ranks: Ranks) -> Tensor:
        """Percent per query [B], float64; NaN where a query has no relevant item."""
        k = ranks.relevant if self.k is None else torch.full_like(ranks.relevant, self.k)
        ranks = ranks._replace(rank=ranks.rank[:, : self.k])  # the j-th item has at least rank j
        return torch.where(ranks.relevant > 0, 100 * self.function(ranks, k), torch.nan)


class ClusteringMetric(NamedTuple):
    """A metric of all items together."""

    name: str
    function: Callable[[NDArray[Any], NDArray[Any]], float]
    per_query: bool = False

    def value(self, classes: NDArray[Any], clusters: NDArray[Any]) -> float:
        """Percent, for the class and the cluster of each item [N]."""
        return 100 * float(self.function(classes, clusters))


Metric = RetrievalMetric | ClusteringMetric


def recall(ranks: Ranks, k: Tensor) -> Tensor:
    """1 if any of the k nearest is relevant."""
    return (ranks.rank[:, 0] <= k).double()


def precision(ranks: Ranks, k: Tensor) -> Tensor:
    """The fraction of the k nearest that is relevant."""
    return (ranks.rank <= k[:, None]).sum(1) / k.double()


def precision_at_hits(ranks: Ranks, k: Tensor) -> Tensor:
    """The sum of the precision at each relevant item among the k nearest."""
    j = torch.arange(1, ranks.rank.shape[1] + 1, device=k.device, dtype=torch.float64)
    return torch.where(ranks.rank <= k[:, None], j / ranks.rank, 0).sum(1)


def average_precision(ranks: Ranks, k: Tensor) -> Tensor:
    """The precision at each relevant item among the k nearest, summed and divided by k."""
    return precision_at_hits(ranks, k) / k


def full_average_precision(ranks: Ranks, k: Tensor) -> Tensor:
    """The mean precision at each relevant item."""
    return precision_at_hits(ranks, k) / ranks.relevant


def reciprocal_rank(ranks: Ranks, k: Tensor) -> Tensor:
    """One over the rank of the nearest relevant item if it is among the k nearest."""
    first = ranks.rank[:, 0].double()
    return torch.where(first <= k, 1 / first, 0)


def ndcg(ranks: Ranks, k: Tensor) -> Tensor:
    """The discounted gain of the k nearest over that of an ideal ranking."""
    gain = torch.where(ranks.rank <= k[:, None], _discount(ranks.rank), 0).sum(1)
    best = _discount(torch.arange(1, ranks.rank.shape[1] + 1, device=k.device)).cumsum(0)
    return gain / best[torch.minimum(ranks.relevant, k).clamp_min(1) - 1]


def _discount(rank: Tensor) -> Tensor:
    return 1 / torch.log2(rank.double() + 1)


_FAMILIES = {"R": recall, "P": precision, "MAP": average_precision, "MRR": reciprocal_rank, "nDCG": ndcg}
_TO_R = ("P@R", "MAP@R")
_OF_ALL = {"MAP": full_average_precision, "MRR": reciprocal_rank}
_LONG_NAMES = {"recall": "R", "precision": "P"}


def parse_metric(name: str) -> Metric:
    """The metric of that name: R@k, P@k, MAP@k, MRR@k, nDCG@k for any k from 1, P@R, MAP@R, MAP, MRR, NMI, AMI, F1."""
    if name in CLUSTERING:
        return ClusteringMetric(name, CLUSTERING[name])
    if name in _OF_ALL:
        return RetrievalMetric(name, _OF_ALL[name], WHOLE)
    found = re.fullmatch(r"(\w+)@([1-9][0-9]{0,8}|R)", name)
    if found and found[1] in _FAMILIES and (found[2] != "R" or name in _TO_R):
        return RetrievalMetric(name, _FAMILIES[found[1]], None if found[2] == "R" else int(found[2]))
    raise NearkinError(
        f"There is no metric {name!r}.{_suggestion(name)} There are: R@k, P@k, MAP@k, MRR@k and nDCG@k for any k "
        f"from 1, {', '.join(_TO_R)}, {', '.join(_OF_ALL)}, {', '.join(CLUSTERING)}."
    )


def _suggestion(name: str) -> str:
    """The nearest name that exists, ignoring case; "recall" and "precision" stand for R and P."""
    family, at, length = name.partition("@")
    k = length if re.fullmatch(r"[1-9][0-9]{0,8}", length) else "1"
    names = [f"{known}@{k}" for known in _FAMILIES] + [*_TO_R, *_OF_ALL, *CLUSTERING]
    lower = {known.lower(): known for known in names}
    asked = _LONG_NAMES.get(family.lower(), family) + at + length
    close = difflib.get_close_matches(asked.lower(), lower, n=1, cutoff=0.5)
    return f" Did you mean {lower[close[0]]!r}?" if close else ""


def depth_of(metrics: Iterable[RetrievalMetric]) -> Depth:
    """How far down the ranking these metrics look."""
    lengths = [m.k for m in metrics]
    return Depth(max((k for k in lengths if k is not None), default=1), None in lengths)


def by_class(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The class labels in ascending order [C] and the mean of their queries' values [C], NaN without any value."""
    classes, number = torch.unique(labels.to(values.device), return_inverse=True)
    counted = ~values.isnan()
    total = values.new_zeros(len(classes)).index_add_(0, number[counted], values[counted])
    return classes, total / number[counted].bincount(minlength=len(classes))
