"""Relations against naive loops: spaces, positives and negatives, reductions, and the gradient of `relate`."""

import math

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.methods import relation as module
from nearkin.methods.relation import (
    EMPTY,
    References,
    batch_references,
    count,
    distance,
    largest,
    log1p_sum_exp,
    log_sum_exp,
    mean_where,
    relate,
    smallest,
    squared_distance,
    total,
    total_of,
    weighted,
)
from nearkin.space import Space, at_least_float32

AXES = ("row", "column")


def some(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def naive_project(v, space):
    norm = math.sqrt(sum(a * a for a in v))
    if space in ("inner", "euclidean") or norm == 0 or ("ball" in space and norm <= 1):
        return list(v)
    return [a / norm for a in v]


def naive_similarity(a, b, space):
    a, b = naive_project(a, space), naive_project(b, space)
    if space in ("ball", "euclidean"):
        return 1 - sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) / 2
    return sum(p * q for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("space", Space)
def test_relate_in_every_space(space):
    x, v = some(4, 3, scale=0.8), some(5, 3, seed=1, scale=0.8)
    v[0] = 0  # the zero vector is a point of every space
    norms = torch.linalg.vector_norm(x, dim=1)
    assert norms.min() < 1 < norms.max(), "both sides of the ball's rim are wanted"
    y, labels = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 2, EMPTY])
    r = relate(x, y, References(v, labels), space)
    for i in range(4):
        assert r.x[i].tolist() == pytest.approx(naive_project(x[i].tolist(), space))
        for j in range(5):
            assert float(r.s[i, j]) == pytest.approx(naive_similarity(x[i].tolist(), v[j].tolist(), space), abs=1e-12)
            assert bool(r.pos[i, j]) == (y[i] == labels[j])
            assert bool(r.neg[i, j]) == (y[i] != labels[j] and labels[j] != EMPTY)
    assert r.rows is y
    assert r.columns is labels
    assert r.per_class == 0


@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL, Space.EUCLIDEAN])
def test_distance_is_two_minus_twice_the_similarity(space):
    """On the sphere that holds by geometry, in the ball by definition."""
    r = relate(some(4, 3), torch.arange(4), References(some(6, 3, seed=1), torch.arange(6)), space)
    torch.testing.assert_close(squared_distance(r), 2 - 2 * r.s)


@pytest.mark.parametrize("space", Space)
def test_distances_are_euclidean(space):
    r = relate(some(4, 3), torch.arange(4), References(some(6, 3, seed=1), torch.arange(6)), space)
    for i in range(4):
        for j in range(6):
            naive = math.dist(r.x[i].tolist(), r.vectors[j].tolist())
            assert float(distance(r)[i, j]) == pytest.approx(naive)
            assert float(squared_distance(r)[i, j]) == pytest.approx(naive**2)


def test_coinciding_points_have_a_small_distance_and_no_gradient():
    x = torch.tensor([[0.6, 0.8], [0.6, 0.8]], requires_grad=True)
    r = relate(x, torch.tensor([0, 0]), batch_references(x, torch.tensor([0, 0])), Space.COSINE)
    assert (squared_distance(r) >= 0).all()
    assert (distance(r) < 1e-2).all()
    distance(r).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_sample_never_meets_itself():
    x, y = some(4, 3), torch.tensor([0, 0, 1, 2])
    r = relate(x, y, batch_references(x, y), Space.COSINE)
    for i in range(4):
        for j in range(4):
            assert bool(r.pos[i, j]) == (i != j and y[i] == y[j])
            assert bool(r.neg[i, j]) == (y[i] != y[j])


def test_self_pairs_follow_the_rows_given():
    """References may hold some batch rows in another order, and other vectors (row −1)."""
    y = torch.tensor([0, 1, 0])
    refs = References(some(4, 3, seed=1), torch.tensor([0, 0, 1, 0]), torch.tensor([2, 0, 1, -1]))
    r = relate(some(3, 3), y, refs, Space.COSINE)
    assert r.pos.tolist() == [[True, False, False, True], [False, False, False, False], [False, True, False, True]]
    assert r.neg.tolist() == [[False, False, True, False], [True, True, False, True], [False, False, True, False]]


def test_empty_slots_are_neither_positive_nor_negative():
    r = relate(
        some(2, 3), torch.tensor([EMPTY, 0]), References(some(2, 3, seed=1), torch.tensor([EMPTY, EMPTY])), Space.BALL
    )
    assert not r.pos.any()
    assert not r.neg.any()


