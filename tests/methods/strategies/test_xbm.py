"""XBM over a sequence of batches, against a deque and the naive loss."""

from collections import deque

import oracles
import pytest
import torch

from nearkin.methods.base import Step
from nearkin.methods.catalogue import method

CLASSES, DIM = 4, 3


def batches(count, size=6):
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(size, DIM, generator=rng), torch.randint(CLASSES, (size,), generator=rng)


@pytest.mark.parametrize("inner", ["contrastive(form=c1)", "contrastive(form=c2, positive=0.1, negative=0.9)"])
@pytest.mark.parametrize(("size", "start", "weight"), [(20, 0, 1.0), (4, 0, 0.5), (9, 2, 2.0)])
def test_a_sequence_of_batches(inner, size, start, weight):
    """L = L(batch, batch) + w·L(batch, memory); the batch goes in after its step, from step `start` on."""
    m = method(f"xbm({inner}, size={size}, start={start}, weight={weight})", classes=CLASSES, dim=DIM)
    options = m.inner.spec.options
    memory = deque(maxlen=size)
    with_memory = 0
    for step, (x, y) in enumerate(batches(7)):
        want = oracles.contrastive(x.tolist(), y.tolist(), x.tolist(), y.tolist(), list(range(len(y))), **options)
        if memory:
            vectors, labels = zip(*memory, strict=True)
            want += weight * oracles.contrastive(x.tolist(), y.tolist(), vectors, labels, [-1] * len(labels), **options)
            with_memory += 1
        assert float(m.loss(Step(x, y))) == pytest.approx(want, rel=1e-5), step
        m.after_step(Step(x, y))
        if step >= start:
            memory.extend(zip(x.tolist(), y.tolist(), strict=True))
    assert with_memory == 6 - start


@pytest.mark.parametrize(
    "inner", ["contrastive(form=c2, positive=0.1, negative=0.9)", "multi_similarity(mining=False)"]
)
@pytest.mark.parametrize(("size", "start", "weight"), [(20, 0, 1.0), (4, 0, 0.5), (9, 2, 2.0)])
def test_the_code_adds_the_batch_first(inner, size, start, weight):
    """As its authors train: enqueue, then L(batch, batch) + w·L(batch, memory), where only its own copy is left out."""
    m = method(f"xbm({inner}, size={size}, start={start}, weight={weight}, reading=code)", classes=CLASSES, dim=DIM)
    m.double()
    naive, options = oracles.ORACLES[m.inner.spec.name], m.inner.spec.options
    memory = deque(maxlen=size)
    for step, (x, y) in enumerate((x.double(), y) for x, y in batches(7)):
        want = naive(x.tolist(), y.tolist(), x.tolist(), y.tolist(), list(range(len(y))), **options)
        if step >= start:
            memory.extend(zip(x.tolist(), y.tolist(), range(len(y)), strict=True))
            vectors, labels, rows = zip(*memory, strict=True)
            want += weight * naive(x.tolist(), y.tolist(), vectors, labels, rows, **options)
            memory = deque(((v, label, -1) for v, label, _ in memory), maxlen=size)
        assert float(m.loss(Step(x, y))) == pytest.approx(want, rel=1e-10), step
        m.after_step(Step(x, y))


def test_pairs_within_the_batch_count_twice_in_the_code():
    """With an empty memory the second term is the first one again."""
    x, y = next(batches(1))
    twice, once = (
        method(f"xbm(contrastive(form=c1), size=50, start=0, reading={r})", classes=CLASSES, dim=DIM)
        for r in ("code", "text")
    )
    torch.testing.assert_close(twice(x, y), 2 * once(x, y))


def test_gradients_reach_the_batch_only():
    m = method("xbm(contrastive(form=c1), size=8, start=0)", classes=CLASSES, dim=DIM)
    x, y = next(batches(1))
    m.after_step(Step(x.requires_grad_(), y))
    fresh = torch.randn(6, DIM).requires_grad_()
    m.loss(Step(fresh, y)).backward()
    assert fresh.grad is not None
    assert fresh.grad.abs().sum() > 0
    assert x.grad is None
    assert list(m.parameters()) == []


def test_the_counter_is_state():
    m = method("xbm(contrastive, size=8, start=2)", classes=CLASSES, dim=DIM)
    for x, y in batches(2):
        m.after_step(Step(x, y))
    loaded = method("xbm(contrastive, size=8, start=2)", classes=CLASSES, dim=DIM)
    loaded.load_state_dict(m.state_dict())
    x, y = next(batches(1))
    loaded.after_step(Step(x, y))
    assert (loaded.memory.labels >= 0).sum() == 6, "the third step is the first that is remembered"
