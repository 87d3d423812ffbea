"""Images: rows, classes and labels."""

from pathlib import Path

import pytest
import torch

from nearkin.data import Images
from nearkin.errors import NearkinError


def test_take_renumbers_labels_and_keeps_the_order_of_names():
    images = Images(
        torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.tensor([0, 1, 2, 2, 1, 3]), tuple("abcd")
    )
    some = images.take([5, 2, 4])
    assert some.names == ("b", "c", "d")
    assert some.labels.tolist() == [2, 1, 0]
    assert some.sources.flatten().tolist() == [5, 2, 4]
    assert images.of_classes([2, 0]).sources.flatten().tolist() == [0, 2, 3]
    assert images.of_classes([2, 0]).names == ("a", "c")
    assert images.counts.tolist() == [1, 2, 2, 1]
    assert len(images.take([])) == 0


def test_without_drops_rows_and_lost_classes():
    paths = [Path(f"{n}.png") for n in range(4)]
    query = torch.tensor([True, False, True, False])
    images = Images(paths, torch.tensor([0, 1, 1, 2]), ("a", "b", "c"), query, ~query)
    left = images.without([0])
    assert left.names == ("b", "c")
    assert left.labels.tolist() == [0, 0, 1]
    assert left.sources == paths[1:]
    assert left.query.tolist() == [False, True, False]
    assert left.gallery.tolist() == [True, False, True]
    assert len(images.without([])) == 4


@pytest.mark.parametrize(
    ("labels", "names", "says"),
    [
        (torch.tensor([0, 2]), ("a", "b"), "0 … 1"),
        (torch.tensor([0, 0]), ("a", "b"), "each at least once"),
        (torch.tensor([0, -1]), ("a", "b"), "0 … 1"),
        (torch.tensor([0.0, 1.0]), ("a", "b"), "int64"),
        (torch.tensor([0]), ("a",), "2 images need 2 labels"),
    ],
)
def test_wrong_labels_are_refused(labels, names, says):
    with pytest.raises(NearkinError, match=says):
        Images([Path("x"), Path("y")], labels, names)
