"""AdamW by row: equal to AdamW where all rows are in use, and blind to the others."""

import pytest
import torch

from nearkin.methods.proxies import mark_rows
from nearkin.training.optimiser import make_optimiser
from nearkin.training.plan import Plan
from nearkin.training.row_adamw import RowAdamW


def parameter(rows=6, dim=3):
    return torch.nn.Parameter(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)))


def optimisers(p, q, **options):
    settings = {"lr": 0.1, "weight_decay": 0.05, **options}
    return RowAdamW([{"params": [p], "by_row": True}], **settings), torch.optim.AdamW([q], **settings)


def gradients(count, like, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(like.shape, generator=rng) for _ in range(count)]


def test_rows_that_every_step_uses_are_trained_as_by_adamw():
    p, q = parameter(), parameter()
    ours, theirs = optimisers(p, q)
    used = torch.tensor([0, 2, 5])
    mark_rows(p, used)
    for g in gradients(20, p):
        p.grad, q.grad = g, g
        ours.step()
        theirs.step()
    torch.testing.assert_close(p[used], q[used], rtol=1e-6, atol=1e-7)
    rest = torch.tensor([1, 3, 4])
    assert torch.equal(p[rest], parameter()[rest])
    assert not ours.state[p]["exp_avg"][rest].any()
    assert ours.state[p]["step"].tolist() == [20, 0, 20, 0, 0, 20]


def test_a_row_is_trained_as_if_the_steps_without_it_had_not_been():
    p, q = parameter(), parameter()
    ours, theirs = optimisers(p, q)
    for number, g in enumerate(gradients(12, p)):
        mark_rows(p, torch.tensor([0, 1 + number % 2]))
        p.grad = g
        ours.step()
        if number % 2 == 0:  # row 1
            q.grad = g
            theirs.step()
    torch.testing.assert_close(p[1], q[1], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(p[0], q[0])


def test_other_groups_are_trained_by_adamw_bit_for_bit():
    p, q, r = parameter(), parameter(), parameter()
    ours = RowAdamW([{"params": [p], "by_row": True}, {"params": [q]}], lr=0.1)
    theirs = torch.optim.AdamW([r], lr=0.1)
    for g in gradients(3, p):
        p.grad, q.grad, r.grad = g, g.clone(), g.clone()
        ours.step()
        theirs.step()
        assert p.grad is g
    assert torch.equal(q, r)


def test_a_saved_state_goes_on():
    whole, first, second = parameter(), parameter(), parameter()
    steps = gradients(6, whole)

    def train(p, optimiser, some):
        for number, g in some:
            mark_rows(p, torch.tensor([number % 3, 3 + number % 3]))
            p.grad = g
            optimiser.step()

    numbered = list(enumerate(steps))
    train(whole, optimisers(whole, whole)[0], numbered)
    half = optimisers(first, first)[0]
    train(first, half, numbered[:3])
    second.data.copy_(first.data)
    other = optimisers(second, second)[0]
    other.load_state_dict(half.state_dict())
    train(second, other, numbered[3:])
    assert torch.equal(whole, second)


@pytest.mark.parametrize("by_row", [False, True])
def test_the_loop_takes_it_where_a_group_asks(by_row):
    groups = [{"params": [parameter()], "lr": 0.1, **({"by_row": True} if by_row else {})}]
    assert type(make_optimiser(Plan(device="cpu"), groups)) is (RowAdamW if by_row else torch.optim.AdamW)
