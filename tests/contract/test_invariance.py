"""The order of the batch, the axes of the space and the numbering of classes do not matter."""

import pytest
import torch
from contract.cases import (
    CLASSES,
    DETERMINISTIC_SPECS,
    DIM,
    LOSSES,
    METHOD_SPECS,
    RUN_SPECS,
    STRATEGY_SPECS,
    Run,
    batch,
    build,
    gradients,
    step_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

deep = settings(max_examples=8, deadline=None, derandomize=True, database=None)
brief = settings(deep, max_examples=3)  # for the settings beside a loss's default
seeds = st.integers(0, 2**20)


@st.composite
def batches(draw):
    return batch(draw(st.integers(2, 10)), classes=draw(st.integers(1, CLASSES)), seed=draw(seeds))


def rotation(seed):
    """A random orthogonal matrix; the identity for seed 0, to which a failing example shrinks."""
    if not seed:
        return torch.eye(DIM, dtype=torch.float64)
    rng = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(DIM, DIM, generator=rng, dtype=torch.float64))[0]


def by_class(value, new):
    """Move the parameters of class c to class new[c]: K rows of proxies, one entry of parameters per class."""
    grouped = value.unflatten(0, (CLASSES, -1))
    out = torch.empty_like(grouped)
    out[new] = grouped
    return out.flatten(0, 1)


def close(a, b):
    assert torch.allclose(a, b, rtol=1e-8, atol=1e-9), (a, b)


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_order_axes_and_names_do_not_matter(spec):
    """Batch permuted, space rotated, classes renamed, all at once: the same loss, and gradients moved likewise."""
    m, other = build(spec).double(), build(spec).double()

    @(deep if spec in LOSSES else brief)
    @given(pair=batches(), data=st.data(), turn=seeds, names=st.permutations(range(CLASSES)))
    def check(pair, data, turn, names):
        order = torch.tensor(data.draw(st.permutations(range(len(pair.y)))))
        q, new = rotation(turn), torch.tensor(names)

        def moved(name, value):
            value = by_class(value, new)
            return value @ q if name == "proxies.vectors" else value

        with torch.no_grad():
            for (name, old), target in zip(m.named_parameters(), other.parameters(), strict=True):
                target.copy_(moved(name, old))
        loss, grad, own = gradients(m, *pair)
        loss2, grad2, own2 = gradients(other, pair.x[order] @ q, new[pair.y[order]])
        close(loss2, loss)
        close(grad2, grad[order] @ q)
        for name in own:
            close(own2[name], moved(name, own[name]))

    check()


@pytest.mark.parametrize("spec", STRATEGY_SPECS)
def test_order_does_not_matter_after_a_few_steps_of_a_strategy(spec):
    m = build(spec).double()
    for seed in range(4):
        m.after_step(step_of(*batch(seed=seed)))

    @deep
    @given(pair=batches(), data=st.data())
    def check(pair, data):
        order = torch.tensor(data.draw(st.permutations(range(len(pair.y)))))
        loss, grad, _ = gradients(m, *pair)
        loss2, grad2, _ = gradients(m, pair.x[order], pair.y[order])
        close(loss2, loss)
        close(grad2, grad[order])

    check()


NARROW = (torch.int32, torch.int16, torch.uint8, torch.uint16)


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_the_integer_type_of_labels_does_not_matter(spec):
    """Up to class 255, whose uint8 is the −1 of an empty slot."""

    def outcome(dtype):
        m = build(spec, classes=256)
        torch.manual_seed(0)
        for seed in (1, 0):  # the last batch has class 255
            x, y = batch(seed=seed, dtype=torch.float32)
            step = step_of(x.requires_grad_(), (255 - y).to(dtype))
            m.loss(step).backward()
            m.after_step(step)
        loss, gradient, own = gradients(m, x, (255 - y).to(dtype))
        return [loss, gradient, x.grad, *own.values(), *m.state_dict().values()]

    expected = outcome(torch.int64)
    for dtype in NARROW:
        for a, b in zip(outcome(dtype), expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), dtype


@pytest.mark.parametrize("spec", [*RUN_SPECS, "proxy_anchor(initial=means, per_class=2)"])
def test_the_integer_type_of_labels_does_not_matter_to_a_run(spec):
    """Batches and checks get the labels of the whole training set."""

    def run(dtype):
        out = Run(spec)
        out.blobs = out.blobs._replace(labels=out.blobs.labels.to(dtype))
        return out.steps(2)

    expected = run(torch.int64)
    for dtype in NARROW:
        found = run(dtype)
        assert found.losses == expected.losses, dtype
        assert all(torch.equal(v, found.method.state_dict()[k]) for k, v in expected.method.state_dict().items())
