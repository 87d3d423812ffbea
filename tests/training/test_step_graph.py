"""Training steps as graphs, with the stand-in for CUDA graphs on a CPU; tests/contract has all methods."""

import gc
import io
import sys
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from contract.op_recorder import record_operations
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.methods.base import Method
from nearkin.training.launch import build_training
from nearkin.training.optimiser import make_optimiser, parameter_groups, rates_on_device, set_rates
from nearkin.training.plan import Plan, make_plan
from nearkin.training.run_config import write_config
from nearkin.training.run_folder import RunFolder
from nearkin.training.step_graph import WARM_UP, waits

launch = sys.modules["nearkin.training.launch"]

TINY = {"data": "glyphs(classes=48, samples=4)", "epochs": 3, "batch": 16, "dim": 8, "device": "cpu", "decay_every": 2}


class Capturing:
    """Counts captures and replays."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, work):
        self.captured += 1
        result, replay = record_operations(work)

        def counted():
            self.replayed += 1
            replay()

        return result, counted


def new_training(path, record=None, **settings):
    """A training that can be captured, or one of the same arithmetic without graphs."""
    plan = make_plan({**TINY, **settings}, {})
    training = build_training(RunFolder(path), plan, reporter=Reporter(Console(file=io.StringIO())))[0]
    groups = parameter_groups(plan, training.model.embedder, training.method)
    training.optimiser = torch.optim.AdamW(groups, weight_decay=plan.weight_decay, fused=True)
    rates_on_device(training.optimiser, training.device)
    if record is not None:
        training.run_step = training.graph(record)
    path.mkdir()
    write_config(training.run, plan, method=str(training.method.spec), space=training.method.ranked_in)
    return training


def state(training):
    parts = (training.model.embedder, training.method)
    tensors = [t for part in parts for t in part.state_dict().values()]
    moments = [t for values in training.optimiser.state.values() for t in values.values()]
    return [t.clone() for t in (*tensors, *moments, training.crops.get_state(), training.rng.get_state())]


@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"method": "vcpa", "warmup": 0}])
def test_a_run_from_graphs_is_the_usual_run(tmp_path, settings):
    usual, record = new_training(tmp_path / "usual", **settings), Capturing()
    graph = new_training(tmp_path / "graph", record, **settings)
    assert torch.equal(usual.train_to_end().x, graph.train_to_end().x)
    assert all(map(torch.equal, state(graph), state(usual)))
    phases = 1 + bool(graph.plan.warmup)
    assert record.captured == phases  # with the trunk frozen, and without
    assert record.replayed == graph.step - phases * (WARM_UP + 1)
    assert [e["lr"] for e in graph.run.events() if e["event"] == "epoch"] == [1e-4, 1e-4, 5e-5]


def test_the_kind_of_a_step_decides_which_graph_serves_it(tmp_path):
    record = Capturing()
    training = new_training(tmp_path / "run", record)
    training._before_first_step()
    training._begin_epoch()
    batches = training.batches()
    for _ in range(WARM_UP + 2):
        training.run_step(*next(batches))
    assert (record.captured, record.replayed) == (1, 1)
    index, pixels = next(batches)
    training.run_step(index[:8], pixels._replace(canvas=pixels.canvas[:8], size=pixels.size[:8]))
    assert (record.captured, record.replayed) == (1, 1)
    training.method.step_kind = lambda _: None
    for _ in range(WARM_UP + 2):
        training.run_step(*next(batches))
    assert (record.captured, record.replayed) == (1, 1)


class Replacing(Method):
    """A method that does what no graph may hold."""

    def __init__(self, *, reads):
        super().__init__()
        self.reads = reads
        self.register_buffer("mean", torch.zeros(()))

    def loss(self, step):
        return step.x.square().sum() * (float(step.x.detach().mean()) if self.reads else 1)

    def after_step(self, step):
        super().after_step(step)
        self.mean = self.mean + step.x.detach().mean()


def test_a_step_that_cannot_be_captured_is_an_error(tmp_path):
    training = new_training(tmp_path / "run")
    training.method = Replacing(reads=True)
    training.method.after_step = lambda _: None
    run_step, batch = training.graph(record_operations), next(training.batches())
    training._begin_epoch()
    for _ in range(WARM_UP):
        run_step(*batch)
    with pytest.raises(NearkinError, match=r"cannot be captured .*--no-graph"):
        run_step(*batch)


@pytest.mark.parametrize(("waits", "words"), [(True, "waits for the GPU in line 3"), (False, "its state 'mean'")])
def test_steps_that_no_graph_can_repeat_run_as_usual(tmp_path, monkeypatch, waits, words):
    training, said, record = new_training(tmp_path / "run"), [], Capturing()
    if waits:
        found = ["it waits for the GPU in line 3"]
        monkeypatch.setattr("nearkin.training.step_graph.waits", lambda _: nullcontext(found))
    else:
        training.method = Replacing(reads=False)
    training.reporter.note = said.append
    run_step, batch = training.graph(record), next(training.batches())
    training._begin_epoch()
    for _ in range(WARM_UP + 2):
        run_step(*batch)
    assert record.captured == 0
    (sentence,) = said
    assert words in sentence


def test_learning_rates_change_in_place():
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = make_optimiser(Plan(device="cpu"), [{"params": [weight], "lr": 0.5}])
    set_rates(optimiser, [0.25])
    assert optimiser.param_groups[0]["lr"] == 0.25
    rates_on_device(optimiser, torch.device("cpu"))
    rate = optimiser.param_groups[0]["lr"]
    set_rates(optimiser, [0.125])
    assert rate is optimiser.param_groups[0]["lr"]
    assert float(rate) == 0.125


def test_waits_for_the_device_are_listed_but_not_the_notice_of_the_mode(monkeypatch):
    def switch(mode):
        if mode == "warn":  # as PyTorch does once in a process
            warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with waits(torch.device("cuda")) as found:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert len(found) == 1
    assert "test_step_graph.py, line " in found[0]


def test_a_training_is_freed_as_soon_as_it_ends(tmp_path, monkeypatch):
    made = []

    def built(*args, **more):
        training, scale = build_training(*args, **more)
        made.append(weakref.ref(training))
        training.run_step = training.graph(record_operations)
        return training, scale

    monkeypatch.setattr(launch, "build_training", built)
    gc.collect()
    gc.disable()
    try:
        nk.train(**{**TINY, "epochs": 0}, out=tmp_path / "run")
        assert made[0]() is None
    finally:
        gc.enable()