def test_transposed_swaps_the_sides():
    x, v = some(2, 3), some(4, 3, seed=1)
    y, labels = torch.tensor([0, 1]), torch.tensor([0, 0, 1, 1])
    there = relate(x, y, References(v, labels, None, 2), Space.BALL).T
    back = relate(v, labels, References(x, y), Space.BALL)
    for name in ("s", "pos", "neg", "rows", "columns", "x", "vectors"):
        torch.testing.assert_close(getattr(there, name), getattr(back, name))
    assert there.per_class == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_similarities_are_never_below_float32(dtype):
    want = dtype if dtype == torch.float64 else torch.float32
    x = some(3, 4).to(dtype)
    r = relate(x, torch.arange(3), References(some(2, 4, seed=1).float(), torch.arange(2)), Space.COSINE)
    assert r.s.dtype == r.x.dtype == r.vectors.dtype == want
    assert at_least_float32(x).dtype == want
    assert Space.BALL.project(x).dtype == want
    torch.testing.assert_close(r.s, Space.COSINE.pairwise(Space.COSINE.project(x.to(want)), r.vectors))


def test_float64_on_either_side_raises_both():
    r = relate(some(3, 4).float(), torch.arange(3), References(some(2, 4, seed=1), torch.arange(2)), Space.COSINE)
    assert r.s.dtype == torch.float64


def test_autocast_does_not_reach_the_similarities():
    """Inside a user's autocast the product stays float32: bfloat16 would keep 8 bits of s (float16 here: the CPU)."""
    x, v = some(8, 64).float(), some(8, 64, seed=1).float()
    plain = relate(x, torch.arange(8), References(v, torch.arange(8)), Space.COSINE).s
    with torch.autocast("cpu", dtype=torch.float16):
        inside = relate(x, torch.arange(8), References(v, torch.arange(8)), Space.COSINE).s
        assert (x @ v.T).dtype == torch.float16, "autocast is on, or this test tests nothing"
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)


def test_zero_vectors_have_finite_gradients_in_every_space():
    for space in Space:
        x = torch.zeros(2, 3, requires_grad=True)
        relate(x, torch.arange(2), References(some(2, 3), torch.arange(2)), space).s.sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all(), space


def plain(x, y, refs, space):
    """`relate` with autograd's gradient."""
    a, v = space.project(x), space.project(refs.vectors)
    return space.pairwise(a, v), a, v


@pytest.mark.parametrize("block", [1, 20, 2**21])
@pytest.mark.parametrize("space", Space)
def test_gradients_are_those_of_the_plain_product(space, block, monkeypatch):
    """`relate` has a gradient of its own, in blocks of references: of s, of the vectors, and of both."""
    monkeypatch.setattr(module, "COMPARE_BLOCK", block)
    x, w = some(3, 4, scale=0.7).requires_grad_(), some(7, 4, seed=1, scale=0.6).requires_grad_()
    with torch.no_grad():
        w[2], w[3] = 0, 1e-9  # below the floor of the cosine
    norms = torch.linalg.vector_norm(w.detach(), dim=1)
    assert norms.min() < 1 < norms.max()
    refs, y = References(w, torch.arange(7)), torch.arange(3)
    ds, da, dv = some(3, 7, seed=2), some(3, 4, seed=3), some(7, 4, seed=4)
    for use in ((1, 0, 0), (0, 0, 1), (1, 1, 1)):

        def scalar(s, a, v, use=use):
            return use[0] * (s * ds).sum() + use[1] * (a * da).sum() + use[2] * (v * dv).sum()

        r = relate(x, y, refs, space)
        got = torch.autograd.grad(scalar(r.s, r.x, r.vectors), (x, w), allow_unused=True, materialize_grads=True)
        want = torch.autograd.grad(scalar(*plain(x, y, refs, space)), (x, w), allow_unused=True, materialize_grads=True)
        for g, expected in zip(got, want, strict=True):
            torch.testing.assert_close(g, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("space", Space)
def test_gradients_reach_each_side_and_shared_sides(space):
    x, w, y = some(3, 4), some(5, 4, seed=1), torch.arange(3)
    for left, right in ((True, False), (False, True)):
        a, b = x.clone().requires_grad_(left), w.clone().requires_grad_(right)
        relate(a, y, References(b, torch.arange(5)), space).s.square().sum().backward()
        assert (a.grad is not None) == left
        assert (b.grad is not None) == right
    both = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: relate(z, y, batch_references(z, y), space).s, both)


def test_an_unknown_space_is_named_with_the_nearest():
    assert Space("ball") == "ball"
    with pytest.raises(
        NearkinError, match=r"no space 'cosin'.* Did you mean 'cosine'.*cosine, ball, ball_inner, euclidean, inner"
    ):
        Space("cosin")


