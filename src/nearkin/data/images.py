"""Labelled images, and data sets of training and test images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nearkin.data.paths import Paths, joined_paths
from nearkin.errors import NearkinError

Key = TypeVar("Key", int, str)
Progress = Callable[[int, int], None] | None  # called with (done, total)


@dataclass(frozen=True, eq=False)
class Images:
    """Image files, or pixels already in memory, with dense labels and the names of the classes."""

    sources: Sequence[Path] | Tensor  # N files, kept as Paths; or uint8 [N, C, H, W]
    labels: Tensor  # [N] int64, 0 … classes-1, every class present
    names: tuple[str, ...]
    query: Tensor | None = None  # [N] bool; with gallery: the query/gallery protocol. None: leave-self-out
    gallery: Tensor | None = None  # [N] bool
    at_most: int = 0  # the short side to which they are reduced when they are opened (0: they are not)

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Tensor):
            object.__setattr__(self, "sources", Paths.of(self.sources))
        if (self.query is None) != (self.gallery is None):
            raise NearkinError("Images need both a query and a gallery mask, or neither.")
        for what, values in (("labels", self.labels), ("query", self.query), ("gallery", self.gallery)):
            if values is not None and values.shape != (len(self),):
                raise NearkinError(
                    f"{len(self)} images need {len(self)} {what}, not a tensor of shape {list(values.shape)}."
                )
        if self.labels.dtype != torch.int64:
            raise NearkinError(f"Labels must be int64, not {str(self.labels.dtype).removeprefix('torch.')}.")
        if not torch.equal(torch.unique(self.labels), torch.arange(self.classes)):
            raise NearkinError(f"Labels of {self.classes} classes must be 0 … {self.classes - 1}, each at least once.")

    def __len__(self) -> int:
        return len(self.sources)

    def __repr__(self) -> str:
        kind = "in memory" if isinstance(self.sources, Tensor) else "files"
        return f"Images({len(self):,} of {counted(self.classes, 'class', 'classes')}, {kind})"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def counts(self) -> Tensor:
        """Images per class, [classes] int64."""
        return torch.bincount(self.labels, minlength=self.classes)

    def take(self, index: Tensor | Sequence[int]) -> "Images":
        """Select rows by numbers or a mask. Labels are renumbered without the classes that are lost."""
        rows = torch.as_tensor(index, dtype=None if len(index) else torch.int64)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        present, labels = torch.unique(self.labels[rows], return_inverse=True)
        sources = self.sources
        return Images(
            sources=sources[rows] if isinstance(sources, Tensor) else Paths.of(sources).take(rows),
            labels=labels,
            names=tuple(self.names[c] for c in present.tolist()),
            query=None if self.query is None else self.query[rows],
            gallery=None if self.gallery is None else self.gallery[rows],
            at_most=self.at_most,
        )

    def of_classes(self, ids: Tensor | Sequence[int]) -> "Images":
        """Select the images of some classes, in the order of the rows."""
        return self.take(torch.isin(self.labels, torch.as_tensor(ids, dtype=torch.int64)))

    def without(self, rows: Tensor | Sequence[int]) -> "Images":
        """Drop rows, such as images that cannot be read."""
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[torch.as_tensor(rows, dtype=torch.int64)] = False
        return self.take(keep)


class LeftOut(NamedTuple):
    """An image that is not used."""

    path: Path
    reason: str


LeaveOut = Callable[[Sequence[LeftOut]], object]
"""Receives the images that are not used."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images, with notes on what was found and what was left out."""

    name: str
    train: Images
    test: Images  # may be empty
    notes: tuple[str, ...] = ()
    small_grey: bool = False  # small grey images, such as letters; else photographs
    left_out: tuple[LeftOut, ...] = ()  # images that were found and are in neither part
    test_short_side: int = 0  # of its usual test images; held-out classes that stand in for them are reduced to it
    split: str = ""  # how nearkin split the images into train and test; empty if the data set says it


def no_images() -> Images:
    """Return no images of no classes: the test part of a data set without one."""
    return Images([], torch.empty(0, dtype=torch.int64), ())


def joined(parts: Sequence[Images]) -> Images:
    """Several sets of images as one; classes of the same name become one class."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    number = {name: c for c, name in enumerate(names)}
    labels = torch.cat([torch.tensor([number[name] for name in part.names])[part.labels] for part in parts])
    if pixels := [part.sources for part in parts if isinstance(part.sources, Tensor)]:
        return Images(torch.cat(pixels), labels, names)
    return Images(joined_paths([part.sources for part in parts]), labels, names)  # type: ignore[misc]


def from_keys(paths: Sequence[Path], keys: Sequence[Key], *, names: Mapping[Key, str] | None = None) -> Images:
    """Build images whose classes are the sorted keys; `names` maps a key to the name of its class."""
    number: dict[Key, int] = {}
    codes = torch.tensor([number.setdefault(key, len(number)) for key in keys], dtype=torch.int64)
    return from_codes(paths, codes, list(number), names=names)


def from_codes(
    paths: Sequence[Path], codes: Tensor, keys: Sequence[Key], *, names: Mapping[Key, str] | None = None
) -> Images:
    """Build images whose classes are those of the keys that are used, sorted; codes [N] are numbers of keys."""
    used, codes = torch.unique(codes.long(), return_inverse=True)
    keys = [keys[code] for code in used.tolist()]
    order = sorted_keys(keys)
    label = {key: c for c, key in enumerate(order)}
    called = tuple(str(key) if names is None else names[key] for key in order)
    return Images(paths, torch.tensor([label[key] for key in keys], dtype=torch.int64)[codes], called)


def sorted_keys(keys: Iterable[Key]) -> list[Key]:
    """Return each key once, sorted; keys that are all whole numbers sort as numbers, so that 10 comes after 9."""
    once = set(keys)
    numbered = all(str(key).isascii() and str(key).isdigit() for key in once)
    return sorted(once, key=lambda key: (int(key), key)) if numbered else sorted(once)


def counted(count: int, one: str, many: str) -> str:
    """Format a count for a sentence: `1 class` or `1,234 classes`."""
    return f"{count:,} {one if count == 1 else many}"


def listed(names: Sequence[str], *, limit: int = 5) -> str:
    """Format names for a sentence: `a, b, c and 12 more`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
