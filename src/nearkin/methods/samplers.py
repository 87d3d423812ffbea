"""Batches of image indices. Batch n is a pure function of (labels, size, seed, n): resume with `start=n`.

An epoch is floor(N / size) batches. Its draws come from a NumPy generator seeded with the pair (seed, epoch), so epochs
and seeds are independent and any epoch can be drawn by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

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


def per_class(
    labels: Tensor,
    size: int,
    *,
    images: int,
    seed: int,
    start: int = 0,
    super_labels: Tensor | NDArray[Any] | None = None,
    super_classes: int = 1,
) -> Iterator[Tensor]:
    """Endless batches of size/images classes with `images` images each, class by class.

    Classes are dealt from a shuffled deck: none is repeated before all have been used, and none is twice in a batch.
    The images of a class come in an order that is shuffled every epoch and starts over at its end, so a class with
    fewer than `images` repeats its images evenly.

    With `super_labels`, the super-class of each image, a batch takes its classes from `super_classes` super-classes,
    equally many from each. These are drawn in proportion to their number of classes, and have decks of their own.
    """
    steps = steps_per_epoch(len(labels), size)
    codes, counts = class_sizes(labels, size, images=images)
    decks = [np.arange(len(counts))]
    if super_labels is not None:
        decks = _classes_of_super_classes(codes, super_labels, super_classes, size=size, images=images)
    else:
        super_classes = 1
    at_once = size // images // super_classes
    first_row = np.cumsum(counts) - counts

    def epoch(rng: np.random.Generator) -> Ints:
        by_class = np.lexsort((rng.random(len(codes)), codes))  # each class's images together, in random order
        drawn = _draw(np.array([len(deck) for deck in decks]), super_classes, steps, rng)
        classes, visits = np.empty((2, steps, super_classes, at_once), dtype=np.int64)
        for number, deck in enumerate(decks):
            hands = drawn == number
            if not hands.any():
                continue
            cards, times = deal(len(deck), at_once, int(hands.sum()), rng)
            classes[hands], visits[hands] = deck[cards].reshape(-1, at_once), times.reshape(-1, at_once)
        position = (visits[..., None] * images + np.arange(images)) % counts[classes, None]
        return by_class[first_row[classes, None] + position].reshape(steps, size)

    return _epochs(epoch, steps, seed=seed, start=start)


def _draw(weights: Ints, many: int, steps: int, rng: np.random.Generator) -> Ints:
    """For each step `many` different numbers [steps, many], drawn one by one in proportion to their weights."""
    if len(weights) == many:
        return np.tile(np.arange(many), (steps, 1))
    times = rng.exponential(size=(steps, len(weights))) / weights  # the first to arrive of Poisson processes
    return times.argsort(axis=1)[:, :many]


def _classes_of_super_classes(
    codes: Ints, super_labels: Tensor | NDArray[Any], many: int, *, size: int, images: int
) -> list[Ints]:
    """The classes of each super-class; checks that a batch can take its part from every one."""
    if len(super_labels) != len(codes):
        raise NearkinError(
            f"There are labels of {len(codes)} images and super-classes of {len(super_labels)}: give one per image."
        )
    names, of_image = np.unique(np.asarray(super_labels), return_inverse=True)
    pairs = np.unique(np.stack([of_image, codes]), axis=1)
    if len(pairs[1]) > codes.max() + 1:
        raise NearkinError("A class is in several super-classes: each class must be in one.")
    if not 1 <= many <= len(names):
        raise NearkinError(f"A batch cannot take {many} of {len(names)} super-classes: choose 1 to {len(names)}.")
    if size % (images * many):
        raise NearkinError(
            f"A batch of {size} does not divide into {many} super-classes with classes of {images} images: make it a "
            f"multiple of {images * many}."
        )
    decks = [pairs[1][pairs[0] == number] for number in range(len(names))]
    smallest = min(range(len(decks)), key=lambda number: len(decks[number]))
    if len(decks[smallest]) < size // (images * many):
        raise NearkinError(
            f"A batch takes {size // (images * many)} classes of a super-class, and super-class {names[smallest]} has "
            f"{len(decks[smallest])}: choose a smaller batch, or more images per class or super-classes per batch."
        )
    return decks


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


class ClassBatchSampler(Sampler[list[int]]):
    """Class-balanced batches for `DataLoader(dataset, batch_sampler=…)`: size/images classes of `images` images each.

    `labels` are one per image of the dataset, integers or strings. With `super_labels`, one per image as well, each
    batch is drawn within `super_classes` super-classes. A pass has `len(sampler)` batches, by default as many as the
    images fill, and every pass draws others: pass n depends only on the seed and n. Call `set_epoch(n)` to resume.
    """

    def __init__(
        self,
        labels: Tensor | NDArray[Any] | Sequence[int] | Sequence[str],
        size: int,
        *,
        images: int = 4,
        super_labels: Tensor | NDArray[Any] | Sequence[int] | Sequence[str] | None = None,
        super_classes: int = 1,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.labels = torch.from_numpy(np.unique(_names(labels), return_inverse=True)[1])
        self.super_labels = None if super_labels is None else _names(super_labels)
        self.batch_size, self.drop_last = size, True  # as PyTorch's own, for trainers that ask
        self.images, self.super_classes, self.seed = images, super_classes, seed
        self.length = steps_per_epoch(len(self.labels), size) if length is None else length
        if self.length < 1:
            raise NearkinError(f"A pass of {length} batches is empty: choose a length of at least 1.")
        self.epoch = 0
        self._from(0)  # refuses at once what cannot be drawn

    def _from(self, start: int) -> Iterator[Tensor]:
        return per_class(
            self.labels,
            self.batch_size,
            images=self.images,
            seed=self.seed,
            start=start,
            super_labels=self.super_labels,
            super_classes=self.super_classes,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set which pass the next one is, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        start = self.epoch * self.length
        self.epoch += 1
        return (batch.tolist() for batch in islice(self._from(start), self.length))


def _names(labels: Any) -> NDArray[Any]:
    """Labels of any kind as an array [N]."""
    names = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if names.ndim != 1 or names.dtype.kind == "f":
        raise NearkinError("A sampler takes one label per image, integers or strings.")
    return names
