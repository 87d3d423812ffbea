"""Snapshots of chosen epochs, and the classes as a method knows them, written and read."""

import sys

import pytest
import torch

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json, read_tensors
from nearkin.methods.base import Strategy
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.training.checkpoint import kept_epochs, open_snapshot, read_classes, write_classes
from nearkin.training.run_folder import RunFolder

TINY = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cpu"}
ISA = {**TINY, "method": "proxy_isa(size=40, hardness=1, sensitivity=0, margin=0, volume=4, filter_from=1)"}
ONE_EPOCH = {"data": "glyphs(classes=32, samples=6)", "epochs": 1, "batch": 24, "dim": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nk.train(**ISA, snapshots="0,2,3", out=tmp_path_factory.mktemp("run") / "isa")


def test_the_requested_epochs_are_saved(run):
    assert list(kept_epochs(run)) == [0, 2, 3]
    assert [open_snapshot(run, epoch, device="cpu").method.checks.tolist() for epoch in (0, 2)] == [[0], [0, 6, 12]]


def test_the_last_snapshot_is_the_kept_model(run):
    last, first = (open_snapshot(run, epoch, device="cpu").model.embedder.state_dict() for epoch in (3, 0))
    kept = read_tensors(run.model)[0]
    assert all(torch.equal(last[key], kept[key]) for key in kept)
    assert not all(torch.equal(first[key], kept[key]) for key in kept)


def test_state_that_grew_with_the_data_is_restored(run):
    method = open_snapshot(run, 3, device="cpu").method
    assert len(method.filtered) == 24 * 6
    assert int(method.seen.sum()) == 3 * 6 * 24
    assert int(method.filtered.sum()) > 0


def test_snapshots_do_not_change_the_training(run, tmp_path):
    plain = nk.train(**ISA, out=tmp_path / "plain")
    first, second = read_tensors(run.model)[0], read_tensors(plain.model)[0]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert list(kept_epochs(plain)) == [3], "the checkpoint of a finished run is its last epoch"
    a, b = (open_snapshot(r, 3, device="cpu").method.state_dict() for r in (run, plain))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_an_interrupted_run_writes_the_same_snapshots(run, tmp_path, monkeypatch):
    training = sys.modules["nearkin.training.loop"].Training
    step = training._one_step

    def stop(self, *batch):
        if self.step == 8:
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(sys.modules["nearkin.training.loop"], "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", stop)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**ISA, snapshots="0,2,3", out=tmp_path / "cut")
    cut = nk.train(out=tmp_path / "cut", resume=True)
    for epoch, path in kept_epochs(run).items():
        whole, again = read_tensors(path)[0], read_tensors(kept_epochs(cut)[epoch])[0]
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[key], again[key]) for key in whole), epoch


@pytest.mark.parametrize("text", ["4", "-1", "one", "1;2"])
def test_impossible_snapshots_are_refused(tmp_path, text):
    with pytest.raises(NearkinError, match="snapshots must be epochs from 0 to 3, separated by commas"):
        nk.train(**TINY, snapshots=text, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_snapshot_is_reported(run, tmp_path):
    with pytest.raises(NearkinError, match="no snapshot of epoch 1: it has 0, 2, 3"):
        open_snapshot(run, 1)
    with pytest.raises(NearkinError, match="no snapshot of epoch 1: train with --snapshots 0,1"):
        open_snapshot(RunFolder(tmp_path), 1)


def test_a_snapshot_has_the_space_of_training(tmp_path):
    run = nk.train(**TINY, space="inner", snapshots="3", out=tmp_path / "run")
    snapshot, kept = open_snapshot(run, 3, device="cpu"), nk.load(run.path, device="cpu")
    assert snapshot.model.embedder.space == snapshot.method.space == "inner"
    images = nk.load_dataset(TINY["data"]).test.sources[:6]
    x = snapshot.model.embed(images)
    assert x.norm(dim=1).std() > 1e-3
    torch.testing.assert_close(torch.nn.functional.normalize(x, dim=1), kept.embed(images))


def test_a_run_keeps_its_proxies_beside_the_model(tmp_path):
    run = nk.train(**ONE_EPOCH, method="soft_triple(per_class=3)", out=tmp_path / "run")
    known = read_classes(run.classes)
    assert known.names == tuple(nk.load_dataset(ONE_EPOCH["data"]).train.names)
    assert known.proxies.shape == (16 * 3, 8)
    assert torch.equal(known.labels, torch.arange(16).repeat_interleave(3))
    assert known.columns == {}
    assert read_json(run.config)["plan"]["method"] == "soft_triple(per_class=3)"


def test_a_method_without_proxies_writes_no_file(tmp_path):
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
