"""The profile of a run: exclusive times of its parts, and a trace that opens."""

import gzip
import json

import pytest
import torch

import nearkin as nk
from nearkin.training import run_profile
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_profile import Profile

SETTINGS = {"data": "glyphs(classes=48, samples=4)", "epochs": 1, "batch": 24, "dim": 8, "device": "cpu"}


def test_a_part_counts_without_the_parts_within_it(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("nearkin.training.run_profile.time.perf_counter", lambda: next(clock))
    profile = Profile(RunFolder(tmp_path), torch.device("cpu"), on=True)
    with profile.part("outer"), profile.part("inner"):
        pass
    assert profile.seconds == {"preparing": 1.0, "outer": 2.0 + 8.0, "inner": 4.0}


def test_off_it_times_nothing(tmp_path):
    profile = Profile(RunFolder(tmp_path), torch.device("cpu"), on=False)
    assert profile.part("a") is profile.part("b")
    with profile.training(range(3), settled=0):
        profile.trace(0)
    assert not profile.seconds
    assert profile.tracer is None


def test_a_run_keeps_its_table_and_a_trace_of_its_steps(tmp_path):
    run = nk.train(**SETTINGS, profile=True, out=tmp_path / "run")
    header, *rows = [line.rsplit(maxsplit=3) for line in run.profile.read_text().splitlines()]
    steps = run.read_result()["steps"]
    assert header == ["part", "seconds", "percent", "times"]
    times = {row[0]: int(row[3]) for row in rows[:-1]}
    for part in ("waiting for data", "augmentation", "forward", "loss", "backward", "optimiser", "state of the method"):
        assert times[part] == steps
    assert {"preparing", "decoding", "checks", "evaluation", "saving", "other"} <= set(times)
    seconds = [float(row[1]) for row in rows[:-1]]
    assert sum(seconds) == pytest.approx(float(rows[-1][1]), abs=0.01 * len(rows))
    events = json.loads(gzip.decompress(run.trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "forward" for event in events) == min(steps, run_profile.TRACED)
    assert sum(event["name"] == "backward" for event in events) == min(steps, run_profile.TRACED)


def test_compiling_is_a_part_of_its_own(tmp_path):
    profile = Profile(RunFolder(tmp_path), torch.device("cpu"), on=True)
    with profile.training(range(1), settled=0), profile.part("forward"):
        torch.compile(torch.sin, backend="eager")(torch.zeros(3))
    assert profile.times["compiling"] == 1
    assert profile.within == ["preparing"]


def test_an_interrupted_run_keeps_its_table(tmp_path, monkeypatch):
    def interrupted(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nearkin.training.loop.Training._one_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nk.train(**SETTINGS, profile=True, out=tmp_path / "run")
    assert "waiting for data" in RunFolder(tmp_path / "run").profile.read_text()
