"""Split images by classes, or sample a fraction of each class; deterministic functions of their arguments."""

from dataclasses import replace

import torch

from nearkin.data.images import Dataset, Images, joined, no_images
from nearkin.errors import NearkinError


def in_halves(images: Images) -> tuple[Images, Images]:
    """Split into the first half of the classes and the second; an odd class goes to the first."""
    middle = (images.classes + 1) // 2
    return images.of_classes(range(middle)), images.of_classes(range(middle, images.classes))


def within_classes(images: Images) -> tuple[Images, Images]:
    """Split every class: its first, third, … image and its second, fourth, …"""
    by_class = images.labels.argsort(stable=True)
    starts = images.counts.cumsum(0) - images.counts
    odd = (torch.arange(len(images)) - starts[images.labels[by_class]]) % 2 == 1
    return images.take(by_class[~odd].sort().values), images.take(by_class[odd].sort().values)


def swapped(dataset: Dataset) -> Dataset:
    """Swap training and test classes."""
    if dataset.test.query is not None:
        raise NearkinError(f"{dataset.name} has a query/gallery test part, so its halves cannot be swapped.")
    note = "Halves swapped: training and test classes are exchanged."
    return replace(dataset, train=dataset.test, test=dataset.train, notes=(*dataset.notes, note), test_short_side=0)


def all_training(dataset: Dataset) -> Dataset:
    """Return a data set that trains on all its images and tests on none."""
    train = joined([part for part in (dataset.train, dataset.test) if len(part)])
    note = (
        f"All {train.classes:,} classes train, so nothing can be measured on this data set: evaluate a run with test "
        "images first."
    )
    return replace(dataset, train=train, test=no_images(), split=note)


def held_out(train: Images, *, fraction: float = 0.25, fold: tuple[int, int] | None = None) -> tuple[Images, Images]:
    """Split training images by classes into (train, validation).

    Validation is the last `fraction` of the classes, at least two, or with `fold=(i, n)` block i (0 … n-1) of n
    contiguous blocks.
    """
    first, last = _last_block(train.classes, fraction) if fold is None else _block(train.classes, *fold)
    kept = train.classes - (last - first)
    if kept < 2 or last - first < 2:
        raise NearkinError(
            f"Holding out {last - first} of {train.classes} training classes leaves {kept}, and both sides need at "
            "least 2: add classes, or train without held-out classes."
        )
    validation = (train.labels >= first) & (train.labels < last)
    return train.take(~validation), train.take(validation)


def _last_block(classes: int, fraction: float) -> tuple[int, int]:
    if not 0 < fraction < 1:
        raise NearkinError(f"The held-out fraction of the classes must be between 0 and 1, not {fraction}.")
    return classes - max(2, round(fraction * classes)), classes


def _block(classes: int, i: int, n: int) -> tuple[int, int]:
    if not (n >= 2 and 0 <= i < n):
        raise NearkinError(f"A fold must be (i, n) with n at least 2 and i from 0 to n-1, not ({i}, {n}).")
    return i * classes // n, (i + 1) * classes // n


def sample_fraction(images: Images, fraction: float, *, seed: int) -> Images:
    """Sample a fraction of each class, rounded and at least one image; the order of the rows is kept."""
    if not 0 < fraction <= 1:
        raise NearkinError(f"The fraction of the samples must be above 0 and at most 1, not {fraction}.")
    keep = (images.counts * fraction).round().long().clamp(min=1)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[images.labels[shuffled].argsort(stable=True)]
    labels = images.labels[by_class]
    starts = images.counts.cumsum(0) - images.counts
    rank = torch.arange(len(images)) - starts[labels]  # 0, 1, … within each class
    return images.take(by_class[rank < keep[labels]].sort().values)
