"""Pairs and triplets that were mined elsewhere, as the pairs of a relation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.relation import Relation


def with_pairs(r: Relation, indices: Sequence[Tensor]) -> Relation:
    """The relation with no other pairs than (a, p) and (b, n) of `indices`: a, p, b, n, or a, p, n with b = a."""
    a, p, b, n = _checked(r, indices)
    return r._replace(pos=_mask(r.pos, a, p), neg=_mask(r.neg, b, n))


def with_triplets(r: Relation, indices: Sequence[Tensor]) -> Relation:
    """The relation with one row per triplet a, p, n, of one positive and one negative; of pairs, as `with_pairs`."""
    if len(indices) != 3:
        return with_pairs(r, indices)
    a, p, _, n = _checked(r, indices)
    row = torch.arange(len(a), device=a.device)
    pos, neg = (_mask(r.pos.new_zeros(len(a), r.pos.shape[1]), row, column) for column in (p, n))
    return r._replace(s=r.s[a], pos=pos, neg=neg, rows=r.rows[a], x=r.x[a])


def _mask(like: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch.zeros_like(like).index_put((rows, columns), like.new_ones(()))


def _checked(r: Relation, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, p, b, n, after a check of their number, their lengths and, on a CPU, their values."""
    if len(indices) not in (3, 4) or not all(isinstance(t, Tensor) and t.ndim == 1 for t in indices):
        raise NearkinError("indices are three tensors (anchors, positives, negatives) or four (a, p, b, n).")
    a, p, b, n = (t.long() for t in (indices if len(indices) == 4 else (*indices[:2], indices[0], indices[2])))
    if len(a) != len(p) or len(b) != len(n):
        raise NearkinError(f"indices of one pair have one place each: got lengths {[len(t) for t in indices]}.")
    for name, which, limit in (("samples", (a, b), r.s.shape[0]), ("references", (p, n), r.s.shape[1])):
        for t in which:
            if len(t) and not t.is_cuda and not torch.compiler.is_compiling() and not 0 <= t.min() <= t.max() < limit:
                raise NearkinError(
                    f"indices of {name} run from 0 to {limit - 1}; got {int(t.min())} to {int(t.max())}."
                )
    return a, p, b, n
