"""Training by several ranks: the same model as by one, one folder, and a rank that is lost."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from contract.processes import on_ranks
from torch import nn

import nearkin as nk
from nearkin import cli, ranks
from nearkin.files import read_json, read_tensors
from nearkin.training import loop
from nearkin.training.checkpoint import read_classes
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_opening import Interrupted

DATA = "glyphs(classes=48, samples=6)"
SETTINGS = {"data": DATA, "epochs": 3, "batch": 27, "dim": 8, "size": 24, "device": "cpu", "batch_norm": "train"}
SETTINGS |= {"warmup": 1, "lr": 1e-3, "images_per_class": 3}


class DoubleNet(nn.Module):
    """A small network in float64, in which sums of another order agree to 1e-9."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(ranks.rank())  # other weights on each rank, as in a script that sets no seed
        parts = [nn.Conv2d(3, 6, 5, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, bias=False)]
        self.parts = nn.Sequential(*parts, nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.parts(x.double())


def train(out, **settings):
    """Train in float64."""
    torch.set_default_dtype(torch.float64)
    return nk.train(out=out, backbone=DoubleNet().double(), **settings)


def assert_same(a, b, tolerance=1e-9, without="none"):
    (mine, _), (theirs, _) = read_tensors(RunFolder(a).checkpoint), read_tensors(RunFolder(b).checkpoint)
    assert mine.keys() == theirs.keys()
    assert any(name.endswith("running_mean") for name in mine)
    for name, t in mine.items():
        if name.startswith(without):
            continue
        torch.testing.assert_close(theirs[name].double(), t.double(), rtol=tolerance, atol=tolerance, msg=name)


CASES = {
    "moco": {"method": "moco(momentum=0.5, queue=40)", "clip_norm": 1.0, "average": 0.5},
    "profs": {"method": "profs(steps=2, weight=0.1, plain_representatives=True)", "select": "validation"},
    "ccp": {"method": "ccp(per_class=1, pool=2, every=1, anchors=samples)", "augment": "jitter"},
    "folds": {"method": "vcpa", "folds": 2, "epochs": 2},
    "cut": {"method": "vcpa(soft_triple(per_class=2), newton=False, steps=2)", "cut_proxies": True, "clip_norm": 1.0},
    "view": {"method": "multi_similarity", "test_view": "auto", "snapshots": "0,3", "evaluate_every": 1},
}


def train_all(folder):
    """Train every case; return what each rank was told, and what it read."""
    points = []
    for name, more in CASES.items():
        log = lambda values, step: points.append((step, *values))  # noqa: E731
        run = train(folder / name, **{**SETTINGS, **more}, log=log)
        assert read_json(run.result)["steps"]
    return points


def test_two_ranks_train_what_one_does(tmp_path):
    (alone,) = on_ranks(1, train_all, tmp_path / "1")
    first, other = on_ranks(2, train_all, tmp_path / "2")
    assert alone == first
    assert other == []
    for name in CASES:
        parts = [p.name for p in (tmp_path / "1" / name).rglob("config.json")]
        assert parts
        for one in [tmp_path / "1" / name, *(tmp_path / "1" / name).glob("fold-*")]:
            two = tmp_path / "2" / one.relative_to(tmp_path / "1")
            assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
            if (one / "checkpoint.safetensors").exists():
                assert_same(one, two)
            known = [read_classes(RunFolder(each).classes) for each in (one, two)]
            assert len({None if each is None else each.proxies.shape for each in known}) == 1
            for column, values in {} if known[0] is None else known[0].columns.items():
                torch.testing.assert_close(known[1].columns[column], values, msg=column)
            scores = [read_json(RunFolder(each).result)["scores"] for each in (one, two)]
            assert scores[0] == scores[1]


def train_until_killed(out, last, resume):
    """Train and save every step; the last rank is gone after step `last`."""
    loop.SAVE_SECONDS = 0

    def lose(self, _):
        if ranks.rank() == ranks.size() - 1 and self.step == last:
            os._exit(1)

    loop.Training._show_status = lose
    train(out, **({"resume": True} if resume else {**SETTINGS, **KILLED}))


def train_to_end(out, other):
    train(out, resume=True)
    train(other, **{**SETTINGS, **KILLED})


KILLED = {"method": "ccp(contrastive(negative=1), per_class=2, pool=3, every=1)", "cut_proxies": True}
KILLED |= {"check_every": 2, "images_per_class": 0, "batch": 29}


def test_a_run_that_lost_a_rank_resumes_on_another_number_of_ranks(tmp_path):
    out, other = tmp_path / "killed", tmp_path / "whole"
    for count, last in ((2, 4), (3, 9)):
        with pytest.raises(AssertionError, match=r"Rank 0 stopped, because another rank did .*: resume from the last"):
            on_ranks(count, train_until_killed, out, last, count > 2)
        about = read_tensors(RunFolder(out).checkpoint)[1]
        assert about["step"] == last - 1
    on_ranks(1, train_to_end, out, other)
    assert_same(out, other)


def refused_and_interrupted(folder):
    """What each rank says to settings that rank 0 refuses, and to a signal that one of them receives."""
    said, steps = [], []
    (folder / "full").mkdir(parents=True, exist_ok=True)
    (folder / "full" / "config.json").write_text("{}")
    for more in ({"out": folder / "full"}, {"out": folder / "small", "batch": 1}):
        try:
            nk.train(**{**SETTINGS, **more})
        except nk.NearkinError as error:
            said.append((type(error).__name__, str(error)))
    sys.argv = ["nearkin", "methods"]
    with pytest.raises(nk.NearkinError, match="nearkin methods runs as one process: start it without torchrun"):
        cli._join_ranks()

    def log(self, *_):
        steps.append(self.step)
        if ranks.rank() == 1 and len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.Training._show_status = log
    try:
        nk.train(out=folder / "run", **SETTINGS)
    except Interrupted as interrupt:
        said.append(interrupt.folder)
    return said, steps


def test_all_ranks_stop_together(tmp_path):
    first, other = on_ranks(2, refused_and_interrupted, tmp_path)
    (kind, full), (_, small), stopped = first[0]
    assert kind == "NearkinError"
    assert "already holds a run" in full
    assert "A batch of 1 has too few images for 2 processes" in small
    assert other[0] == [("ToldError", full), ("NearkinError", small), stopped]
    assert stopped == tmp_path / "run"
    assert not (tmp_path / "small").exists()
    assert first[1] == other[1] == [1, 2, 3, 4]
    assert read_tensors(RunFolder(stopped).checkpoint)[1]["step"] == 4


def torchrun(count, *arguments):
    numbers = ["--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, "-m", "torch.distributed.run", *numbers, "-m", "nearkin", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    return done


def test_torchrun_trains_one_model(tmp_path):
    # In float32 an order of sums shows: Adam would enlarge gradients that are 0 but for rounding, and so do many steps.
    settings = {**SETTINGS, "epochs": 2, "lr": 1e-4, "optimiser": "sgd", "backbone": "conv4", "size": 0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = torchrun(2, "train", *flags, "--out", tmp_path / "2")
    nk.train(out=tmp_path / "1", **settings)
    assert done.stdout.count("Run folder:") == done.stdout.count("epoch 2/2") == 1
    assert len(RunFolder(tmp_path / "2").events()) == len(RunFolder(tmp_path / "1").events())
    assert_same(tmp_path / "1", tmp_path / "2", 1e-5, without="optimiser.")
    again = torchrun(2, "train", "--resume", "--out", tmp_path / "2")
    assert again.stdout.count("Run folder:") == again.stdout.count("Nearest neighbours") == 1
    two, one = torchrun(2, "eval", tmp_path / "2", "--json"), read_json(RunFolder(tmp_path / "2").result)
    assert json.loads(two.stdout)["scores"] == one["scores"]
