"""Which images meet in a batch. Batch number n is a pure function of (labels, size, seed, n): resume by `start=n`.

An epoch is floor(N / size) batches. All its draws come from a NumPy generator seeded with the pair (seed, epoch), which
NumPy's SeedSequence hashes, so epochs and seeds are independent of each other and any epoch can be drawn by itself.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import NearkinError

Ints = NDArray[np.int64]


def steps_per_epoch(count: int, size: int) -> int:
    """Batches in an epoch: the images that do not fill a batch are left out."""
    if size < 1:
        raise NearkinError(f"A batch of {size} images cannot be drawn: the batch size is at least 1.")
    if size > count:
        raise NearkinError(
            f"A batch of {size} images cannot be drawn from {count}: choose a batch size of at most {count}."
        )
    return count // size


def check_start(seed: int, start: int) -> None:
    """Refuse what is no seed or no number of a batch."""
    if seed < 0 or start < 0:
        raise NearkinError(f"Seed and start are whole numbers from 0 on, not {seed} and {start}.")


def shuffled(labels: Tensor, size: int, *, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches of image numbers: each epoch a new order of all images, none twice."""
    count = len(labels)
    steps = steps_per_epoch(count, size)

    def epoch(rng: np.random.Generator) -> Ints:
        return rng.permutation(count)[: steps * size].reshape(steps, size)

    return _epochs(epoch, steps, seed=seed, start=start)


def per_class(labels: Tensor, size: int, *, images: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches of size/images classes with `images` images each, class by class.

    Classes are dealt from a shuffled deck: none comes again before all have come, and none twice in a batch. A class
    goes through its images in an order that is shuffled every epoch, and starts over when it has shown them all; so a
    class with fewer than `images` repeats its own, evenly.
    """
    steps = steps_per_epoch(len(labels), size)
    codes, counts = class_sizes(labels, size, images=images)
    at_once = size // images
    begin = np.cumsum(counts) - counts

    def epoch(rng: np.random.Generator) -> Ints:
        by_class = np.lexsort((rng.random(len(codes)), codes))  # each class's images together, in random order
        classes, visits = deal(len(counts), at_once, steps, rng)
        position = (visits[:, None] * images + np.arange(images)) % counts[classes, None]
        return by_class[begin[classes, None] + position].reshape(steps, size)

    return _epochs(epoch, steps, seed=seed, start=start)


def class_sizes(labels: Tensor, size: int, *, images: int) -> tuple[Ints, Ints]:
    """Each image's class as a number from 0 on, and how many images each has; for batches of `images` a class."""
    if images < 1 or size % images:
        raise NearkinError(f"A batch of {size} does not divide into classes of {images} images: make it a multiple.")
    _, codes, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    if size // images > len(counts):
        raise NearkinError(
            f"A batch of {size} with {images} images a class needs {size // images} classes and there are "
            f"{len(counts)}: choose a batch size of at most {len(counts) * images}."
        )
    return codes, counts


def deal(classes: int, at_once: int, steps: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """`steps` hands of `at_once` classes from deck after deck, and the number of the deck each card is from."""
    decks: list[Ints] = []
    while len(decks) * classes < steps * at_once:
        deck = rng.permutation(classes)
        begun = len(decks) * classes % at_once  # cards of the last deck in a hand that this one has to fill
        if begun:
            again = np.isin(deck, decks[-1][-begun:])
            head = deck[~again][: at_once - begun]
            deck = np.concatenate([head, deck[~np.isin(deck, head)]])
        decks.append(deck)
    number = np.repeat(np.arange(len(decks)), classes)
    return np.concatenate(decks)[: steps * at_once], number[: steps * at_once]


def _epochs(epoch: Callable[[np.random.Generator], Ints], steps: int, *, seed: int, start: int) -> Iterator[Tensor]:
    """Batch `start` and all that follow."""
    check_start(seed, start)

    def batches() -> Iterator[Tensor]:
        number, first = divmod(start, steps)
        while True:
            yield from torch.from_numpy(epoch(np.random.default_rng((seed, number)))[first:])
            number, first = number + 1, 0

    return batches()
