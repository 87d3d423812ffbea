"""Batch norm over ranks is that of one process with all rows."""

import pytest
import torch
from contract.processes import on_ranks

from nearkin import ranks
from nearkin.networks.rank_batch_norm import RankBatchNorm

ROWS = 5


def network(shape):
    torch.manual_seed(0)
    norm = {2: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    return torch.nn.Sequential(norm(3, momentum=0.3), norm(3, affine=False, momentum=None)).double()


def step(shape):
    """Output, gradients of input and weights, and statistics, with this rank's rows."""
    rng = torch.Generator().manual_seed(1)
    x = 100 + torch.randn(shape, generator=rng, dtype=torch.float64)
    target = torch.randn(shape, generator=rng, dtype=torch.float64)
    net = network(shape)
    x.requires_grad_()
    with RankBatchNorm():
        y = net(x[ranks.share(ROWS)])
    (ranks.gather(y) * target).sin().sum().backward()
    gradients = [ranks.total(t) / ranks.size() for t in (x.grad, net[0].weight.grad, net[0].bias.grad)]
    return [ranks.gather(y.detach()), *gradients, *net.buffers()]


@pytest.mark.parametrize("shape", [(ROWS, 3), (ROWS, 3, 2, 2)])
def test_ranks_normalise_by_the_statistics_of_all_rows(shape):
    rng = torch.Generator().manual_seed(1)
    x = 100 + torch.randn(shape, generator=rng, dtype=torch.float64)
    target = torch.randn(shape, generator=rng, dtype=torch.float64)
    net = network(shape)
    y = net(x.requires_grad_())
    (y * target).sin().sum().backward()
    expected = [y.detach(), x.grad, net[0].weight.grad, net[0].bias.grad, *net.buffers()]
    for count in (2, 3):
        for found in on_ranks(count, step, shape):
            for mine, theirs in zip(expected, found, strict=True):
                torch.testing.assert_close(theirs, mine, rtol=1e-10, atol=1e-10)


def test_one_rank_in_eval_mode_is_unchanged():
    net, x = network((ROWS, 3)).eval(), torch.randn(ROWS, 3, dtype=torch.float64)
    with RankBatchNorm():
        assert torch.equal(net(x), network((ROWS, 3)).eval()(x))
