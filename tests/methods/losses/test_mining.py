"""The mining of the losses against naive selection; distance-weighted draws against their distribution."""

import pytest
import torch

from nearkin import method
from nearkin.methods.base import Step
from nearkin.methods.losses.contrastive import hard_negatives
from nearkin.methods.losses.margin import draw, probabilities, uniform
from nearkin.methods.losses.multi_similarity import mine
from nearkin.methods.losses.triplet import memberships
from nearkin.methods.relation import EMPTY, References, batch_references, distance, relate, squared_distance, top_of_row
from nearkin.space import Space

SEEDS = range(4)


def relation(kind, seed, space=Space.COSINE):
    """A small batch of float64 with itself, with a memory that has empty slots, or the memory with the batch."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(4, (9,), generator=rng)
    if kind == "batch":
        return relate(x, y, batch_references(x, y), space)
    v = torch.randn(13, 5, generator=rng, dtype=torch.float64)
    labels = torch.randint(5, (13,), generator=rng)
    labels[::5] = EMPTY
    r = relate(x, y, References(v, labels), space)
    return r if kind == "memory" else r.T


KINDS = pytest.mark.parametrize("kind", ["batch", "memory", "turned"])


def sides(r, i):
    """The columns of row i's positives and of its negatives."""
    columns = range(len(r.columns))
    return [j for j in columns if r.pos[i, j]], [j for j in columns if r.neg[i, j]]


@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_top_of_row(kind, seed):
    r = relation(kind, seed)
    z = (r.s * 4).round()  # many are equal
    k = torch.arange(len(r.rows)) % 5
    picked = top_of_row(z, r.neg, k)
    for i in range(len(r.rows)):
        best = sorted(sides(r, i)[1], key=lambda j: (-z[i, j], j))[: k[i]]
        assert set(picked[i].nonzero().flatten().tolist()) == set(best)


@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_multi_similarity(kind, seed):
    r = relation(kind, seed)
    pos, neg = mine(r, epsilon=0.1)
    for i in range(len(r.rows)):
        positives, negatives = sides(r, i)
        mined_positives = [j for j in positives if negatives and r.s[i, j] - 0.1 < max(r.s[i, k] for k in negatives)]
        mined_negatives = [j for j in negatives if positives and r.s[i, j] + 0.1 > min(r.s[i, k] for k in positives)]
        assert pos[i].nonzero().flatten().tolist() == mined_positives
        assert neg[i].nonzero().flatten().tolist() == mined_negatives
    assert pos.sum() < r.pos.sum()
    assert 0 < neg.sum() < r.neg.sum()


@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_hard_negatives(kind, seed):
    r = relation(kind, seed)
    picked = hard_negatives(r, -distance(r))
    for i in range(len(r.rows)):
        positives, negatives = sides(r, i)
        nearest = sorted(negatives, key=lambda j: -r.s[i, j])[: len(positives)]
        assert set(picked[i].nonzero().flatten().tolist()) == set(nearest)


@KINDS
@pytest.mark.parametrize("semi_hard", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_triplets_are_counted_without_being_listed(kind, seed, semi_hard):
    """Also where many distances are equal, and differ by exactly the margin."""
    r = relation(kind, seed)
    u = (squared_distance(r) * 4).round() / 4
    k, m = memberships(r, u, margin=0.5, semi_hard=semi_hard)
    naive_k, naive_m = torch.zeros_like(k), torch.zeros_like(m)
    for i in range(len(r.rows)):
        positives, negatives = sides(r, i)
        for j in positives:
            for n in negatives:
                if u[i, n] < u[i, j] + 0.5 and (u[i, n] > u[i, j] or not semi_hard):
                    naive_k[i, j] += 1
                    naive_m[i, n] += 1
    assert torch.equal(k, naive_k)
    assert torch.equal(m, naive_m)
    assert k.sum() > 0


@KINDS
def test_probabilities_are_one_over_the_density_of_distances(kind):
    r = relation(kind, 0)
    d = distance(r)
    p = probabilities(r, d, cutoff=0.7, upper=1.3)
    for i in range(len(r.rows)):
        far = {j: max(float(d[i, j]), 0.7) for j in sides(r, i)[1] if d[i, j] < 1.3}
        omega = {j: 1 / (z**3 * (1 - z * z / 4)) for j, z in far.items()}  # D = 5: z^(D − 2), power (D − 3)/2 = 1
        for j, w in omega.items():
            assert float(p[i, j]) == pytest.approx(w / sum(omega.values()))
        assert float(p[i].sum()) == pytest.approx(float(r.neg[i].any()))


def test_a_draw_takes_the_column_whose_share_holds_it():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    each = torch.tensor([[True, False, False, False, False]])
    for u, column in ((0.0, 1), (0.2, 1), (0.25, 3), (0.9, 3), (1.0 - 2**-24, 3)):
        drawn = draw(p, each, torch.full_like(p, u))
        assert drawn.nonzero().tolist() == [[0, column]]
        assert drawn.sum() == 1


@KINDS
def test_draws_follow_the_probabilities(kind):
    """As many draws as positives; over many steps each negative as often as its probability says."""
    r = relation(kind, 1)
    p = probabilities(r, distance(r), cutoff=0.5, upper=1.4)
    wanted = r.pos.sum(1) * (r.neg.any(1))
    steps = 1000
    counts = torch.zeros_like(p)
    for step in range(steps):
        times = draw(p, r.pos, uniform(torch.tensor(step), torch.tensor(7), p))
        assert torch.equal(times.sum(1), wanted.to(p.dtype))
        counts += times
    expected = wanted[:, None] * p * steps
    assert not counts[~r.neg].any()
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 1e-9).all()  # five standard deviations of each count


def test_draws_move_with_the_steps_and_are_kept_with_the_state():
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 4
    m, other = (method("margin(drawn=True)", classes=4, dim=4) for _ in range(2))
    values = []
    for _ in range(3):
        values.append(float(m(x, y)))
        m.after_step(Step(x, y))
    assert len(set(values)) == 3
    other.steps.copy_(m.steps)
    assert other(x, y) != m(x, y), "another seed draws others"
    other.load_state_dict(m.state_dict())
    assert other(x, y) == m(x, y)


def test_the_mean_of_many_draws_is_the_expected_form():
    torch.manual_seed(0)
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 4
    drawn = method("margin(drawn=True, over=all)", classes=4, dim=4).double()
    total, steps = 0.0, 500
    for _ in range(steps):
        total += float(drawn(x, y))
        drawn.after_step(Step(x, y))
    expected = float(method("margin(over=all)", classes=4, dim=4).double()(x, y))
    assert total / steps == pytest.approx(expected, rel=0.01)


def test_a_row_of_far_negatives_draws_from_all_of_them():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.01]], dtype=torch.float64)
    r = relate(x, torch.tensor([0, 0, 1, 2]), batch_references(x, torch.tensor([0, 0, 1, 2])), Space.COSINE)
    p = probabilities(r, distance(r), cutoff=0.5, upper=1.4)
    torch.testing.assert_close(p[0], torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(p[2], torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
