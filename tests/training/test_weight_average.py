"""The running mean of the weights: its values; it is what is measured and kept; it resumes bit for bit."""

import pytest
import torch
from torch import nn

import nearkin as nk
from nearkin.files import read_tensors
from nearkin.training import loop
from nearkin.training.weight_average import WeightAverage

TINY = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cpu"}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_the_mean_of_all_steps_and_the_one_that_forgets():
    for decay in (1.0, 0.5):
        net = network().double()
        average, values, expected = WeightAverage(net, decay), [], torch.zeros(2, 2).double()
        for step in range(1, 6):
            with torch.no_grad():
                net[0].weight.fill_(step**2)
                net[1].running_mean.fill_(step)
            average.add(step)
            values.append(step**2)
            weight = max(1 - decay, 1 / step)
            expected = expected + weight * (step**2 - expected)
        with average.shown():
            torch.testing.assert_close(net[0].weight, expected)
            if decay == 1:
                torch.testing.assert_close(net[0].weight[0, 0].item(), sum(values) / 5)
                torch.testing.assert_close(net[1].running_mean[0].item(), 3.0)
        assert net[0].weight[0, 0] == 25, "training continues with its own weights"
        with average.shown():
            torch.testing.assert_close(net[0].weight, expected)


def test_a_run_keeps_the_mean_of_its_last_epochs_and_trains_as_without_it(tmp_path, monkeypatch):
    states = []
    step = loop.Training._one_step

    def watched(self, *batch):
        loss = step(self, *batch)
        states.append({k: v.clone().double() for k, v in self.model.embedder.state_dict().items()})
        return loss

    monkeypatch.setattr(loop.Training, "_one_step", watched)
    run = nk.train(**TINY, average=1.0, average_from=1, out=tmp_path / "mean")
    kept, seen = read_tensors(run.model)[0], len(states)
    for name, value in kept.items():
        if value.is_floating_point():
            mean = torch.stack([state[name] for state in states[seen // 3 :]]).mean(0)
            torch.testing.assert_close(value.double(), mean, atol=1e-5, rtol=1e-5)
    plain = read_tensors(nk.train(**TINY, out=tmp_path / "plain").model)[0]
    assert all(torch.equal(states[seen - 1][name], value.double()) for name, value in plain.items())
    assert not all(torch.equal(kept[name], value) for name, value in plain.items())


@pytest.mark.parametrize("more", [{}, {"select": "validation"}])
def test_it_resumes_bit_for_bit(tmp_path, monkeypatch, more):
    settings = {**TINY, **more, "average": 0.9, "average_from": 1}
    whole = nk.train(**settings, out=tmp_path / "whole")
    step, at = loop.Training._one_step, 2 * whole.read_result()["steps"] // 3 + 1

    def stop(self, *batch):
        if self.step == at:
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_one_step", stop)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings, out=tmp_path / "cut")
    cut = nk.train(out=tmp_path / "cut", resume=True)
    first, second = read_tensors(whole.model)[0], read_tensors(cut.model)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert cut.read_result()["scores"] == whole.read_result()["scores"]


def test_a_mean_that_never_begins_is_refused(tmp_path):
    with pytest.raises(nk.NearkinError, match="average_from must be below epochs=3"):
        nk.train(**TINY, average=0.9, average_from=3, out=tmp_path / "run")
