"""Retrieval scores: one pass for the ranks of the relevant items, many metrics as functions of them."""

from nearkin.evaluation.metrics import DEFAULT_METRICS, by_class, parse_metric
from nearkin.evaluation.scores import Progress, Protocol, Scores, evaluate, evaluate_under, leave_self_out, protocol_of

__all__ = [
    "DEFAULT_METRICS",
    "Progress",
    "Protocol",
    "Scores",
    "by_class",
    "evaluate",
    "evaluate_under",
    "leave_self_out",
    "parse_metric",
    "protocol_of",
]
