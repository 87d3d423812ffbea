"""Batches: the content of an epoch, and any batch by its number."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.samplers import per_class, shuffled, steps_per_epoch

UNEVEN = torch.tensor([0] * 1 + [1] * 2 + [2] * 3 + [3] * 10 + [4] * 7 + [5] * 4 + [6] * 13)


def first(batches: object, count: int) -> list[Tensor]:
    return list(islice(batches, count))  # type: ignore[arg-type]


def test_shuffled_epoch_has_no_image_twice() -> None:
    batches = first(shuffled(UNEVEN, 9, seed=0), 8)  # 40 images: 4 batches an epoch
    assert all(b.dtype == torch.int64 and b.shape == (9,) for b in batches)
    for epoch in (batches[:4], batches[4:]):
        images = torch.cat(epoch)
        assert len(images.unique()) == 36
        assert images.min() >= 0
        assert images.max() < 40
    assert not torch.equal(torch.cat(batches[:4]), torch.cat(batches[4:]))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 11, 1000])
def test_any_batch_can_be_had_by_its_number(start: int) -> None:
    for make in (
        lambda n: shuffled(UNEVEN, 9, seed=5, start=n),
        lambda n: per_class(UNEVEN, 12, images=3, seed=5, start=n),
    ):
        through = first(make(0), start + 6)[start:]
        assert all(torch.equal(a, b) for a, b in zip(through, first(make(start), 6), strict=True))


def test_seeds_differ_and_repeat() -> None:
    for make in (lambda s: shuffled(UNEVEN, 9, seed=s), lambda s: per_class(UNEVEN, 12, images=3, seed=s)):
        one, again, other = (torch.cat(first(make(s), 4)) for s in (1, 1, 2))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_epoch_and_seed_do_not_trade_places() -> None:
    late = torch.cat(first(shuffled(UNEVEN, 10, seed=0, start=4), 4))  # epoch 1 of seed 0
    early = torch.cat(first(shuffled(UNEVEN, 10, seed=1), 4))  # epoch 0 of seed 1
    assert not torch.equal(late, early)


@given(
    counts=st.lists(st.integers(1, 9), min_size=3, max_size=12),
    images=st.integers(1, 4),
    at_once=st.integers(1, 12),
    seed=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_per_class_keeps_its_promises(counts: list[int], images: int, at_once: int, seed: int) -> None:
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    size = at_once * images
    if at_once > len(counts) or size > len(labels):
        return
    steps = steps_per_epoch(len(labels), size)
    seen = torch.zeros(len(labels), dtype=torch.int64)
    visits = torch.zeros(len(counts), dtype=torch.int64)
    for batch in first(per_class(labels, size, images=images, seed=seed), steps):
        groups = labels[batch].view(at_once, images)
        assert (groups == groups[:, :1]).all()  # class by class
        assert len(groups[:, 0].unique()) == at_once  # none twice in a batch
        visits += torch.bincount(groups[:, 0], minlength=len(counts))
        assert visits.max() - visits.min() <= 1  # none again before all have come, at every moment
        seen += torch.bincount(batch, minlength=len(labels))
    for c in range(len(counts)):
        shown = seen[labels == c]
        assert shown.max() - shown.min() <= 1  # evenly, whether the class is small or large


def test_small_classes_repeat_evenly() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    batch = next(per_class(labels, 8, images=4, seed=0))
    own = batch[labels[batch] == 0]
    assert sorted(own.tolist()) == [0, 0, 1, 1]
    assert len(batch[labels[batch] == 1].unique()) == 4


def test_labels_need_not_be_dense() -> None:
    labels = torch.tensor([7, 7, 40, 40, 3, 3])
    batch = next(per_class(labels, 4, images=2, seed=0))
    assert (labels[batch].view(2, 2)[:, 0] == labels[batch].view(2, 2)[:, 1]).all()


def test_classes_are_drawn_equally_often_over_epochs() -> None:
    visits = torch.zeros(7)
    for batch in first(per_class(UNEVEN, 12, images=3, seed=0), 3 * 700):
        visits += torch.bincount(UNEVEN[batch], minlength=7) / 3
    assert ((visits / visits.mean() - 1).abs() < 0.03).all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: shuffled(UNEVEN, 41, seed=0), "cannot be drawn from 40"),
        (lambda: shuffled(UNEVEN, 0, seed=0), "at least 1"),
        (lambda: shuffled(UNEVEN, 4, seed=-1), "integers of at least 0"),
        (lambda: per_class(UNEVEN, 10, images=3, seed=0), "does not divide"),
        (lambda: per_class(UNEVEN, 10, images=0, seed=0), "does not divide"),
        (lambda: per_class(UNEVEN, 16, images=2, seed=0), "needs 8 classes and there are 7: .* at most 14"),
        (lambda: per_class(UNEVEN, 60, images=2, seed=0), "cannot be drawn from 40"),
    ],
)
def test_invalid_arguments_are_refused_at_once(call: object, sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence):
        call()  # type: ignore[operator]
