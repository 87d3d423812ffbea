"""Deep checks: the order of the batch, the axes of the space and the names of the classes do not matter."""

import pytest
import torch
from contract.cases import CLASSES, DIM, SURE_SPECS, STRATEGY_SPECS, batch, build, gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.method import Step

deep = settings(max_examples=12, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**20)
TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}


@st.composite
def batches(draw):
    return batch(draw(st.integers(2, 10)), classes=draw(st.integers(1, CLASSES)), seed=draw(seeds))


def orthogonal(seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(DIM, DIM, generator=rng, dtype=torch.float64))[0]


def close(a, b):
    torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("spec", SURE_SPECS)
def test_permutation_of_the_batch(spec):
    @deep
    @given(pair=batches(), data=st.data())
    def check(pair, data):
        m = build(spec).double()
        order = torch.tensor(data.draw(st.permutations(range(len(pair.y)))))
        loss, grad, own = gradients(m, *pair)
        loss2, grad2, own2 = gradients(m, pair.x[order], pair.y[order])
        close(loss2, loss)
        close(grad2, grad[order])
        for name in own:
            close(own2[name], own[name])

    check()


@pytest.mark.parametrize("spec", SURE_SPECS)
def test_rotation_of_the_space(spec):
    @deep
    @given(pair=batches(), turn=seeds)
    def check(pair, turn):
        m, turned = build(spec).double(), build(spec).double()
        q = orthogonal(turn)
        if m.proxies is not None:
            with torch.no_grad():
                turned.proxies.vectors.copy_(m.proxies.vectors @ q)
        loss, grad, own = gradients(m, *pair)
        loss2, grad2, own2 = gradients(turned, pair.x @ q, pair.y)
        close(loss2, loss)
        close(grad2, grad @ q)
        for name in own:
            close(own2[name], own[name] @ q if name == "proxies.vectors" else own[name])

    check()


@pytest.mark.parametrize("spec", SURE_SPECS)
def test_relabelling(spec):
    """Class c becomes class p[c], and takes along whatever the method holds a class: proxies, boundaries."""

    @deep
    @given(pair=batches(), names=st.permutations(range(CLASSES)))
    def check(pair, names):
        m, renamed = build(spec).double(), build(spec).double()
        new = torch.tensor(names)

        def moved(value):
            """Rows of class c to class p[c], whole groups of them."""
            if not value.ndim or len(value) % CLASSES:
                return value
            grouped = value.unflatten(0, (CLASSES, -1))
            out = torch.empty_like(grouped)
            out[new] = grouped
            return out.flatten(0, 1)

        with torch.no_grad():
            for (_, old), (_, target) in zip(m.named_parameters(), renamed.named_parameters(), strict=True):
                target.copy_(moved(old))
        loss, grad, own = gradients(m, *pair)
        loss2, grad2, own2 = gradients(renamed, pair.x, new[pair.y])
        close(loss2, loss)
        close(grad2, grad)
        for name in own:
            close(own2[name], moved(own[name]))

    check()


@pytest.mark.parametrize("spec", STRATEGY_SPECS)
def test_permutation_after_a_few_steps_of_a_strategy(spec):
    @deep
    @given(pair=batches(), data=st.data())
    def check(pair, data):
        m = build(spec).double()
        for seed in range(4):
            m.after_step(Step(*batch(seed=seed)))
        order = torch.tensor(data.draw(st.permutations(range(len(pair.y)))))
        loss, grad, _ = gradients(m, *pair)
        loss2, grad2, _ = gradients(m, pair.x[order], pair.y[order])
        close(loss2, loss)
        close(grad2, grad[order])

    check()
