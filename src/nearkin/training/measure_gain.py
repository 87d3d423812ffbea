"""Measure whether training helped: compare the values of all test queries before and after it.

Those before training are kept in the run folder, so that a resumed run knows them, too.
"""

from pathlib import Path

import torch
from torch import Tensor

from nearkin import ranks
from nearkin.evaluation import evaluate_under, parse_metric, protocol_of
from nearkin.evaluation.statistics import paired_bootstrap
from nearkin.files import read_tensors, write_tensors
from nearkin.training.gain import Gain
from nearkin.training.images import Embedded
from nearkin.training.plan import Plan

RESAMPLES = 2000


def compared_metric(plan: Plan) -> str | None:
    """Return the metric to compare by: the one that selects the epoch, or another that has a value for each query."""
    return next((name for name in (plan.select_by, *plan.metrics) if parse_metric(name).per_query), None)


def write_values(path: Path, embedded: Embedded) -> None:
    """Keep the values of all queries."""
    if metric := compared_metric(embedded.model.plan):
        values = _values(embedded, metric)
        if ranks.is_first():
            write_tensors(path, {"values": values}, {"metric": metric})
        ranks.barrier()  # others read the file


def gain_since(path: Path, embedded: Embedded) -> Gain | None:
    """Compare with the values that were kept; None if there are none, as in runs of older versions."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    before, after = tensors["values"], _values(embedded, about["metric"])
    if len(before) != len(after):
        return None
    labels = embedded.images.labels[protocol_of(embedded.images).query]
    found = paired_bootstrap(after.numpy(), before.numpy(), groups=labels.numpy(), resamples=RESAMPLES)
    ends = (found.low, found.high) if found.n > 1 else (None, None)
    return Gain(about["metric"], found.n, float(before.nanmean()), float(after.nanmean()), *ends)


def _values(embedded: Embedded, metric: str) -> Tensor:
    x, images, model = embedded
    labels, space = images.labels.to(x.device), model.space
    with torch.no_grad():
        found = evaluate_under(
            protocol_of(images), x, labels, metrics=[metric], per_query=True, space=space, over_ranks=True
        )
    return found[metric]