# Reductions: each against a loop over lists, with an empty row (2) and an empty column (3).


def example(scale=1.0):
    z = some(4, 5, seed=3, scale=scale)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[2], mask[:, 3] = False, False
    return z, mask


def lines(z, mask, by):
    """The masked entries of every row or column, as lists."""
    z, mask = (z, mask) if by == "row" else (z.T, mask.T)
    return [[v for v, m in zip(*pair, strict=True) if m] for pair in zip(z.tolist(), mask.tolist(), strict=True)]


def naive_log_of_sum(values, one):
    """log(Σ exp) about the largest value; math.fsum, so that it is right where exp would overflow."""
    values = values + [0.0] * one
    top = max(values)
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


@pytest.mark.parametrize("by", AXES)
def test_sum_count_max_min(by):
    z, mask = example()
    groups = lines(z, mask, by)
    assert any(not g for g in groups)
    assert total(z, mask, by).tolist() == pytest.approx([sum(g) for g in groups])
    assert count(mask, by).tolist() == [len(g) for g in groups]
    assert largest(z, mask, by).tolist() == [max(g, default=-math.inf) for g in groups]
    assert smallest(z, mask, by).tolist() == [min(g, default=math.inf) for g in groups]


def test_total_of_everything():
    z, mask = example()
    assert float(total_of(z)) == pytest.approx(sum(map(sum, z.tolist())))
    assert float(total_of(z, mask)) == pytest.approx(sum(map(sum, lines(z, mask, "row"))))
    assert float(total_of(z, torch.zeros_like(mask))) == 0


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, -1e4])
@pytest.mark.parametrize("by", AXES)
def test_log_sum_exp_does_not_overflow(by, scale):
    z, mask = example(scale)
    groups = lines(z, mask, by)
    assert log1p_sum_exp(z, mask, by).tolist() == pytest.approx([naive_log_of_sum(g, one=True) for g in groups])
    out = log_sum_exp(z, mask, by)
    for value, group in zip(out.tolist(), groups, strict=True):
        if group:
            assert value == pytest.approx(naive_log_of_sum(group, one=False))
        else:
            assert math.isfinite(value)
            assert value < -80


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("by", AXES)
@pytest.mark.parametrize("reduce", [log1p_sum_exp, log_sum_exp])
def test_gradients_of_log_sum_exp_are_the_softmax(reduce, by, scale):
    z, mask = example(scale)
    z.requires_grad_()
    reduce(z, mask, by).sum().backward()
    one = reduce is log1p_sum_exp
    grad = z.grad if by == "row" else z.grad.T
    logs = [naive_log_of_sum(g, one=one) if g or one else 0.0 for g in lines(z, mask, by)]
    z, mask = (z.detach(), mask) if by == "row" else (z.detach().T, mask.T)
    for i in range(len(z)):
        for j in range(len(z[0])):
            want = math.exp(float(z[i, j]) - logs[i]) if mask[i, j] else 0.0
            assert float(grad[i, j]) == pytest.approx(want, abs=1e-12)


def test_nothing_at_all_in_the_mask():
    z = torch.randn(3, 4, requires_grad=True)
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    out = log1p_sum_exp(z, nothing, "row").sum() + log_sum_exp(z, nothing, "row").sum() + total(z, nothing, "row").sum()
    out.backward()
    assert torch.equal(z.grad, torch.zeros(3, 4))


def test_mean_where():
    values = torch.tensor([1.0, torch.inf, 5.0], requires_grad=True)
    assert float(mean_where(values, torch.tensor([True, False, True])).detach()) == 3
    none = mean_where(values, torch.zeros(3, dtype=torch.bool))
    none.backward()
    assert float(none.detach()) == 0
    assert values.grad.tolist() == [0, 0, 0]


def test_weights_multiply_and_none_changes_nothing():
    z, w = some(2, 3), some(2, 3, seed=1)
    assert weighted(z, None) is z
    assert torch.equal(weighted(z, w), w * z)


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
    """At norms of exactly 0 and 1 the gradient is that of autograd."""
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


@pytest.mark.parametrize("waits", [False, True])
def test_a_list_of_pairs_has_each_pair_of_the_mask_once(waits, monkeypatch):
    """Where counting them would wait, the list also has the other entries, each once."""
    monkeypatch.setattr(module, "reading_waits", lambda t: waits)  # noqa: ARG005
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) < 0.4
    found = list(zip(*(t.tolist() for t in module.listed(mask)), strict=True))
    assert [pair for pair in found if mask[pair]] == [tuple(pair) for pair in mask.nonzero().tolist()]
    assert len(found) == len(set(found)) == (15 if waits else int(mask.sum()))
