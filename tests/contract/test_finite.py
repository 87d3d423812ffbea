"""Values and gradients are finite for odd batches, extreme inputs and missing references."""

import pytest
import torch
from contract.cases import (
    CLASSES,
    DIM,
    LARGE_SPECS,
    LOSS_SPECS,
    METHOD_SPECS,
    PAIR_SPECS,
    STRATEGY_SPECS,
    batch,
    build,
    gradients,
    spec_of,
    step_of,
    value,
)
from torch.utils._python_dispatch import TorchDispatchMode

from nearkin.errors import NearkinError
from nearkin.methods import relation
from nearkin.methods.losses import LOSSES
from nearkin.methods.relation import EMPTY, References, relate
from nearkin.space import Space

FLOAT32 = torch.float32


def random(size=8):
    return batch(size, dtype=FLOAT32)


def one_class():
    return random().x, torch.ones(8, dtype=torch.int64)


def all_different():
    return random(CLASSES).x, torch.arange(CLASSES)


def duplicates():
    return random().x[[0, 0, 0, 0, 1, 1, 1, 1]], torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])


def opposites():
    x = random(2).x
    return torch.cat([x, -x, x, -x]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def zeros():
    return torch.zeros(6, DIM), torch.tensor([0, 0, 1, 1, 2, 3])


def some_zeros():
    x, y = random()
    x[::3] = 0
    return x, y


def axes():
    """Exactly orthogonal, equal and opposite unit vectors: s is exactly 0, 1 and −1."""
    return torch.cat([torch.eye(DIM), torch.eye(DIM), -torch.eye(DIM)])[:10], torch.arange(10) % 3


SITUATIONS = {
    "one class": one_class,
    "all different": all_different,
    "duplicates": duplicates,
    "opposites": opposites,
    "zero vectors": zeros,
    "some zero vectors": some_zeros,
    "axes": axes,
    "one sample": lambda: random(1),
    "two of a class": lambda: (random(2).x, torch.tensor([1, 1])),
    "two of two classes": lambda: (random(2).x, torch.tensor([1, 2])),
    "very long": lambda: (random().x * 1e6, random().y),
    "very short": lambda: (random().x * 1e-12, random().y),
}


def check(loss, *grads, where=""):
    assert loss.ndim == 0
    assert loss.isfinite(), where
    for grad in grads:
        assert grad is None or grad.isfinite().all(), where


def check_method(m, x, y, where=""):
    loss, grad, own = gradients(m, x, y)
    assert loss.dtype == FLOAT32
    check(loss, grad, *own.values(), where=where)


@pytest.mark.parametrize("spec", LOSS_SPECS + LARGE_SPECS)
def test_odd_batches(spec):
    m = build(spec)
    for name, situation in SITUATIONS.items():
        if name != "very long" or m.space != "inner":  # products of 1e12: test_long_inner_products has the range
            check_method(m, *situation(), name)


@pytest.mark.parametrize("spec", LOSS_SPECS + LARGE_SPECS)
def test_samples_on_and_opposite_to_proxies(spec):
    m = build(spec)
    if getattr(m, "proxies", None) is None:
        x = random(CLASSES).x
        check_method(m, torch.cat([x, x, -x]), torch.arange(CLASSES).repeat(3))
        return
    x = m.proxies.vectors.detach()[:: m.proxies.per_class]
    check_method(m, torch.cat([x, -x]), torch.arange(CLASSES).repeat(2))
    check_method(m, torch.cat([x, -x]), (torch.arange(CLASSES).repeat(2) + 1) % CLASSES)


@pytest.mark.parametrize("spec", LOSS_SPECS)
def test_long_inner_products(spec):
    """Unnormalised: s itself reaches ±3 (±100 at α = 32) and ±100, for positives and negatives."""
    m = build(spec, space="inner")
    x, y = random()
    x = torch.cat([x, -x])
    y = torch.cat([y, y])
    r = relate(x, y, m.references(x, y), Space.INNER)
    for largest in (3.0, 100.0):
        factor = largest / float(r.s.detach().abs().max())
        check_method(m, x * (factor if getattr(m, "proxies", None) is not None else factor**0.5), y, largest)


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_low_precision_input_is_raised_and_leaves_the_state(spec):
    m = build(spec)
    before = {name: value.dtype for name, value in m.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float16):
        x, y = random()
        x = x.to(dtype)
        loss, grad, own = gradients(m, x, y)
        assert loss.dtype == FLOAT32
        assert grad.dtype == dtype
        check(loss, grad, *own.values())
        assert torch.equal(loss, value(m, x.float(), y).detach())
        m.after_step(step_of(x, y))
        assert {name: value.dtype for name, value in m.state_dict().items()} == before


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_zero_and_tiny_float16_embeddings_have_finite_gradients(spec):
    """A float16 ends at 65504; the value is that of float32, and so is the gradient of norms from 0.01 on."""
    m = build(spec)
    x, y = random()
    direction = torch.nn.functional.normalize(x, dim=1)
    for length in (0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        h = (direction * length).half()
        loss, grad, own = gradients(m, h, y)
        assert grad.dtype == torch.float16
        check(loss, grad, *own.values(), where=length)
        assert torch.equal(loss, value(m, h.float(), y).detach())
    h = (direction * 0.011).half()
    expected = gradients(m, h.float(), y)[1]
    rounding = 4e-3 * float(expected.abs().max())  # a batch that is its own reference sums two float16 gradients
    torch.testing.assert_close(gradients(m, h, y)[1].float(), expected, rtol=4e-3, atol=rounding + 1e-6)


@pytest.mark.parametrize("space", ["euclidean", "inner"])
@pytest.mark.parametrize("spec", LOSS_SPECS)
def test_long_embeddings_are_finite_or_refused(spec, space):
    m = build(spec, space=space)
    x, y = random()
    direction = torch.nn.functional.normalize(x, dim=1)
    for power in (2, 4, 6, 7):
        check_method(m, direction * 10.0**power, y, power)
    for power in (8, 9, 12, 15, 18, 25):
        with pytest.raises(NearkinError, match=rf"^In space {space} embedding norms must be below 5e\+07; got"):
            m(direction * 10.0**power, y)


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_embeddings_of_another_dimension_are_refused_by_methods_that_hold_vectors(spec):
    m = build(spec)
    x, y = batch(dim=DIM + 3, dtype=FLOAT32)
    if not any(isinstance(getattr(part, "vectors", None), torch.Tensor) for part in m.modules()):
        check(m(x, y))
        return
    with pytest.raises(
        NearkinError, match=r"^This method takes embeddings of 4 dimensions, not 7: build it with dim=7\.$"
    ):
        m(x, y)


@pytest.mark.parametrize("name", LOSSES)
def test_one_class_in_all(name):
    m = build(name, classes=1)
    for size in (1, 4):
        check_method(m, random(size).x, torch.zeros(size, dtype=torch.int64))


@pytest.mark.parametrize("name", LOSSES)
def test_a_hundred_thousand_classes(name):
    few = {"per_class": 2} if "per_class" in build(name).spec.options else {}
    m = build(spec_of(name, few), classes=100_000, dim=2)
    y = torch.tensor([0, 0, 99_999, 99_999, 5])
    check_method(m, batch(5, dim=2, dtype=FLOAT32).x, y)


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_empty_memory_slots(spec):
    """A memory that is not full yet: the content of an empty slot changes neither value nor gradient."""
    m = build(spec)
    x, y = random()
    x.requires_grad_()
    v = torch.randn(5, DIM, generator=torch.Generator().manual_seed(2))
    for filled in (0, 1, 3):
        labels = y[:5].clone()
        labels[filled:] = EMPTY
        outcomes = []
        for fill in (0.0, 1.0):
            v[filled:] = fill
            loss = m.objective(relate(x, y, References(v, labels), m.space))
            outcomes.append((loss.detach(), *torch.autograd.grad(loss, x)))
            check(*outcomes[-1])
        if filled:
            outcomes.append((m.objective(relate(x, y, References(v[:filled], labels[:filled]), m.space)).detach(),))
        for outcome in outcomes[1:]:
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(outcome, outcomes[0], strict=False))


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_references_of_one_kind(spec):
    """Only positives, only negatives: rows and columns with nothing on the other side."""
    m = build(spec)
    x, _ = random()
    v = torch.randn(5, DIM, generator=torch.Generator().manual_seed(2))
    for label in (0, 1):
        x.requires_grad_().grad = None
        refs = References(v, torch.full((5,), label))
        loss = m.objective(relate(x, torch.zeros(8, dtype=torch.int64), refs, m.space))
        loss.backward()
        check(loss.detach(), x.grad)


@pytest.mark.parametrize("spec", STRATEGY_SPECS)
def test_strategies_over_a_few_odd_batches(spec):
    for name, situation in SITUATIONS.items():
        m = build(spec)
        for _ in range(4):
            x, y = situation()
            check_method(m, x, y, name)
            m.after_step(step_of(x, y))
        check_method(m, *random(), name)


class NoSync(TorchDispatchMode):
    """Refuses operations that sync a GPU with its host: reading a value, and shapes that depend on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert not name.lstrip("_").startswith(tuple(n.lstrip("_") for n in self.NAMES)), f"{name} is a host sync"
        if name.startswith(("index.", "index_put", "_index_put")):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask is a host sync"
        return func(*args, **(kwargs or {}))


def test_host_syncs_are_seen():
    t = torch.ones(3)
    for sync in (lambda: t[0].item(), lambda: bool(t.any()), lambda: t[t > 0], lambda: t.nonzero(), lambda: t.unique()):
        with NoSync(), pytest.raises(AssertionError, match="host sync"):
            sync()


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_the_step_reads_nothing_back_to_the_host(spec, monkeypatch):
    """Loss, backward and state, as on a GPU; `forward` also checks labels if they are on the CPU."""
    monkeypatch.setattr(relation, "reading_waits", lambda t: True)  # noqa: ARG005
    m = build(spec)
    x, y = random()
    step = step_of(x.requires_grad_(), y)
    with NoSync():
        m.loss(step).backward()
        m.after_step(step)
