"""On a GPU: no step waits for the device; training, evaluation and resume work."""

import os
import signal
import sys
import warnings

import pytest
import torch
from contract.cases import RUN_SPECS
from contract.test_replayed_steps import STEPS, GraphRun

import nearkin as nk
from nearkin.files import read_tensors
from nearkin.methods.base import Step
from nearkin.training.step_graph import cuda_graphs, own_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def no_sync():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("default")
        yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", sorted({**nk.LOSSES, **nk.STRATEGIES}))
def test_a_step_never_waits_for_the_device(name, no_sync):
    points, labels = torch.randn(24, 16, device="cuda"), torch.arange(24, device="cuda") % 12
    model = torch.nn.Linear(16, 8).cuda()
    method = nk.method(name, classes=12, dim=8).cuda().train()
    method.bind(model)

    def embed(index=None, *, augment=False):
        with torch.no_grad():
            return model(points if index is None else points[index])

    method.at_check(model, embed, labels)
    groups = [{"params": list(model.parameters()), "lr": 1e-2}, *method.groups(1e-2)]
    optimiser = torch.optim.AdamW(groups, fused=True)
    rng, index = torch.Generator("cuda").manual_seed(0), torch.arange(24, device="cuda")
    for warm in (True, False):
        if not warm:
            no_sync()
        step = Step(model(points), labels, model=model, images=points, index=index, rng=rng)
        loss = method.loss(step)
        loss.backward()
        method.after_backward(model)
        optimiser.step()
        optimiser.zero_grad()
        method.after_step(step)
    torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


@pytest.mark.parametrize("name", sorted(nk.LOSSES))
def test_the_device_computes_what_the_cpu_computes(name):
    torch.manual_seed(0)
    method = nk.method(name, classes=12, dim=8)
    x, y = torch.randn(24, 8), torch.arange(24) % 12
    here = method(x, y)
    there = method.cuda()(x.cuda(), y.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


def test_metrics_agree_with_the_cpu():
    torch.manual_seed(0)
    x, y = torch.randn(700, 16), torch.randint(50, (700,))
    metrics = ("R@1", "R@10", "P@R", "MAP@R", "nDCG@10")
    here, there = nk.evaluate(x, y, metrics=metrics), nk.evaluate(x.cuda(), y.cuda(), metrics=metrics)
    assert dict(there) == pytest.approx(dict(here), abs=0.05)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice, which is not taken
@pytest.mark.parametrize("fast", [{}, {"compile": True}, {"graph": True}, {"graph": True, "compile": True}])
def test_training_is_interrupted_and_resumes(tmp_path, monkeypatch, fast):
    settings = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cuda"}
    training = sys.modules["nearkin.training.loop"].Training
    show = training._show_status

    def interrupted(self, *status):
        if self.step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return show(self, *status)

    monkeypatch.setattr(training, "_show_status", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nk.train(**settings, **fast, out=tmp_path / "run")
    monkeypatch.undo()
    assert nk.train(out=tmp_path / "run", resume=True).result.exists()


def graph_run(spec):
    """A run whose steps are captured; its generator exists only once it is made."""
    run = GraphRun(spec, lambda work: cuda_graphs([run.rng])(work), device="cuda")
    return run


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_steps_from_a_graph_train_as_usual_ones(spec):
    runs = []
    with own_stream(torch.device("cuda")):
        for make in (graph_run, lambda spec: GraphRun(spec, device="cuda")):
            torch.manual_seed(4)
            runs.append(make(spec).steps(STEPS))
    graph, usual = runs
    assert graph.losses == pytest.approx(usual.losses, rel=1e-3)  # sums of atomic additions have no fixed order
    assert graph.host_state() == usual.host_state()
    assert torch.equal(graph.rng.get_state(), usual.rng.get_state())
    if not spec.startswith("profs(steps=2"):
        assert graph.replayed >= 1


def test_a_step_from_a_graph_never_waits_for_the_device(no_sync):
    with own_stream(torch.device("cuda")):
        run = graph_run("vcpa").steps(STEPS - 2)
        index = torch.arange(run.size)
        pixels = run.graph.recorded.pixels
        pixels = pixels._replace(canvas=pixels.canvas.clone(), size=pixels.size.clone())
        index = index.cuda()
        before = run.replayed
        no_sync()
        loss = run.run_step(index, pixels)
        torch.cuda.set_sync_debug_mode("default")
    assert run.replayed == before + 1
    assert loss.isfinite()


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop", "sgd"])
def test_a_graph_follows_the_schedule_with_every_optimiser(tmp_path, optimiser):
    settings = {"data": "glyphs(classes=48, samples=6)", "epochs": 4, "batch": 24, "dim": 16, "device": "cuda"}
    settings |= {"optimiser": optimiser, "lr": 1e-3 if optimiser != "sgd" else 0.01, "decay_every": 1}
    runs = [nk.train(**settings, graph=graph, out=tmp_path / str(graph)) for graph in (True, False)]
    losses = [[e["loss"] for e in run.events() if e["event"] == "epoch"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    crops = [read_tensors(run.checkpoint)[0]["rng.crops"] for run in runs]
    assert torch.equal(*crops)  # the graph has drawn as many numbers
