"""On a GPU: no step waits for the device; training, evaluation and resume work."""

import os
import signal
import sys
import warnings

import pytest
import torch

import nearkin as nk
from nearkin.methods.base import Step

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
@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_interrupted_and_resumes(tmp_path, monkeypatch, compiled):
    settings = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cuda"}
    training = sys.modules["nearkin.training.loop"].Training
    step = training._one_step

    def interrupted(self, *batch):
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *batch)

    monkeypatch.setattr(training, "_one_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nk.train(**settings, compile=compiled, out=tmp_path / "run")
    monkeypatch.undo()
    assert nk.train(out=tmp_path / "run", resume=True).result.exists()
