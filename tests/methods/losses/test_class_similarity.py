"""From proxies to classes: handwritten gradients, coinciding proxies, and memory use."""

import loss_speed
import pytest
import torch

from nearkin import method
from nearkin.methods import relation as similarity
from nearkin.methods.losses.class_similarity import by_class, class_weights, regulariser
from nearkin.methods.relation import References, relate
from nearkin.space import Space

C, K, D = 4, 3, 5
LABELS = torch.arange(C).repeat_interleave(K)


def relation(x, w, per_class=K, space=Space.COSINE):
    return relate(x, torch.tensor([0, 3, 3]), References(w, LABELS[: len(w)], None, per_class), space)


def vectors(rows, seed):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["soft", "max", "mean"])
@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL, Space.INNER])
def test_gradients_of_class_similarity_and_regulariser(kind, space):
    def both(x, w):
        r = relation(x, w, space=space)
        return by_class(r, similarity=kind, gamma=0.3).s, regulariser(r, tau=0.7)

    assert torch.autograd.gradcheck(both, (vectors(3, 0), vectors(C * K, 1)))


def test_soft_similarity_lies_between_mean_and_maximum():
    r = relation(vectors(3, 0), vectors(C * K, 1))
    mean, most = by_class(r, similarity="mean").s, by_class(r, similarity="max").s
    torch.testing.assert_close(by_class(r, similarity="soft", gamma=1e-4).s, most)
    torch.testing.assert_close(by_class(r, similarity="soft", gamma=1e4).s, mean, atol=1e-3, rtol=0)
    soft = by_class(r, similarity="soft", gamma=0.1).s
    assert bool(((mean < soft) & (soft < most)).all())


def test_masks_columns_and_weights_go_by_class():
    q, r = (f(relation(vectors(3, 0), vectors(C * K, 1))) for f in (by_class, lambda r: r))
    assert q.columns.tolist() == list(range(C))
    assert q.pos.tolist() == [[c == y for c in range(C)] for y in (0, 3, 3)]
    assert torch.equal(q.neg, ~q.pos)
    weights = torch.arange(3.0 * C * K).reshape(3, -1)
    assert class_weights(r, weights)[1].tolist() == [13, 16, 19, 22]
    assert class_weights(r, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_proxies_that_coincide_have_a_finite_gradient(dtype):
    w = torch.randn(C, D, generator=torch.Generator().manual_seed(0), dtype=dtype)
    w = w.repeat_interleave(K, 0).requires_grad_()
    out = regulariser(relation(vectors(3, 0).to(dtype), w), tau=1.0)
    out.backward()
    assert float(out.detach()) == pytest.approx(0, abs=1e-3)
    assert bool(w.grad.isfinite().all())


def test_one_proxy_per_class_has_no_regulariser():
    w = vectors(C, 1)
    r = relate(vectors(3, 0), torch.tensor([0, 3, 3]), References(w, torch.arange(C), None, 1), Space.COSINE)
    assert float(regulariser(r, tau=1.0)) == 0
    assert by_class(r, similarity="soft") is r


@pytest.mark.parametrize("name", ["soft_triple", "mpa", "mpa_dw", "mpa_ap"])
def test_memory_at_the_proportions_of_stanford_online_products(name, monkeypatch):
    """An eighth of the batch and dimension, a ninth of the classes, and blocks as much smaller."""
    size = loss_speed.FULL._replace(classes=1250, dim=64, batch=22)
    monkeypatch.setattr(similarity, "COMPARE_BLOCK", similarity.COMPARE_BLOCK // 72)
    m = method(name, classes=size.classes, dim=size.dim)
    assert m.proxies.per_class == size.per_class
    assert loss_speed.memory_multiple(m, size, device=torch.device("cpu")) < 6


def test_the_benchmark_runs():
    small = loss_speed.SMALL, loss_speed.SMALL_BATCHES
    found = []
    for only in ("soft_triple", "n_pair"):
        found += loss_speed.measure(*small, rounds=1, device=torch.device("cpu"), only=only)
    names = [row.what.split(",")[0] for row in found]
    assert names == ["soft_triple(per_class=2"] * 4 + ["soft_triple", "n_pair", "n_pair"]
    assert all(row.ratio > 0 for row in found)
