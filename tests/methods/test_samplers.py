"""Batches: the content of an epoch, and any batch by its number."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.samplers import ClassBatchSampler, per_class, shuffled, steps_per_epoch

UNEVEN = torch.tensor([0] * 1 + [1] * 2 + [2] * 3 + [3] * 10 + [4] * 7 + [5] * 4 + [6] * 13)


def grouped(size: int, **options: object) -> object:
    return per_class(MANY, size, **{"images": 2, "seed": 0, "super_labels": SUPER_OF[MANY], **options})  # type: ignore[arg-type]


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


# 30 classes of 1 to 6 images; super-class s has the classes of SUPER_OF equal to s: 3, 9 and 18 of them.
SUPER_OF = torch.arange(3).repeat_interleave(torch.tensor([3, 9, 18]))[
    torch.randperm(30, generator=torch.Generator().manual_seed(0))
]
MANY = torch.arange(30).repeat_interleave(torch.arange(30) % 6 + 1)[
    torch.randperm(105, generator=torch.Generator().manual_seed(1))
]


@pytest.mark.parametrize(("size", "images", "super_classes"), [(6, 2, 1), (12, 2, 2), (9, 1, 3), (8, 4, 2)])
def test_batches_stay_within_super_classes(size: int, images: int, super_classes: int) -> None:
    options = {"images": images, "super_labels": SUPER_OF[MANY], "super_classes": super_classes, "seed": 0}
    steps = steps_per_epoch(len(MANY), size)
    shown = torch.zeros(len(MANY), dtype=torch.int64)
    visits = torch.zeros(30, dtype=torch.int64)
    for batch in first(per_class(MANY, size, **options), steps):  # type: ignore[arg-type]
        classes = MANY[batch].view(super_classes, -1, images)
        assert (classes == classes[..., :1]).all()  # class by class
        assert len(classes.unique()) == size // images  # none twice in a batch
        of_class = SUPER_OF[classes[..., 0]]
        assert (of_class == of_class[:, :1]).all()  # equally many classes of each super-class
        assert len(of_class.unique()) == super_classes
        visits += torch.bincount(classes[..., 0].flatten(), minlength=30)
        shown += torch.bincount(batch, minlength=len(MANY))
    for s in range(3):
        own = visits[s == SUPER_OF]
        assert own.max() - own.min() <= 1  # a deck of its own
    for c in range(30):
        assert shown[c == MANY].max() - shown[c == MANY].min() <= 1
    at_nine = next(iter(per_class(MANY, size, start=9, **options)))  # type: ignore[arg-type]
    assert torch.equal(at_nine, first(per_class(MANY, size, **options), 10)[9])  # type: ignore[arg-type]


def test_super_classes_are_drawn_in_proportion_to_their_classes() -> None:
    batches = first(per_class(MANY, 6, images=2, seed=0, super_labels=SUPER_OF[MANY]), 2000)
    drawn = torch.bincount(torch.stack([SUPER_OF[MANY[batch[0]]] for batch in batches]), minlength=3) / 2000
    assert ((drawn - torch.tensor([3, 9, 18]) / 30).abs() < 0.03).all()


def test_all_super_classes_in_every_batch_is_one_super_class_each() -> None:
    for batch in first(per_class(MANY, 9, images=1, seed=0, super_labels=SUPER_OF[MANY], super_classes=3), 20):
        assert torch.bincount(SUPER_OF[MANY[batch]]).tolist() == [3, 3, 3]


def test_one_super_class_is_none() -> None:
    whole = first(per_class(UNEVEN, 12, images=3, seed=4), 8)
    one = first(per_class(UNEVEN, 12, images=3, seed=4, super_labels=torch.full((40,), 7)), 8)
    assert all(torch.equal(a, b) for a, b in zip(whole, one, strict=True))


def test_a_loader_takes_the_sampler() -> None:
    names = [f"class {label}" for label in UNEVEN.tolist()]
    sampler = ClassBatchSampler(names, 12, images=3, seed=5)
    data = torch.utils.data.TensorDataset(torch.arange(40))
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=0)
    assert len(loader) == len(sampler) == 3
    assert (sampler.batch_size, sampler.drop_last) == (12, True)
    seen = [batch for _ in range(3) for (batch,) in loader]
    expected = first(per_class(UNEVEN, 12, images=3, seed=5), 9)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    again = ClassBatchSampler(UNEVEN, 12, images=3, seed=5)
    again.set_epoch(2)
    assert list(again) == [batch.tolist() for batch in expected[6:]]
    assert list(again) != [batch.tolist() for batch in expected[6:]]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_pass_may_have_any_length(length: int) -> None:
    sampler = ClassBatchSampler(UNEVEN.numpy(), 12, images=3, length=length)
    assert len(sampler) == length
    seen = [batch for _ in range(4) for batch in sampler]
    assert seen == [batch.tolist() for batch in first(per_class(UNEVEN, 12, images=3, seed=0), 4 * length)]


def test_a_sampler_by_super_class() -> None:
    groups = [f"group {s}" for s in SUPER_OF[MANY].tolist()]
    sampler = ClassBatchSampler(MANY.tolist(), 12, images=2, super_labels=groups, super_classes=2)
    assert len(sampler) == 8
    assert all(len(SUPER_OF[MANY[batch]].unique()) == 2 for batch in sampler)
    with pytest.raises(NearkinError, match="super-class group 0 has 3: choose a smaller batch"):
        ClassBatchSampler(MANY, 16, images=2, super_labels=groups, super_classes=2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: grouped(8, super_labels=SUPER_OF[MANY][1:]), "labels of 105 images and super-classes of 104"),
        (lambda: grouped(8, super_labels=torch.arange(105)), "A class is in several super-classes"),
        (lambda: grouped(8, super_classes=0), "cannot take 0 of 3 super-classes: choose 1 to 3"),
        (lambda: grouped(16, super_classes=4), "cannot take 4 of 3 super-classes"),
        (lambda: grouped(10, super_classes=2), "does not divide into 2 super-classes .* a multiple of 4"),
        (lambda: grouped(8), "takes 4 classes of a super-class, and super-class 0 has 3"),
        (lambda: ClassBatchSampler(UNEVEN.float(), 12), "one label per image"),
        (lambda: ClassBatchSampler(UNEVEN[:, None], 12), "one label per image"),
        (lambda: ClassBatchSampler(UNEVEN, 12, length=0), "at least 1"),
        (lambda: ClassBatchSampler(UNEVEN, 10, images=3), "does not divide"),
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
