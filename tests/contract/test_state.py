"""State is in the state dict, float32, and changes only in train mode; a stopped run resumes bit for bit."""

import copy
import io

import pytest
import torch
from contract.cases import METHOD_SPECS, RUN_SPECS, STRATEGY_SPECS, Run, batch, build, step_of, value

from nearkin.methods.base import Strategy


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def stepped(spec, *, seed=0, steps=3):
    m = build(spec, seed=seed)
    for i in range(steps):
        m.after_step(step_of(*batch(seed=i, dtype=torch.float32)))
    return m


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_state_dict_round_trip(spec):
    """A fresh method of other random proxies becomes the saved one: same state, same loss."""
    m, other = stepped(spec), build(spec, seed=1)
    kept = io.BytesIO()
    torch.save(m.state_dict(), kept)
    kept.seek(0)
    other.load_state_dict(torch.load(kept, weights_only=True))
    assert_same(other.state_dict(), m.state_dict())
    x, y = batch(dtype=torch.float32)
    assert torch.equal(value(other, x, y), value(m, x, y))


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_nothing_that_moves_is_outside_the_state(spec):
    """Every tensor a method holds is a parameter or a persistent buffer."""
    m = stepped(spec)
    for module in m.modules():
        loose = [name for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        assert not loose, f"{type(module).__name__}: {loose}"
    held = {name for name, _ in [*m.named_parameters(), *m.named_buffers()]}
    assert held == set(m.state_dict())


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_half_leaves_the_state(spec):
    m = stepped(spec)
    before = copy.deepcopy(m.state_dict())
    for lower in (torch.nn.Module.half, torch.nn.Module.bfloat16):
        lower(torch.nn.Sequential(m))
        assert_same(m.state_dict(), before)
    assert all(v.dtype in (torch.float32, torch.int64, torch.bool) for v in m.state_dict().values())


@pytest.mark.parametrize("spec", METHOD_SPECS)
def test_state_moves_in_train_mode_only(spec):
    m = stepped(spec).eval()
    before = copy.deepcopy(m.state_dict())
    x, y = batch(seed=7, dtype=torch.float32)
    m(x, y)
    m.after_step(step_of(x, y))
    assert_same(m.state_dict(), before)


def has_steps(spec):
    return type(build(spec)).after_step is not Strategy.after_step


@pytest.mark.parametrize("spec", [spec for spec in STRATEGY_SPECS if has_steps(spec)])
def test_a_strategy_moves_something_in_train_mode(spec):
    before, after = stepped(spec, steps=0).state_dict(), stepped(spec, steps=3).state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_a_stopped_run_resumes_bit_for_bit(spec):
    """2k steps = k steps, save, load into a run of another seed, k steps."""
    whole = Run(spec).steps(6)
    first = Run(spec).steps(3)
    second = Run(spec, seed=1).load(copy.deepcopy(first.state())).steps(3)
    assert first.losses + second.losses == whole.losses
    assert_same(second.method.state_dict(), whole.method.state_dict())
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert len(set(whole.losses)) > 1, "the run moves"
