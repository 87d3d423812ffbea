"""Training on images and labels from Python, and with a module as trunk."""

import numpy as np
import pytest
import torch
from made import make_images
from PIL import Image
from torch import nn

import nearkin as nk
from nearkin.data.labelled_items import as_spec
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.networks.backbones import BACKBONES, OWN

CPU = {"epochs": 1, "batch": 8, "dim": 8, "warmup": 0, "device": "cpu", "metrics": ("R@1",)}


class Pairs(torch.utils.data.Dataset):
    """Four classes of coloured squares of several sizes, as float tensors and tensor labels."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        rng = torch.Generator().manual_seed(row)
        return torch.rand(3, 40 + row, 50, generator=rng), torch.tensor(row % 4)


class Small(nn.Module):
    """A trunk that returns vectors."""

    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, stride=4), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x):
        return self.layers(x).mean((2, 3))


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory):
    """A cache of its own, and afterwards the table of backbones as it was."""
    before = dict(BACKBONES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEARKIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    for name in BACKBONES.keys() - before.keys():
        del BACKBONES[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, places):
    """A run on a torch Dataset with a module as trunk, and the module."""
    torch.manual_seed(0)
    net = Small()
    return nk.train(data=Pairs(), backbone=net, size=32, **CPU, out=tmp_path_factory.mktemp("own") / "run"), net


def test_the_module_trains_and_is_not_changed(trained):
    run, net = trained
    model = nk.load(run, device="cpu", backbone=Small())
    assert model.size == 32
    torch.manual_seed(0)
    untouched = Small().layers[0].weight
    assert torch.equal(net.layers[0].weight, untouched)
    moved = (model.embedder.trunk.net.layers[0].weight - untouched).abs().max()
    assert 0 < moved < 0.01  # it started from the module's weights
    assert read_json(run.config)["plan"]["backbone"] == f"{OWN}Small"
    assert "nearkin.load(run, backbone=module)" in read_json(run.config)["not_in_this_folder"]
    pixels = [(Pairs()[row][0] * 255).round().byte() for row in range(24) if row % 4 > 1]
    x = model.embed(pixels, near_enough=False)
    labels = [row % 4 for row in range(24) if row % 4 > 1]
    assert nk.evaluate(x, torch.tensor(labels), metrics=("R@1",)) == pytest.approx(read_json(run.result)["scores"])


def test_a_process_without_the_module_asks_for_it(trained, monkeypatch):
    monkeypatch.delitem(BACKBONES, f"{OWN}Small")
    with pytest.raises(NearkinError, match=r"module of your own, Small, which no file holds: .*load\(run, backbone="):
        nk.load(trained[0], device="cpu")
    nk.train(resume=True, out=trained[0].path, backbone=Small())
    assert f"{OWN}Small" in BACKBONES


def test_other_modules_do_not_fit(trained):
    with pytest.raises(NearkinError, match="does not fit"):
        nk.load(trained[0], device="cpu", backbone=Small(width=7))


def test_lists_of_files_and_pixels_make_the_same_data_set(tmp_path):
    paths = make_images(tmp_path / "photos", classes=4, each=2)
    labels = [path.parent.name for path in paths]
    pictures = [Image.open(path) for path in paths]
    tensors = [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]
    known = nk.load_dataset(f"folder:{tmp_path / 'photos'}")
    for images in (paths, list(map(str, paths)), pictures, tensors, [np.array(p) for p in pictures]):
        spec = as_spec(list(zip(images, labels, strict=True)))
        assert spec == as_spec(list(zip(images, labels, strict=True)))  # written once
        data = nk.load_dataset(spec)
        assert (data.train.names, data.test.names) == (known.train.names, known.test.names)
        for ours, theirs in zip(data.train.sources, known.train.sources, strict=True):
            assert np.array_equal(np.asarray(Image.open(ours)), np.asarray(Image.open(theirs)))


def test_a_pair_of_parts_keeps_them():
    image = np.zeros((8, 8), np.uint8)
    data = nk.load_dataset(as_spec(([(image, 0), (image, 1)], [(image, 10), (image, 9), (image, 9)])))
    assert (len(data.train), data.train.names) == (2, ("0", "1"))
    assert data.test.names == ("9", "10")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (7, "a torch Dataset with a length"),
        ({"a": 1}, "not dict"),
        ([1, 2], r"Item 0 of the data is int, not a pair \(image, label\)"),
        ([(np.zeros((8, 8), np.uint8), 0.5)], "label of item 0 is 0.5: labels are whole numbers or words"),
        ([(np.zeros((8, 8)) + 2, 0)], "Float pixels must be from 0 to 1"),
        ([(np.zeros((8, 8, 4), np.uint8), 0)], "1 or 3 channels"),
    ],
)
def test_other_data_are_refused_in_sentences(data, words):
    with pytest.raises(NearkinError, match=words):
        nk.train(data=data, **CPU)
