"""The mark of a data set's images: what changes it and what does not."""

from pathlib import Path

import torch

import nearkin as nk
from nearkin.data.image_mark import image_mark
from nearkin.data.images import Dataset, Images


def dataset(folder, *, size=3, label=0):
    folder.mkdir()
    paths = [folder / f"{number}.png" for number in range(4)]
    for path in paths:
        path.write_bytes(b"x" * size)
    train = Images(paths[:2], torch.tensor([0, label]), ("a", "b")[: 1 + label])
    return Dataset("mine", train, Images(paths[2:], torch.tensor([0, 0]), ("c",)))


def test_the_mark_is_that_of_the_images_wherever_they_are_and_however_they_are_split(tmp_path):
    first, moved = dataset(tmp_path / "a"), dataset(tmp_path / "b")
    mark = image_mark(first)
    assert mark[:2] == (4, 12)
    assert image_mark(moved) == mark
    assert image_mark(Dataset("mine", moved.test, moved.train)) == mark
    assert image_mark(dataset(tmp_path / "c", size=4)).digest != mark.digest
    assert image_mark(dataset(tmp_path / "d", label=1)).digest != mark.digest
    Path(moved.train.sources[1]).unlink()
    assert image_mark(moved).digest != mark.digest


def test_the_mark_of_images_in_memory_is_that_of_their_pixels():
    first, same = (nk.load_dataset("glyphs(classes=8, samples=2)") for _ in range(2))
    other = nk.load_dataset("glyphs(classes=8, samples=2, seed=1)")
    assert image_mark(first) == image_mark(same)
    assert image_mark(first).digest != image_mark(other).digest
