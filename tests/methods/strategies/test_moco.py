"""MoCo-PA over a sequence of batches, against a deque, plain lists of weights and the naive loss."""

from collections import deque

import pytest
import torch
from methods.strategies import oracle_vcpa as oracle
from torch import nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES

CLASSES, DIM = 4, 3
PROXY_LOSSES = [name for name in LOSSES if method(name, classes=2, dim=2).proxies is not None]


def batch(seed, size=6):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=rng), torch.randint(CLASSES, (size,), generator=rng)


def training(spec, model):
    m = method(spec, classes=CLASSES, dim=DIM)
    m.bind(model)
    return m, torch.optim.SGD([*model.parameters(), *m.parameters()], lr=0.5)


def one_step(m, model, optimiser, seed):
    images, y = batch(seed)
    step = Step(model(images), y, model=model, images=images)
    loss = m.loss(step)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    m.after_step(step)
    return loss


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("queue", [4, 10, 30])
def test_a_sequence_of_batches(momentum, queue):
    torch.manual_seed(0)
    model = nn.Linear(5, DIM)
    m, optimiser = training(f"moco(momentum={momentum}, queue={queue})", model)
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    memory = deque(maxlen=queue)
    for seed in range(7):
        images, y = batch(seed)
        queued, labels = zip(*memory, strict=True) if memory else ((), ())
        anchor = {"alpha": 32.0, "delta": 0.1, "positives": "batch"}
        proxies = m.proxies.vectors.detach()
        want = oracle.queue_loss(model(images).detach(), y, list(queued), list(labels), proxies, **anchor)
        assert one_step(m, model, optimiser, seed).item() == pytest.approx(want, rel=1e-4), seed
        for name, p in model.named_parameters():
            moved = oracle.momentum(w[name].flatten(), p.detach().flatten(), momentum)
            w[name] = torch.tensor(moved).reshape(p.shape)
        memory.extend(zip((images @ w["weight"].T + w["bias"]).tolist(), y.tolist(), strict=True))
    assert len(memory) == min(queue, 42)


def test_gradients_reach_the_batch_and_the_proxies_only():
    model = nn.Linear(5, DIM)
    m, optimiser = training("moco(queue=8)", model)
    one_step(m, model, optimiser, 0)
    images, y = batch(1)
    x = model(images).detach().requires_grad_()
    m.loss(Step(x, y)).backward()
    assert x.grad.abs().sum() > 0
    assert m.proxies.vectors.grad.abs().sum() > 0
    assert [name for name, _ in m.named_parameters()] == ["inner.proxies.vectors"]
    assert not m.memory.vectors.requires_grad


COUNT_SAMPLES = {"mpa_ap": "mpa_ap(tau=0)", "mpa_dw": "mpa_dw(tau=0)"}


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_an_empty_queue_is_the_inner_loss(name):
    """For every loss with proxies: empty slots are neither positive nor negative; some losses divide by them."""
    m = method(f"moco({COUNT_SAMPLES.get(name, name)}, queue=30)", classes=CLASSES, dim=DIM).double()
    x, y = torch.randn(6, DIM, dtype=torch.float64), batch(0)[1]
    torch.testing.assert_close(m(x, y) * (36 / 6 if name in COUNT_SAMPLES else 1), m.inner(x, y))


def test_batch_norm_of_the_momentum_network_is_its_own():
    """In train mode it normalises by the batch and keeps its own statistics; the model's are not touched."""
    model = nn.Sequential(nn.Linear(5, DIM), nn.BatchNorm1d(DIM))
    m, _ = training("moco(momentum=1, queue=6)", model)
    images, y = batch(0)
    step = Step(model(images).detach(), y, model=model, images=images)
    kept = {name: b.clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        model[0].weight += 1
    m.after_step(step)
    assert all(torch.equal(kept[name], b) for name, b in model.named_buffers())
    torch.testing.assert_close(m.memory.vectors.mean(0), torch.zeros(DIM), atol=1e-5, rtol=0)
    assert int(m.network.get_buffer("w/1/num_batches_tracked")) == 1
    assert int(model[1].num_batches_tracked) == 1


def test_state_is_in_buffers_and_only_train_mode_moves_it():
    model = nn.Linear(5, DIM)
    m, optimiser = training("moco(queue=8)", model)
    one_step(m, model, optimiser, 0)
    other, _ = training("moco(queue=8)", nn.Linear(5, DIM))
    other.load_state_dict(m.state_dict())
    assert torch.equal(other.network.get_buffer("w/weight"), m.network.get_buffer("w/weight"))
    before = {key: value.clone() for key, value in m.state_dict().items()}
    m.eval()
    images, y = batch(1)
    m.after_step(Step(model(images), y, model=model, images=images))
    assert all(torch.equal(before[key], value) for key, value in m.state_dict().items())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("moco(contrastive)", "moco needs a loss with proxies; contrastive has none"),
        ("moco(momentum=1.5)", "momentum is a number from 0 to 1, not 1.5"),
        ("moco(queue=0)", "holds at least one entry"),
        ("moco", r"call method.bind\(model\) before the first step, and pass the images"),
    ],
)
def test_unsupported_settings_are_refused(spec, sentence):
    with pytest.raises(NearkinError, match=sentence):
        method(spec, classes=CLASSES, dim=DIM).after_step(Step(torch.randn(2, DIM), torch.tensor([0, 1])))
