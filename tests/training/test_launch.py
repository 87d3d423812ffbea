"""Folders of runs: one process per folder, and nothing of another run in it."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.files import read_json, write_json, write_lock
from nearkin.training.cross_validation import cross_validate

TINY = {
    "data": "glyphs(classes=12, samples=4)",
    "backbone": "conv4",
    "batch": 8,
    "dim": 4,
    "epochs": 1,
    "device": "cpu",
}


def interrupt(out, *, steps=2, **settings):
    """Train a run that is interrupted after some steps, with a checkpoint left behind."""
    launch = sys.modules["nearkin.training.launch"]
    original, done = launch.Training._one_step, []

    def one_step(self, *batch):
        done.append(1)
        if len(done) > steps:
            raise KeyboardInterrupt
        return original(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Training, "_one_step", one_step)
        patch.setattr(sys.modules["nearkin.training.loop"], "SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            nk.train(out=out, **{**TINY, **settings})


def test_runs_started_together_get_folders_of_their_own(tmp_path):
    code = "import json, sys; import nearkin as nk; print(nk.train(**json.loads(sys.argv[1])).path)"
    rates = (0.001, 0.002, 0.003)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**TINY, "lr": lr})],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for lr in rates
    ]
    paths = [tmp_path / process.communicate()[0].decode().split()[-1] for process in started]
    assert len(set(paths)) == len(rates)
    for path, lr in zip(paths, rates, strict=True):
        assert read_json(path / "config.json")["plan"]["lr"] == lr
        assert [json.loads(line)["event"] for line in (path / "log.jsonl").read_text().splitlines()] == [
            "test",
            "epoch",
        ]


@pytest.mark.parametrize("work", [nk.train, cross_validate])
def test_a_folder_in_use_is_refused_by_the_number_of_the_process(tmp_path, work):
    with write_lock(tmp_path), pytest.raises(nk.NearkinError, match=f"Process {os.getpid()} is writing to"):
        work(out=tmp_path, **TINY)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("folds", [0, 2])
def test_a_run_that_is_being_resumed_is_refused(tmp_path, folds):
    interrupt(tmp_path / "run", folds=folds, epochs=3)
    log = (tmp_path / "run" / ("fold-1" if folds else "") / "log.jsonl").read_text()
    with write_lock(tmp_path / "run"), pytest.raises(nk.NearkinError, match="is writing to"):
        nk.train(out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / ("fold-1" if folds else "") / "log.jsonl").read_text() == log


def test_a_run_holds_its_lock_while_it_trains(tmp_path, monkeypatch):
    launch = sys.modules["nearkin.training.launch"]
    original, seen = launch.Training._one_step, []

    def one_step(self, *batch):
        with pytest.raises(nk.NearkinError, match="is writing to"), write_lock(tmp_path / "run"):
            pass
        seen.append(1)
        return original(self, *batch)

    monkeypatch.setattr(launch.Training, "_one_step", one_step)
    nk.train(out=tmp_path / "run", **TINY)
    assert seen
    with write_lock(tmp_path / "run"):
        pass  # it is free afterwards


def test_a_new_run_refuses_the_checkpoint_of_another(tmp_path):
    interrupt(tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(
        nk.NearkinError,
        match=r"files of another run \(before.safetensors, checkpoint.safetensors, log.jsonl, settings.toml\)",
    ):
        nk.train(out=tmp_path / "run", **{**TINY, "lr": 0.01})
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path):
    interrupt(tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    write_json(tmp_path / "run" / "config.json", config | {"plan": config["plan"] | {"lr": 0.5}})
    with pytest.raises(nk.NearkinError, match="written with another lr than"):
        nk.train(out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "result.json").exists()


def test_moved_data_and_another_device_are_no_other_settings(tmp_path):
    interrupt(tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    moved = {"data": TINY["data"].replace(" ", ""), "device": "auto"}
    write_json(tmp_path / "run" / "config.json", config | {"plan": config["plan"] | moved})
    resumed = nk.train(out=tmp_path / "run", resume=True)
    whole = nk.train(out=tmp_path / "whole", **TINY)
    a, b = (nk.load(run.path).embedder.state_dict() for run in (resumed, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_settings_that_cannot_work_leave_nothing_behind(tmp_path):
    (tmp_path / "notes.txt").touch()
    for out in (tmp_path, tmp_path / "new"):
        with pytest.raises(nk.NearkinError, match="does not divide"):
            nk.train(out=out, **{**TINY, "batch": 9}, images_per_class=2)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_number_of_threads_is_said_when_a_run_resumes(tmp_path):
    interrupt(tmp_path / "run")
    said, threads = io.StringIO(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        nk.train(out=tmp_path / "run", resume=True, reporter=Reporter(Console(file=said, width=200)))
    finally:
        torch.set_num_threads(threads)
    assert f"started with {threads} threads and resumes with {threads + 1}" in said.getvalue()
    assert read_json(tmp_path / "run" / "result.json")["threads"] == threads + 1
