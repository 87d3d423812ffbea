"""A pair loss against trained proxies: its value, its gradients, the initial proxies, and the difference from CCP."""

import oracles
import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method

CLASSES, DIM = 3, 4
LABELS = torch.arange(CLASSES).repeat_interleave(5)


def data(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(len(LABELS), DIM, generator=rng)


def embed_of(x):
    def embed(index=None, *, augment=False):
        return x if index is None else x[index]

    return embed


@pytest.mark.parametrize("pair_weight", [0.0, 0.5])
@pytest.mark.parametrize("inner", ["contrastive(form=c2, negative=0.9)", "multi_similarity(mining=False)", "triplet"])
def test_the_inner_loss_against_the_proxies(inner, pair_weight):
    m = method(f"proxy({inner}, per_class=2, pair_weight={pair_weight})", classes=CLASSES, dim=DIM).double()
    x, y = data().double(), LABELS
    oracle, options = oracles.ORACLES[m.inner.spec.name], {**m.inner.spec.options, "space": "cosine"}
    p = m.proxies
    want = oracle(x.tolist(), y.tolist(), p.vectors.tolist(), p.labels.tolist(), [-1] * 6, **options)
    if pair_weight:
        want += pair_weight * oracle(x.tolist(), y.tolist(), x.tolist(), y.tolist(), list(range(len(y))), **options)
    x.requires_grad_()
    loss = m(x, y)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-9)
    loss.backward()
    assert x.grad.abs().sum() > 0
    assert p.vectors.grad.abs().sum() > 0


def test_proxies_start_on_samples_of_their_class_once():
    x = torch.nn.functional.normalize(data(), dim=1)
    m = method("proxy(per_class=2, pool=4)", classes=CLASSES, dim=DIM)
    m.at_check(torch.nn.Identity(), embed_of(x), LABELS)
    first = m.proxies.vectors.detach().clone()
    for vector, label in zip(first, m.proxies.labels, strict=True):
        assert (x[label == LABELS] - vector).norm(dim=1).min() < 1e-6
    for score in (3.0, 2.0, 1.0, None):
        m.at_check(torch.nn.Identity(), embed_of(data(1)), LABELS, score)
    assert torch.equal(m.proxies.vectors, first)
    loaded = method("proxy(per_class=2, pool=4)", classes=CLASSES, dim=DIM)
    loaded.load_state_dict(m.state_dict())
    loaded.at_check(torch.nn.Identity(), embed_of(data(1)), LABELS)
    assert torch.equal(loaded.proxies.vectors, first)


def test_other_initial_proxies():
    normal, means = (
        method(f"proxy(per_class=1, initial={how})", classes=CLASSES, dim=DIM) for how in ("normal", "means")
    )
    before = normal.proxies.vectors.detach().clone()
    for m in (normal, means):
        m.at_check(torch.nn.Identity(), embed_of(data()), LABELS)
    assert torch.equal(normal.proxies.vectors, before)
    torch.testing.assert_close(means.proxies.vectors.detach(), data().view(CLASSES, 5, DIM).mean(1))


def test_it_is_the_first_sub_problem_of_ccp():
    """From one seed: the same proxies, the same losses and gradients, until a check redraws those of CCP."""
    x = data()
    found = []
    for spec in ("proxy(per_class=2, pool=3)", "ccp(per_class=2, pool=3)"):
        torch.manual_seed(4)
        m = method(spec, classes=CLASSES, dim=DIM)
        model = torch.nn.Linear(DIM, DIM)
        m.bind(model)
        m.at_check(model, embed_of(x), LABELS)
        m.loss(Step(model(x), LABELS)).backward()
        m.after_backward(model)
        found.append((m.proxies.vectors.detach(), m.proxies.vectors.grad, model.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_how_fast_proxies_are():
    slow, fast = (method(f"proxy(speed={s})", classes=CLASSES, dim=DIM).groups(0.1)[0]["lr"] for s in (1.0, 100.0))
    assert (slow, fast) == (0.1, 10.0)


def test_what_it_cannot_wrap():
    with pytest.raises(NearkinError, match="pairs of samples"):
        method("proxy(soft_triple)", classes=CLASSES, dim=DIM)
    with pytest.raises(NearkinError, match="pool of at least 1"):
        method("proxy(pool=0)", classes=CLASSES, dim=DIM)
