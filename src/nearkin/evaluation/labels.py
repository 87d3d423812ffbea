"""Labels as `evaluate` reads them: one class per item, as integers or strings, or several labels per item.

With several labels per item, two items are relevant to each other if they share at least one label. An item without
any label is relevant to none.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from nearkin.errors import NearkinError

Labels: TypeAlias = (
    Tensor | NDArray[Any] | Sequence[int] | Sequence[str] | Sequence[AbstractSet[int]] | Sequence[AbstractSet[str]]
)
"""[N] integers or strings; or, for several labels per item, a set for each, or ones in a matrix [N, L] of zeros."""


SPARSE_COST = 600
"""A pair of items in a sparse product of label sets takes as long as so many multiplications in a dense one."""


class LabelSets:
    """Several labels per item: which of L labels each of N items has, as a sparse matrix of booleans."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = sparse.csr_matrix(matrix, dtype=bool)

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, items: Tensor) -> "LabelSets":
        return LabelSets(self.matrix[items.cpu().numpy()])

    def to(self, device: torch.device) -> "LabelSets":  # noqa: ARG002
        """Itself: label sets stay on the CPU."""
        return self

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The item and the label of each pair of an item and a label that it has, [P] each."""
        items, labels = self.matrix.nonzero()
        return torch.from_numpy(items.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))

    def transposed(self, queries: "LabelSets") -> Any:
        """The matrix [L, N], for `sharing` with those queries: sparse, or dense where that product is faster."""
        labels = self.matrix.shape[1]
        pairs = queries.matrix.sum(0) @ self.matrix.sum(0).T  # how many pairs share a label, over all labels
        if int(pairs.item()) * SPARSE_COST > len(queries) * len(self) * labels and len(self) * labels < 2**25:
            return self.matrix.T.astype(np.float32).toarray()
        return self.matrix.T.tocsr()

    def sharing(self, others: Any, items: Tensor) -> tuple[Tensor, Tensor]:
        """For B of the items the others that share a label [B, W], and which entries count [B, W].

        `others` is `transposed`. The entries that do not count repeat the first of the row, so that rows are as long.
        """
        found = _common(self[items].matrix, others)
        sizes = _sizes(found)
        indices = found.indices if sparse.issparse(found) else np.flatnonzero(found) % found.shape[1]
        counts = np.arange(max(1, sizes.max())) < sizes[:, None]
        columns = np.zeros(counts.shape, dtype=np.int64)
        columns[counts] = indices
        return torch.from_numpy(np.where(counts, columns, columns[:, :1])), torch.from_numpy(counts)

    def count_sharing(self, others: "LabelSets", block: int = 1024) -> Tensor:
        """The number of others that share a label with each item [N]."""
        transposed = others.transposed(self)
        parts = (self.matrix[start : start + block] for start in range(0, len(self), block))
        return torch.from_numpy(np.concatenate([_sizes(_common(part, transposed)) for part in parts]).astype(np.int64))


def _common(some: Any, others: Any) -> Any:
    """Which of the others [L, N] share a label with each item [B, L]: sparse or dense [B, N], as the others are."""
    return some @ others if sparse.issparse(others) else some.astype(np.float32).toarray() @ others > 0


def _sizes(found: Any) -> NDArray[Any]:
    """The number of entries in each row."""
    return np.diff(found.indptr) if sparse.issparse(found) else np.count_nonzero(found, axis=1)


def read_labels(labels: Labels, gallery_labels: Labels | None = None) -> tuple[Any, Any]:
    """Number strings, and read several labels per item; integers are returned as they are, to be checked elsewhere.

    Strings and labels of sets are numbered together, so that they agree between the queries and the gallery.
    """
    sides: list[Any] = [labels] if gallery_labels is None else [labels, gallery_labels]
    lists = [_as_list(side) for side in sides]
    if all(_all_of(items, (str,)) for items in lists):
        number = _numbered(label for items in lists for label in items)
        read: list[Any] = [torch.tensor([number[label] for label in items]) for items in lists]
    elif all(_all_of(items, (set, frozenset)) for items in lists):
        number = _numbered(label for items in lists for one in items for label in one)
        read = [_from_sets(items, number) for items in lists]
    else:
        read = [_from_matrix(side) if _is_matrix(side) else side for side in sides]
        kinds = {isinstance(side, LabelSets) for side in read}
        if len(kinds) > 1:
            raise NearkinError(
                "Only one of labels and gallery_labels has several labels per item: give both in the same form."
            )
        if kinds == {True} and len({side.matrix.shape[1] for side in read}) > 1:
            widths = " and ".join(str(side.matrix.shape[1]) for side in read)
            raise NearkinError(
                f"The labels and the gallery_labels have {widths} columns: one per label, the same ones."
            )
    return read[0], read[1] if gallery_labels is not None else None


def _as_list(labels: object) -> list[Any]:
    """The labels, if they come as a list or as an array of strings or objects; else nothing."""
    if hasattr(labels, "dtype") and not isinstance(labels, Tensor):  # an array, or a column of a table
        array = np.asarray(labels)
        return array.tolist() if array.ndim == 1 and array.dtype.kind in "OUT" else []
    return list(labels) if isinstance(labels, list | tuple) else []


def _all_of(items: list[Any], types: tuple[type, ...]) -> bool:
    return bool(items) and all(isinstance(item, types) for item in items)


def _numbered(labels: Iterable[Any]) -> dict[Any, int]:
    return {label: number for number, label in enumerate(dict.fromkeys(labels))}


def _from_sets(items: list[AbstractSet[Any]], number: dict[Any, int]) -> LabelSets:
    ends = np.cumsum([0, *map(len, items)])
    columns = np.fromiter((number[label] for one in items for label in one), dtype=np.int64, count=ends[-1])
    return LabelSets(sparse.csr_matrix((np.ones(len(columns), bool), columns, ends), (len(items), len(number) or 1)))


def _is_matrix(labels: object) -> bool:
    """Whether these are zeros and ones, a column per label. One column is none: its zeros might be a class."""
    if isinstance(labels, list | tuple):
        return bool(labels) and isinstance(labels[0], list | tuple) and len(labels[0]) > 1
    return getattr(labels, "ndim", 0) == 2 and labels.shape[1] > 1  # type: ignore[attr-defined]


def _from_matrix(labels: Any) -> LabelSets:
    try:
        ones = labels.to_dense().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError:  # rows of different lengths
        ones = np.array(None)
    if ones.dtype.kind not in "biuf" or not np.isin(ones, (0, 1)).all():
        raise NearkinError(
            "A matrix of labels holds a row per item, a column per label, and a one where the item has the label, else "
            "zero. To list the labels of each item instead, give a list of sets; for one label per item, a vector."
        )
    return LabelSets(ones)
