"""Gradients reach what they should, and are those of the value."""

import inspect

import oracles
import pytest
import torch
from contract.cases import DETERMINISTIC_SPECS, STRATEGY_SPECS, batch, build, gradients, oracle, step_of

from nearkin.methods.relation import batch_references
from nearkin.spec import parse


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_they_reach_embeddings_and_parameters(spec):
    m = build(spec).double()
    _, grad, own = gradients(m, *batch(12))
    assert grad.abs().sum() > 0
    for name, g in own.items():
        assert g is not None, name
        assert g.abs().sum() > 0, name


@pytest.mark.parametrize("spec", STRATEGY_SPECS)
def test_they_reach_embeddings_through_a_strategy(spec):
    m = build(spec).double()
    for seed in range(3):
        x, y = batch(12, seed=seed)
        _, grad, own = gradients(m, x, y)
        assert grad.abs().sum() > 0
        assert all(g is not None for g in own.values())
        m.after_step(step_of(x, y))


def holds_constants(spec):
    """Whether the header calls part of the loss a constant of the gradient: its oracle can then freeze that part."""
    known = oracles.ORACLES.get(parse(spec).name)
    return known is not None and "frozen" in inspect.signature(known).parameters


@pytest.mark.parametrize("spec", [spec for spec in DETERMINISTIC_SPECS if not holds_constants(spec)])
def test_they_are_those_of_the_value(spec):
    """Central differences in float64, at random points (kinks have no volume) and in random directions."""
    m = build(spec, classes=3, dim=3).double()
    names = [name for name, _ in m.named_parameters()]
    own = [p.detach().clone().requires_grad_() for p in m.parameters()]
    for seed in range(3):
        x, y = batch(6, classes=3, dim=3, seed=seed)

        def loss(x_, *own_):
            return torch.func.functional_call(m, dict(zip(names, own_, strict=True)), (x_, y))  # noqa: B023

        torch.manual_seed(seed)  # the directions
        assert torch.autograd.gradcheck(loss, (x.requires_grad_(), *own), atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("spec", [spec for spec in DETERMINISTIC_SPECS if holds_constants(spec)])
def test_they_are_those_of_the_oracle_with_its_constants_held(spec):
    """Where weights are constants of the gradient: central differences of the oracle, its weights taken at x."""
    m = build(spec, classes=3, dim=3).double()
    x, y = batch(6, classes=3, dim=3)
    _, grad, own = gradients(m, x, y)
    step = 1e-6
    for i in range(len(x)):
        for k in range(3):
            ends = []
            for sign in (1, -1):
                moved = x.clone()
                moved[i, k] += sign * step
                refs = batch_references(moved, y)
                ends.append(oracle(m, moved, y, refs, frozen=(x.tolist(), x.tolist())))
            assert float(grad[i, k]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)
    for name, p in m.named_parameters():
        for c in range(len(p)):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    p[c] += sign * step
                    ends.append(oracle(m, x, y, batch_references(x, y)))
                    p[c] -= sign * step
            assert float(own[name][c]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)
