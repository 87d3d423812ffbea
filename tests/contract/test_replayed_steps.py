"""Steps replayed as a CUDA graph replays them train as the usual ones, bit for bit, for every method."""

import pytest
import torch
from contract.cases import RUN_SPECS, Run
from contract.op_recorder import record_operations
from contract.test_state import assert_same

from nearkin.data.pixels.tiles import Pixels
from nearkin.methods.base import Step
from nearkin.training.optimiser import rates_on_device, set_rates
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_profile import Profile
from nearkin.training.step_graph import StepGraph

STEPS = 9


class GraphRun(Run):
    """The loop of the contract tests, on any device, with an optimiser and learning rates that can be captured.

    `record` captures a step; without it all steps run as usual.
    """

    def __init__(self, spec, record=None, *, device="cpu"):
        super().__init__(spec)
        self.on_host, self.blobs = self.blobs, type(self.blobs)(*(t.to(device) for t in self.blobs))
        self.rng = torch.Generator(device).manual_seed(9)
        self.model.to(device)
        self.method.to(device)
        groups = [{"params": group["params"], "lr": group["lr"]} for group in self.optimiser.param_groups]
        self.optimiser = torch.optim.Adam(groups, fused=True, capturable=device != "cpu")
        rates_on_device(self.optimiser, torch.device(device))
        profile = Profile(RunFolder("unused"), torch.device(device), on=False)
        self.captured = self.replayed = 0

        def counting(work):
            self.captured += 1
            result, replay = record(work)
            return result, lambda: (replay(), setattr(self, "replayed", self.replayed + 1))

        self.graph = StepGraph(self.one_step, self.method, profile, counting, phase=lambda: None, note=print)
        self.run_step = self.graph if record is not None else self.one_step

    def one_step(self, index, pixels):
        self.optimiser.zero_grad()
        points, index = pixels.canvas.flatten(1), index.to(pixels.canvas.device)
        x, y = self.model(points), self.blobs.labels[index]
        step = Step(x, y, model=self.model, images=points, index=index, rng=self.rng)
        loss = self.method.loss(step)
        loss.backward()
        self.method.after_backward(self.model)
        self.optimiser.step()
        self.method.after_step(step)
        return loss.detach()

    def steps(self, count):
        if not self.done:
            self.method.at_check(self.model, self.embed, self.blobs.labels)
        batches = self.method.batches(self.on_host.labels, self.size, seed=3, start=self.done)
        for _ in range(count):
            index = next(batches)
            points = self.blobs.points[index.to(self.blobs.points.device)]
            pixels = Pixels(points[:, None, None], torch.zeros(len(index), 2, dtype=torch.int64, device=points.device))
            self.losses.append(float(self.run_step(index, pixels)))
            self.done += 1
            if self.done == STEPS - 2:  # as at the end of an epoch
                self.method.at_check(self.model, self.embed, self.blobs.labels, score=50.0)
                set_rates(self.optimiser, [0.01 for _ in self.optimiser.param_groups])
                self.method.groups(0.01)
        return self

    def host_state(self):
        """All that the modules of the method hold besides tensors and modules."""
        plain = (bool, int, float, str, tuple, type(None))
        return [
            {k: v for k, v in vars(m).items() if type(v) in plain and k not in ("bound", "_lacks")}
            for m in self.method.modules()
        ]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("nearkin.methods.relation.reading_waits", lambda _: True)


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_replayed_steps_train_as_usual_ones(spec):
    torch.manual_seed(4)
    usual = GraphRun(spec).steps(STEPS)
    torch.manual_seed(4)
    graph = GraphRun(spec, record_operations).steps(STEPS)
    assert graph.losses == usual.losses
    assert_same(graph.model.state_dict(), usual.model.state_dict())
    assert_same(graph.method.state_dict(), usual.method.state_dict())
    for theirs, ours in zip(graph.optimiser.state.values(), usual.optimiser.state.values(), strict=True):
        assert_same(theirs, ours)
    assert torch.equal(graph.rng.get_state(), usual.rng.get_state())
    assert graph.host_state() == usual.host_state()
    if not spec.startswith("profs(steps=2"):  # every second step of which is the last of a projection
        assert graph.captured >= 1
        assert graph.replayed >= 1
