"""The value of every loss against its naive oracle, in float64."""

import pytest
import torch
from contract.cases import (
    CLASSES,
    DETERMINISTIC_SPECS,
    DIM,
    PAIR_SPECS,
    PROXY_SPECS,
    batch,
    build,
    oracle,
    other_references,
)

from nearkin.methods.relation import References, relate
from nearkin.space import Space


def close(got, want):
    assert got.dtype == torch.float64
    assert got.ndim == 0
    assert float(got.detach()) == pytest.approx(want, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("space", Space)
@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_random_batches(spec, space):
    m = build(spec, space=space).double()
    for seed, size in enumerate((2, 5, 10)):
        x, y = batch(size, seed=seed)
        close(m(x, y), oracle(m, x, y, m.references(x, y)))


# One class, all different, one of another class, one sample, a lone pair.
LABELS = ([1, 1, 1, 1], [0, 1, 2, 3, 4], [0, 0, 0, 1], [2], [3, 3], [3, 4])


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_odd_batches(spec):
    """Means over few or no samples."""
    m = build(spec).double()
    for labels in LABELS:
        x, y = batch(len(labels)).x, torch.tensor(labels)
        close(m(x, y), oracle(m, x, y, m.references(x, y)))


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_references_of_one_class(spec):
    """Rows that have positives and no negative, or negatives and no positive; and a single pair or triplet in all."""
    m = build(spec).double()
    K = 1 if m.proxies is None else m.proxies.per_class
    rng = torch.Generator().manual_seed(3)
    for labels, columns in (([3, 3, 0], [3]), ([0, 1], [3]), ([3], [3]), ([3], [3, 4])):
        x, y = batch(len(labels)).x[: len(labels)], torch.tensor(labels)
        vectors = torch.randn(len(columns) * K, DIM, generator=rng, dtype=torch.float64)
        refs = References(vectors, torch.tensor(columns).repeat_interleave(K), None, 0 if m.proxies is None else K)
        close(m.objective(relate(x, y, refs, m.space)), oracle(m, x, y, refs))


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_other_references(spec):
    """Batch × anything: not square, some of them batch rows in another order, some empty."""
    m = build(spec).double()
    for seed in range(3):
        x, y = batch(7, seed=seed)
        refs = other_references((x, y), seed=seed + 50)
        close(m.objective(relate(x, y, refs, m.space)), oracle(m, x, y, refs))


@pytest.mark.parametrize("spec", PROXY_SPECS)
def test_other_proxies(spec):
    """Batch × the proxies of some classes, in another order: including rows without a positive."""
    m = build(spec).double()
    K = m.proxies.per_class
    classes = torch.tensor([3, 0, 4])
    rows = (classes[:, None] * K + torch.arange(K)).flatten()
    refs = References(m.proxies.vectors[rows], m.proxies.labels[rows], None, K)
    for seed in range(3):
        x, y = batch(7, seed=seed)
        assert not torch.isin(y, classes).all(), "a row without a positive is wanted"
        close(m.objective(relate(x, y, refs, m.space)), oracle(m, x, y, refs))


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_grouped_proxies_as_references_of_a_pair_loss(spec):
    """What `proxy(LOSS)` and CCP do: a pair loss against K proxies per class."""
    m = build(spec).double()
    rng = torch.Generator().manual_seed(5)
    vectors = torch.randn(CLASSES * 2, DIM, generator=rng, dtype=torch.float64)
    refs = References(vectors, torch.arange(CLASSES).repeat_interleave(2), None, 2)
    x, y = batch(6)
    close(m.objective(relate(x, y, refs, m.space)), oracle(m, x, y, refs))


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_float32_is_near(spec):
    m = build(spec)
    x, y = batch(9)
    got = float(m(x.float(), y).detach())
    assert got == pytest.approx(float(m.double()(x, y).detach()), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_weights_of_one_change_nothing(spec):
    m = build(spec).double()
    x, y = batch(9)
    r = relate(x, y, m.references(x, y), m.space)
    assert torch.equal(m.objective(r), m.objective(r, torch.ones_like(r.s)))


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_weights_multiply_where_the_header_says(spec):
    m = build(spec).double()
    for seed in range(3):
        x, y = batch(9, seed=seed)
        refs = m.references(x, y)
        r = relate(x, y, refs, m.space)
        weights = torch.rand(r.s.shape, generator=torch.Generator().manual_seed(seed), dtype=r.s.dtype) + 0.5
        close(m.objective(r, weights), oracle(m, x, y, refs, weights=weights.tolist()))


@pytest.mark.parametrize("spec", DETERMINISTIC_SPECS)
def test_the_same_twice(spec):
    """No hidden randomness and no hidden state: a second call gives the same bits, in train and in eval mode."""
    m = build(spec)
    x, y = batch(9, dtype=torch.float32)
    torch.manual_seed(1)
    first = m(x, y)
    torch.manual_seed(2)
    assert torch.equal(m(x, y), first)
    assert torch.equal(m.eval()(x, y), first)
