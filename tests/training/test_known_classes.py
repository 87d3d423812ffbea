"""What a method knows of its training classes: kept with the model, read back, absent where there is nothing."""

import torch

import nearkin as nk
from nearkin.files import read_json
from nearkin.methods.base import Strategy
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.training.checkpoint import read_classes, write_classes
from nearkin.training.run_folder import RunFolder

TINY = {"data": "glyphs(classes=32, samples=6)", "epochs": 1, "batch": 24, "dim": 8, "device": "cpu"}


def test_a_run_keeps_its_proxies_beside_the_model(tmp_path):
    run = nk.train(**TINY, method="soft_triple(per_class=3)", out=tmp_path / "run")
    known = read_classes(run.classes)
    assert known.names == tuple(nk.load_dataset(TINY["data"]).train.names)
    assert known.proxies.shape == (16 * 3, 8)
    assert torch.equal(known.labels, torch.arange(16).repeat_interleave(3))
    assert known.columns == {}
    assert read_json(run.config)["plan"]["method"] == "soft_triple(per_class=3)"


def test_a_method_that_knows_nothing_of_classes_leaves_no_file(tmp_path):
    run = RunFolder(tmp_path)
    write_classes(run.classes, nk.method("contrastive", classes=3, dim=4), ["a", "b", "c"])
    assert not run.classes.exists()
    assert read_classes(run.classes) is None


def test_numbers_about_classes_are_columns_also_through_a_strategy(tmp_path):
    class Spread(ProxyAnchor):
        def class_values(self):
            return {"sigma": torch.tensor([0.1, 0.2])}

    inner = Spread(classes=2, dim=4)
    write_classes(tmp_path / "c.safetensors", inner, ["a", "b"])
    known = read_classes(tmp_path / "c.safetensors")
    assert torch.equal(known.proxies, inner.proxies.vectors)
    assert list(known.columns) == ["sigma"]
    assert torch.equal(known.columns["sigma"], torch.tensor([0.1, 0.2]))
    assert torch.equal(Strategy(inner).class_values()["sigma"], torch.tensor([0.1, 0.2]))
