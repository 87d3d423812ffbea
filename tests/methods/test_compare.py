"""The gradient of `relate`, formed by hand: second derivatives, and points on the rim of the ball."""

import pytest
import torch

from nearkin.methods.relation import References, relate
from nearkin.space import Space


def sides(dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=rng, dtype=dtype) * 0.6 for n in (5, 9))
    w[2] /= 100
    return x.requires_grad_(), w.requires_grad_()


def related(x, w, space):
    r = relate(x, torch.zeros(len(x), dtype=torch.int64), References(w, torch.zeros(len(w), dtype=torch.int64)), space)
    return r.s, r.vectors


@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL])
def test_second_derivatives(space):
    assert torch.autograd.gradgradcheck(lambda x, w: related(x, w, space), sides())


@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL])
def test_zero_vectors_and_the_rim_of_the_ball(space):
    """Where a norm is 0, or just 1, the gradient is that of the steps."""
    x, w = sides(torch.float32)
    with torch.no_grad():
        w[0] = 0
        w[1] = torch.tensor([1.0, 0, 0, 0])
    rng = torch.Generator().manual_seed(1)
    a, b = torch.randn(5, 9, generator=rng), torch.randn(9, 4, generator=rng)
    s, v = related(x, w, space)
    got = torch.autograd.grad((s * a).sum() + (v * b).sum(), (x, w))
    v = space.project(w)
    s = space.pairwise(space.project(x), v)
    want = torch.autograd.grad((s * a).sum() + (v * b).sum(), (x, w))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
