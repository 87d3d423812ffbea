"""Several proxy updates per batch: first order against torch's AdamW, second against the naive oracle."""

import pytest
import torch
from methods.strategies import oracle_vcpa as oracle

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES

C, D = 5, 4
PROXY_LOSSES = [name for name in LOSSES if method(name, classes=2, dim=2).proxies is not None]


def batch(seed, size=9):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, D, generator=rng, dtype=torch.float64), torch.randint(C, (size,), generator=rng)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_first_order_is_adamw(name):
    """Three batches of several steps with the moments kept, for every loss with proxies."""
    m = method(f"proxy_updates({name}, steps=3, lr=0.1, weight_decay=0.2)", classes=C, dim=D).double()
    naive = method(name, classes=C, dim=D).double()
    with torch.no_grad():
        naive.proxies.vectors.copy_(m.proxies.vectors)
    adam = torch.optim.AdamW([naive.proxies.vectors], lr=0.1, weight_decay=0.2)
    for seed in range(3):
        x, y = batch(seed)
        for _ in range(3):
            adam.zero_grad()
            naive(x, y).backward()
            adam.step()
        step = Step(x.requires_grad_(), y)
        loss = m.loss(step)
        torch.testing.assert_close(loss, naive(x, y))
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (loss, naive(x, y))))
        m.after_step(step)
        torch.testing.assert_close(m.proxies.vectors, naive.proxies.vectors.detach())


def test_first_order_follows_the_rate_of_the_run():
    """As proxies in the run's own AdamW: 100 times its rate, which changes with the schedule."""
    m = method("proxy_updates(steps=2)", classes=C, dim=D).double()
    naive = method("proxy_anchor", classes=C, dim=D).double()
    with torch.no_grad():
        naive.proxies.vectors.copy_(m.proxies.vectors)
    adam = torch.optim.AdamW([naive.proxies.vectors], weight_decay=1e-4)
    for seed, rate in enumerate((0.003, 0.003, 0.0006)):
        x, y = batch(seed)
        m.groups(rate)
        adam.param_groups[0]["lr"] = 100 * rate
        for _ in range(2):
            adam.zero_grad()
            naive(x, y).backward()
            adam.step()
        m.after_step(Step(x, y))
        torch.testing.assert_close(m.proxies.vectors, naive.proxies.vectors.detach())


@pytest.mark.parametrize("per_class", [1, 2])
@pytest.mark.parametrize("positives", ["all", "batch"])
def test_second_order_against_loops(per_class, positives):
    inner = f"proxy_anchor(alpha=4, per_class={per_class}, positives={positives})"
    m = method(f"proxy_updates({inner}, order=2, steps=3, damping=0.01)", classes=C, dim=D).double()
    anchor = {"alpha": 4, "delta": 0.1, "positives": positives, "of": m.proxies.labels.tolist()}
    p = m.proxies.vectors.clone()
    for seed in range(3):
        x, y = batch(seed)
        p = oracle.newton_proxies(x, y, p, 3, floor=0.01, **anchor)
        step = Step(x, y)
        assert m.loss(step).item() == pytest.approx(oracle.loss(x, y, p, **anchor), rel=1e-7)
        m.after_step(step)
        torch.testing.assert_close(m.proxies.vectors, torch.tensor(p, dtype=torch.float64), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("order", [1, 2])
def test_a_loss_moves_nothing_and_after_step_moves_once(order):
    ends = []
    for losses in (0, 1, 2):
        torch.manual_seed(0)
        m = method(f"proxy_updates(order={order})", classes=C, dim=D)
        m.groups(1e-4)
        start = m.proxies.vectors.clone()
        x, y = batch(0)
        for _ in range(losses):
            m.loss(Step(x.float(), y))
            assert torch.equal(m.proxies.vectors, start)
        m.after_step(Step(x.float(), y))
        ends.append(m.state_dict())
    for key in ends[0]:
        assert all(torch.equal(ends[0][key], end[key]) for end in ends), key
    assert not torch.equal(ends[0]["inner.proxies.vectors"], start)


def test_proxies_are_buffers_and_start_as_in_the_inner_loss():
    torch.manual_seed(0)
    m = method("proxy_updates", classes=C, dim=D)
    torch.manual_seed(0)
    plain = method("proxy_anchor", classes=C, dim=D)
    assert torch.equal(m.proxies.vectors, plain.proxies.vectors)
    assert m.groups(lr=1.0) == [{"params": [], "lr": 1.0}]
    assert list(m.parameters()) == []
    x, y = batch(0)
    m.eval()
    assert torch.equal(m(x, y), plain(x, y))


@pytest.mark.parametrize(
    ("spec", "space", "sentence"),
    [
        ("proxy_updates(contrastive)", None, "needs a loss with proxies; contrastive has none"),
        ("proxy_updates(mpa, order=2)", None, "closed forms .* do not fit mpa: use order=1"),
        ("proxy_updates(order=3)", None, "order must be one of 1, 2"),
        ("proxy_updates(steps=0)", None, "steps is at least 1"),
        ("proxy_updates(lr=-1)", None, "lr and weight_decay are at least 0"),
        ("proxy_updates(order=2)", "inner", "cosine similarity, not for inner"),
    ],
)
def test_unsupported_settings_are_refused(spec, space, sentence):
    with pytest.raises(NearkinError, match=sentence):
        method(spec, classes=C, dim=D, space=space)(*batch(0))
