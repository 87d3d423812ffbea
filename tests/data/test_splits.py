"""Splits by classes and samples per class."""

import pytest
from image_helpers import files_by_class, numbered_images

from nearkin.data import held_out, sample_fraction
from nearkin.errors import NearkinError


def test_held_out_takes_the_last_classes_or_a_block():
    images = numbered_images([2, 3, 1, 4, 2, 2, 5, 1])
    train, validation = held_out(images, fraction=0.25)
    assert train.names == tuple(f"c{n}" for n in range(6))
    assert validation.names == ("c6", "c7")
    assert (len(train), len(validation)) == (14, 6)
    assert files_by_class(validation).items() <= files_by_class(images).items()
    train, validation = held_out(images, fold=(1, 4))
    assert validation.names == ("c2", "c3")
    assert train.names == ("c0", "c1", "c4", "c5", "c6", "c7")


def test_folds_cut_all_classes_once():
    images = numbered_images([1] * 11)
    blocks = [held_out(images, fold=(i, 4))[1].names for i in range(4)]
    assert [name for block in blocks for name in block] == list(images.names)
    assert {len(block) for block in blocks} == {2, 3}


@pytest.mark.parametrize(
    "how", [{"fraction": 0.0}, {"fraction": 1.0}, {"fold": (4, 4)}, {"fold": (0, 1)}, {"fraction": 0.9}]
)
def test_held_out_refuses_too_few_classes(how):
    with pytest.raises(NearkinError):
        held_out(numbered_images([2] * 5), **how)


def test_sample_fraction_is_per_class_and_leaves_at_least_one():
    images = numbered_images([1, 10, 100, 7])
    part = sample_fraction(images, 0.1, seed=5)
    assert part.counts.tolist() == [1, 1, 10, 1]
    whole = files_by_class(images)
    assert all(set(files) <= set(whole[name]) for name, files in files_by_class(part).items())
    assert part.sources == sample_fraction(images, 0.1, seed=5).sources
    assert part.sources != sample_fraction(images, 0.1, seed=6).sources
    assert sample_fraction(images, 1.0, seed=5).sources == images.sources
    with pytest.raises(NearkinError, match="fraction"):
        sample_fraction(images, 0.0, seed=0)
