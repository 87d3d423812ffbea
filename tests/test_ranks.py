"""Collective operations, their gradients, and what they are on one process."""

import os

import pytest
import torch
from contract.processes import on_ranks

import nearkin as nk
from nearkin import ranks

ROWS = 5  # not a multiple of the ranks


def data():
    rng = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 3, generator=rng, dtype=torch.float64), torch.randn(3, 2, generator=rng).double()


def value_of(z):
    return (z @ z.T).square().sum().sqrt()


def gathered_gradient(known):
    x, w = data()
    w.requires_grad_()
    z = ranks.gather(x[ranks.share(ROWS)] @ w, ROWS if known else None)
    loss = value_of(z)
    (g,) = torch.autograd.grad(loss, w)
    y = ranks.gather(torch.arange(ROWS)[ranks.share(ROWS)])
    assert torch.equal(ranks.collect(y > ranks.rank())[-1], y > ranks.size() - 1)
    return loss.detach(), ranks.total(g) / ranks.size(), y


@pytest.mark.parametrize("count", [2, 3])
def test_gathered_rows_have_the_value_and_the_gradient_of_one_process(count):
    x, w = data()
    w.requires_grad_()
    loss = value_of(x @ w)
    (g,) = torch.autograd.grad(loss, w)
    for known in (True, False):
        for theirs, gradient, y in on_ranks(count, gathered_gradient, known):
            assert torch.equal(y, torch.arange(ROWS))
            torch.testing.assert_close(theirs, loss.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(gradient, g, rtol=1e-12, atol=0)


def cut_softmax(joined):
    """The value, gradient and second derivative of a log-sum-exp whose columns are cut over ranks."""
    x, w = data()
    x.requires_grad_()
    columns = w.T.repeat(2, 1)[ranks.share(4)]
    s = ranks.spread(x) @ columns.T
    if joined:
        value = ranks.collect(s.logsumexp(1)).logsumexp(0).sum()
    else:
        top = ranks.maximum(s.amax(1))
        value = (ranks.total((s - top[:, None]).exp().sum(1)).log() + top).sum()
    (g,) = torch.autograd.grad(value, x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    return value.detach(), g.detach(), h


@pytest.mark.parametrize("joined", [False, True])
def test_sums_over_cut_columns_have_first_and_second_derivatives(joined):
    one = cut_softmax(joined)
    for answer in on_ranks(3, cut_softmax, joined):
        for mine, theirs in zip(one, answer, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-12, atol=1e-12)


def loop_of_ones_own(spec):
    """A loop as for one process, but for DistributedDataParallel and `nk.ranks.gather`; and the proxies it trains."""
    x, _ = data()
    y = torch.tensor([0, 1, 0, 1, 2])[ranks.share(ROWS)]
    torch.manual_seed(0)
    model, method = torch.nn.Linear(3, 4).double(), nk.method(spec, classes=3, dim=4).double()
    method.bind(model)
    network = torch.nn.parallel.DistributedDataParallel(model) if ranks.size() > 1 else model
    optimiser = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.1)
    for _ in range(3):
        own = x[ranks.share(ROWS)]
        loss = method(nk.ranks.gather(network(own)), nk.ranks.gather(y), images=own)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [loss.detach(), *model.state_dict().values(), *method.state_dict().values()]


def loops_of_ones_own():
    """One with state of its own, and one with parameters."""
    return loop_of_ones_own("moco(momentum=0.5, queue=7)") + loop_of_ones_own("proxy_anchor(sample_rate=0.9)")


def test_a_loop_of_ones_own_gathers_in_one_line():
    one = loops_of_ones_own()
    for answer in on_ranks(2, loops_of_ones_own):
        for mine, theirs in zip(one, answer, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-10, atol=1e-10)


def news():
    t = torch.full((2,), float(ranks.rank()))
    ranks.broadcast_tensors([t])
    assert ranks.on_first(ranks.rank) == 0
    return ranks.rank(), ranks.size(), ranks.is_first(), ranks.broadcast({"rank": ranks.rank()}), t.tolist()


def test_rank_0_tells_the_others():
    assert on_ranks(2, news) == [(0, 2, True, {"rank": 0}, [0, 0]), (1, 2, False, {"rank": 0}, [0, 0])]


def test_one_process_computes_nothing():
    t = torch.ones(2, requires_grad=True)
    for function in (ranks.gather, ranks.total, ranks.spread, ranks.maximum, ranks.broadcast):
        assert function(t) is t
    assert ranks.shares(7) == [7]
    assert ranks.share(7) == slice(0, 7)
    assert ranks.is_first()
    ranks.join()
    ranks.barrier()
    ranks.average([t])
    before = torch.get_rng_state()
    with ranks.own_draws(t.device, 1):
        assert torch.equal(torch.get_rng_state(), before)
    ranks.leave()
    assert ranks.anywhere(True, False) == [True, False]


def shared_work():
    """Means of tensors in several buckets, flags, and random draws within and after an own stream."""
    ranks.BUCKET = 4
    tensors = [
        torch.full((n,), float(ranks.rank() + n), dtype=d) for n in (3, 2, 6) for d in (torch.float, torch.double)
    ]
    ranks.average(tensors)
    torch.manual_seed(5)
    with ranks.own_draws(torch.device("cpu"), 7):
        own = torch.rand(ranks.rank() + 1)
    return [t.tolist() for t in tensors], ranks.anywhere(ranks.rank() == 1, False), float(own[0]), float(torch.rand(1))


def test_means_flags_and_draws_of_two_ranks():
    (means, flags, own, later), other = on_ranks(2, shared_work)
    assert means == [[n + 0.5] * n for n in (3, 2, 6) for _ in range(2)]
    assert (means, flags, later) == (other[0], other[1], other[3])
    assert flags == [True, False]
    assert own != other[2]


@pytest.mark.parametrize(("count", "parts"), [(0, 2), (5, 2), (7, 4), (3, 5)])
def test_shares_are_even_and_complete(count, parts):
    found = ranks.shares(count, parts)
    assert sum(found) == count
    assert len(found) == parts
    assert max(found) - min(found) <= 1


def test_rows_of_a_batch_are_counted_from_the_first_own_one(monkeypatch):
    for own in (slice(0, 3), slice(3, 8), slice(8, 10), slice(4, 4)):
        monkeypatch.setattr(ranks, "share", lambda _, own=own: own)
        for rows in (slice(None, None, 3), slice(1, 9, 2), slice(2, None)):
            expected = [row for row in range(10)[own] if row in range(10)[rows]]
            assert list(range(10)[own][ranks.own_rows(rows, 10)]) == expected


def end_alone():
    if ranks.rank() == 1:
        os._exit(0)
    ranks.barrier()


def test_a_rank_that_has_lost_another_says_so():
    with pytest.raises(AssertionError, match="Rank 0 stopped, because another rank did"):
        on_ranks(2, end_alone)
