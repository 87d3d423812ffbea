"""Batches of image indices. Batch n is a pure function of (labels, size, seed, n): resume with `start=n`.

An epoch is floor(N / size) batches. Its draws come from a NumPy generator seeded with the pair (seed, epoch), so epochs
and seeds are independent and any epoch can be drawn by itself.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import NearkinError

Ints = NDArray[np.int64]


def steps_per_epoch(count: int, size: int) -> int:
    """Batches per epoch; images that do not fill a batch are left out."""
    if size < 1:
        raise NearkinError(f"A batch of {size} images cannot be drawn: the batch size is at least 1.")
    if size > count:
        raise NearkinError(
            f"A batch of {size} images cannot be drawn from {count}: choose a batch size of at most {count}."
        )
    return count // size


def check_start(seed: int, start: int) -> None:
    """Refuse a negative seed or batch number."""
    if seed < 0 or start < 0:
        raise NearkinError(f"Seed and start are integers of at least 0, not {seed} and {start}.")


def shuffled(labels: Tensor, size: int, *, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches of image indices: every epoch is a new random order of all images."""
    count = len(labels)
    steps = steps_per_epoch(count, size)

    def epoch(rng: np.random.Generator) -> Ints:
        return rng.permutation(count)[: steps * size].reshape(steps, size)

    return _epochs(epoch, steps, seed=seed, start=start)


def per_class(labels: Tensor, size: int, *, images: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches of size/images classes with `images` images each, class by class.

    Classes are dealt from a shuffled deck: none is repeated before all have been used, and none is twice in a batch.
    The images of a class come in an order that is shuffled every epoch and starts over at its end, so a class with
    fewer than `images` repeats its images evenly.
    """
    steps = steps_per_epoch(len(labels), size)
    codes, counts = class_sizes(labels, size, images=images)
    at_once = size // images
    first_row = np.cumsum(counts) - counts

    def epoch(rng: np.random.Generator) -> Ints:
        by_class = np.lexsort((rng.random(len(codes)), codes))  # each class's images together, in random order
        classes, visits = deal(len(counts), at_once, steps, rng)
        position = (visits[:, None] * images + np.arange(images)) % counts[classes, None]
        return by_class[first_row[classes, None] + position].reshape(steps, size)

    return _epochs(epoch, steps, seed=seed, start=start)


def class_sizes(labels: Tensor, size: int, *, images: int) -> tuple[Ints, Ints]:
    """Class index of each image and number of images per class; checks that a batch of `images` per class fits."""
    if images < 1 or size % images:
        raise NearkinError(f"A batch of {size} does not divide into classes of {images} images: make it a multiple.")
    _, codes, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    if size // images > len(counts):
        raise NearkinError(
            f"A batch of {size} with {images} images per class needs {size // images} classes and there are "
            f"{len(counts)}: choose a batch size of at most {len(counts) * images}."
        )
    return codes, counts


def deal(classes: int, at_once: int, steps: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """`steps` hands of `at_once` classes from successive decks, and the deck number of each card."""
    decks: list[Ints] = []
    while len(decks) * classes < steps * at_once:
        deck = rng.permutation(classes)
        started = len(decks) * classes % at_once  # cards of the last deck in a hand that this deck has to complete
        if started:
            again = np.isin(deck, decks[-1][-started:])
            head = deck[~again][: at_once - started]
            deck = np.concatenate([head, deck[~np.isin(deck, head)]])
        decks.append(deck)
    number = np.repeat(np.arange(len(decks)), classes)
    return np.concatenate(decks)[: steps * at_once], number[: steps * at_once]


def _epochs(epoch: Callable[[np.random.Generator], Ints], steps: int, *, seed: int, start: int) -> Iterator[Tensor]:
    """Batch `start` and all following ones."""
    check_start(seed, start)

    def batches() -> Iterator[Tensor]:
        number, first = divmod(start, steps)
        while True:
            yield from torch.from_numpy(epoch(np.random.default_rng((seed, number)))[first:])
            number, first = number + 1, 0

    return batches()
