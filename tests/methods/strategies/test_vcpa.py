"""VCPA: closed forms against autograd, whole batches against the naive oracle, limits, state."""

import pytest
import torch
from methods.strategies import oracle_vcpa as oracle

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import vcpa as module
from nearkin.methods.strategies.vcpa import (
    Gaussian,
    anchor_slopes,
    draw,
    kl,
    kl_slopes,
    negatives_batch,
    newton_step,
    slopes,
)

F64 = torch.float64
C, D, B = 5, 4, 9
ANCHOR = {"alpha": 6.0, "delta": 0.1}
PROXY_LOSSES = [name for name in LOSSES if method(name, classes=2, dim=2).proxies is not None]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def gaussian(proxies=C, seed=0):
    return Gaussian(normal(proxies, D, seed=seed), normal(proxies, D, seed=seed + 1).abs() + 0.1)


def samples(seed=0, size=B, classes=C):
    y = torch.randint(classes, (size,), generator=torch.Generator().manual_seed(seed))
    return normal(size, D, seed=seed), y


X, Y = samples(3)[0], torch.tensor([0, 0, 2, 2, 2, 4, 0, 2, 4])  # classes 1 and 3 are absent
UNIT = torch.nn.functional.normalize(X, dim=1)


def make_batch(f, y, labels, **options):
    """The inputs to the derivatives, for all proxies with `labels`."""
    return negatives_batch(f, y, labels, **options).at(y, labels)


def diagonal(hessian):
    n = hessian.shape[0] * hessian.shape[1]
    return hessian.reshape(n, n).diagonal().reshape(hessian.shape[:2])


def close(got, want, rtol=1e-9):
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-11)


# Eq. 15–29.


def test_kl_is_that_of_torch():
    q, last = gaussian(seed=0), gaussian(seed=5)
    normals = [torch.distributions.Normal(*g) for g in (q, last)]
    want = torch.distributions.kl_divergence(*normals).sum()
    close(kl(q, last), want)
    assert kl(q, last).item() == pytest.approx(oracle.kl(*q, *last), rel=1e-12)
    assert kl(q, q).abs() < 1e-12


def test_slopes_of_the_kl():
    q, last = gaussian(seed=0), gaussian(seed=5)

    def value(mu, sigma):
        return kl(Gaussian(mu, sigma), last)

    got = kl_slopes(q, last.mu, last.sigma**-2)
    close(got[:2], torch.autograd.functional.jacobian(value, tuple(q)))
    H = torch.autograd.functional.hessian(value, tuple(q))
    close(list(got[2:]), [diagonal(H[k][k]) for k in range(2)])


def anchor_loss(p, norms, labels, positives):
    """Eq. 4 by torch, the norms given."""
    s = UNIT @ (p / norms).T
    same = Y[:, None] == labels
    pull = torch.log1p(torch.where(same, (ANCHOR["alpha"] * (ANCHOR["delta"] - s)).exp(), 0).sum(0))
    push = torch.log1p(torch.where(same, 0, (ANCHOR["alpha"] * (s + ANCHOR["delta"])).exp()).sum(0))
    return pull.sum() / (len(p) if positives == "all" else same.any(0).sum()) + push.sum() / len(p)


@pytest.mark.parametrize("positives", ["all", "batch"])
@pytest.mark.parametrize("per_class", [1, 3])
def test_slopes_of_the_loss(positives, per_class):
    """Gradient and diagonal Hessian by p, and with two samples by μ and σ, ‖p̂‖ detached."""
    labels = torch.arange(C).repeat_interleave(per_class)
    P, tau = len(labels), 0.3
    b = make_batch(UNIT, Y, labels, positives=positives, **ANCHOR)
    q, last, eps = gaussian(P), gaussian(P, seed=5), normal(2, P, D, seed=9)
    norms = [draw(q, e).norm(dim=1, keepdim=True) for e in eps]

    def at(p):
        return anchor_loss(p, norms[0], labels, positives)

    g, H = anchor_slopes(draw(q, eps[0]), b)
    close(g, torch.autograd.functional.jacobian(at, draw(q, eps[0])))
    close(H, diagonal(torch.autograd.functional.hessian(at, draw(q, eps[0]))))

    def value(mu, sigma):
        parts = [anchor_loss(mu + sigma * e, n, labels, positives) for e, n in zip(eps, norms, strict=True)]
        return tau * kl(Gaussian(mu, sigma), last) + sum(parts) / 2

    got = slopes(q, last.mu, last.sigma**-2, eps, b, tau=tau)
    close(got[:2], torch.autograd.functional.jacobian(value, tuple(q)))
    H = torch.autograd.functional.hessian(value, tuple(q))
    close(list(got[2:]), [diagonal(H[k][k]) for k in range(2)])


def test_slopes_do_not_overflow():
    b = make_batch(UNIT.float(), Y, torch.arange(C), alpha=500.0, delta=0.1)
    for p in (torch.cat([UNIT[:2], -UNIT[:2], 0 * UNIT[:1]]).float(), UNIT[:C].float() * 1e15):
        assert all(t.isfinite().all() for t in anchor_slopes(p, b))


@pytest.mark.parametrize("positives", ["all", "batch"])
def test_newton_steps_against_loops(positives):
    """Several whole steps, σ clamped in some entries and H floored in others."""
    q, eps = gaussian(), normal(3, C, D, seed=7)
    b = make_batch(UNIT, Y, torch.arange(C), positives=positives, **ANCHOR)
    bounds = {"sigma_min": 0.2, "damping": 0.5}
    got = q
    for e in eps:
        got = newton_step(got, q.mu, q.sigma**-2, e[None], b, tau=0.1, **bounds)
    want = oracle.newton_steps(X, Y, *q, *q, eps, tau=0.1, sigma_min=0.2, floor=0.5, positives=positives, **ANCHOR)
    close(list(got), [torch.tensor(t, dtype=F64) for t in want])
    assert (got.sigma == 0.2).any()
    assert (got.sigma > 0.2).any()


# Algorithm 1.


def noise_of(rng, count, shape):
    return [torch.randn(shape, generator=rng, dtype=F64) for _ in range(count)]


FORMS = {
    "as published": ("", {}),
    "several proxies": ("proxy_anchor(alpha=5, delta=0, per_class=2), tau=0.2", {"tau": 0.2, "alpha": 5, "delta": 0}),
    "batch": ("positives=batch, tau=0.5, steps=2", {"positives": "batch", "tau": 0.5}),
    "samples": ("samples=3, steps=2, tau=1", {"tau": 1}),
    "a high floor": ("damping=0.3, sigma_min=0.7", {"floor": 0.3, "sigma_min": 0.7}),
    "adam": ("newton=False, steps=3, tau=1, lr=0.2", {"form": "adam", "keep": True, "lr": 0.2, "tau": 1}),
    "adam, batch": (
        "proxy_anchor(per_class=2), newton=False, steps=2, tau=0.3, sigma_min=0.9, samples=2, lr=0.2, positives=batch",
        {"form": "adam", "keep": True, "lr": 0.2, "tau": 0.3, "sigma_min": 0.9, "positives": "batch"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_batches_against_loops(form):
    """μ, σ, the loss and its gradient over three batches, with the noise that the method drew."""
    inside, options = FORMS[form]
    m = method(f"vcpa({inside})", classes=C, dim=D).double()
    K = m.proxies.per_class
    of = [c for c in range(C) for _ in range(K)]
    run = oracle.Run(C * K, D, of=of, **{"floor": 1e-8, **options})
    rng, same = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for t in range(3):
        x, y = samples(t)
        noise = noise_of(same, m.steps + 1, (m.samples, C * K, D))
        want = run.step(x, y, noise[:-1], noise[-1])
        step = Step(x.requires_grad_(), y, rng=rng)
        loss = m.loss(step)
        assert loss.item() == pytest.approx(want, rel=1e-6)
        (gradient,) = torch.autograd.grad(loss, x)
        slope = oracle.loss_gradient(x.detach(), y, run.p_hat, **run.anchor)
        torch.testing.assert_close(gradient, torch.tensor(slope, dtype=F64), rtol=1e-5, atol=1e-8)
        m.after_step(step)
        torch.testing.assert_close(m.proxies.vectors, torch.tensor(run.mu, dtype=F64), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(m.sigma, torch.tensor(run.sigma, dtype=F64), rtol=1e-6, atol=1e-8)


def test_without_sampling_the_proxies_are_their_means():
    """ε = 0: one loss whatever the seed, σ unchanged, and the oracle's with its norm's floor."""
    m = method("vcpa(sample=False, samples=5, tau=1)", classes=C, dim=D).double()
    run = oracle.Run(C, D, tau=1, least=1e-6, floor=1e-8)
    zeros = torch.zeros(C, D)
    for t in range(2):
        x, y = samples(t)
        got = [m.loss(Step(x, y, rng=torch.Generator().manual_seed(s))) for s in (0, 1)]
        assert torch.equal(*got)
        assert got[0].item() == pytest.approx(run.step(x, y, [zeros] * 10, zeros), rel=1e-6)
        m.after_step(Step(x, y))
    assert torch.equal(m.sigma, torch.ones_like(m.sigma))
    assert m.class_values() == {}


def test_blocks_of_proxies_give_what_all_at_once_do(monkeypatch):
    x, y = samples(1)

    def moved():
        m = method("vcpa(proxy_anchor(per_class=3), sample=False, positives=batch)", classes=C, dim=D).double()
        m.after_step(Step(x, y))
        return m.proxies.vectors

    whole = moved()
    monkeypatch.setattr(module, "BLOCK", {"cpu": 4 * D})
    close(moved(), whole)
    assert whole.abs().min() > 0


@pytest.mark.parametrize("positives", ["all", "batch"])
def test_of_many_proxies_only_those_of_the_batch_have_positives(positives, monkeypatch):
    """In two blocks that overlap, with noise that differs by row: the same as steps on all proxies with all masks."""
    y, K = Y * 20 + 1, 2
    m = method(f"vcpa(proxy_anchor(per_class={K}), tau=0.3, steps=3, positives={positives})", classes=90, dim=D)
    noise = normal(1, 180, D, seed=4)
    monkeypatch.setattr(module, "BLOCK", {"cpu": 100 * D})
    monkeypatch.setattr(m, "_noise", lambda _like, _step, count, rows: noise[:, :count][:, rows])
    m.double().after_step(Step(X, y))
    first = {c: K * y.tolist().index(c) for c in y.tolist()}  # the noise of the first sample of a class
    whole = make_batch(UNIT, y, m.proxies.labels, alpha=32, delta=0.1, positives=positives)
    for c, at in {**first, 0: 0, 89: 98}.items():  # class 89 is the last of the block from row 80 on
        rows = slice(K * c, K * c + K)
        b, eps = whole._replace(offsets=whole.offsets[:, rows]), noise[:, at : at + K]
        q = last = Gaussian(torch.zeros(K, D, dtype=F64), torch.ones(K, D, dtype=F64))
        for _ in range(3):
            q = newton_step(q, last.mu, last.sigma, eps, b, tau=0.3, sigma_min=1e-5, damping=1e-8)
        close((m.proxies.vectors[rows], m.sigma[rows]), tuple(q))


def test_sigma_stays_above_its_least():
    m = method("vcpa(tau=1e-6, sigma_min=1e-3)", classes=C, dim=D)
    for t in range(30):
        x, y = samples(t)
        m.after_step(Step(x.float(), y, rng=torch.Generator().manual_seed(t)))
        assert m.sigma.min() >= 1e-3
    assert (m.sigma == 1e-3).any()


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_the_first_order_form_takes_every_loss_with_proxies(name):
    """And lowers τ·KL + L at fixed noise, which for one seed is a plain function of μ and σ."""
    m = method(f"vcpa({name}, newton=False, steps=20, sample=False, lr=0.02, tau=0.001)", classes=C, dim=D).double()
    with torch.no_grad():
        m.proxies.vectors.copy_(normal(*m.proxies.vectors.shape, seed=4))
    before = m.inner.loss(Step(X, Y))
    assert m.loss(Step(X, Y)) < before


def test_first_order_steps_have_the_rate_of_the_run():
    """Or another one of their own; its schedule is whatever `groups` is told."""
    ends = []
    for options, rates in (("", (0.002, 0.001)), (", lr=0.1", (7.0, 7.0))):
        m = method(f"vcpa(proxy_anchor(speed=50), newton=False, steps=2{options})", classes=C, dim=D)
        for t, rate in enumerate(rates):
            m.groups(rate)
            m.after_step(Step(X.float(), Y, rng=torch.Generator().manual_seed(t)))
            ends.append((m.proxies.vectors.clone(), m.sigma.clone()))
    assert torch.equal(ends[0][0], ends[2][0])
    assert torch.equal(ends[0][1], ends[2][1])
    assert not torch.allclose(ends[1][0], ends[3][0])


# Limits.


def test_a_heavy_kl_holds_everything():
    for form in ("", ", newton=False, lr=1e-9"):
        m = method(f"vcpa(tau=1e9{form})", classes=C, dim=D)
        m.after_step(Step(X.float(), Y))
        assert m.proxies.vectors.abs().max() < 1e-5
        assert (m.sigma - 1).abs().max() < 1e-5


def test_without_kl_and_sampling_it_is_the_second_order_baseline():
    m = method("vcpa(proxy_anchor(alpha=3), tau=0, sample=False, steps=3, damping=0.01)", classes=C, dim=D).double()
    other = method(
        "proxy_updates(proxy_anchor(alpha=3, positives=all), order=2, steps=3, damping=0.01)", classes=C, dim=D
    )
    start = normal(C, D, seed=8)
    for one in (m, other.double()):
        one.proxies.vectors.copy_(start)
        one.after_step(Step(X, Y))
    close(m.proxies.vectors, other.proxies.vectors)
    assert not torch.allclose(m.proxies.vectors, start)


@pytest.mark.parametrize(("steps", "same"), [(1, True), (2, False)])
def test_one_first_order_step_does_not_see_the_kl(steps, same):
    ends = []
    for tau in (0.001, 10):
        m = method(f"vcpa(newton=False, steps={steps}, tau={tau}, lr=0.01)", classes=C, dim=D)
        m.after_step(Step(X.float(), Y, rng=torch.Generator().manual_seed(0)))
        ends.append(m.proxies.vectors.clone())
    assert torch.equal(*ends) is same


# State and what a user sees.


@pytest.mark.parametrize("spec", ["vcpa", "vcpa(newton=False, lr=0.01)"])
def test_a_loss_moves_nothing_and_after_step_moves_once(spec):
    """Loss twice and then after_step is loss once and after_step; and after_step alone where the noise is the same."""
    ends = []
    for losses in (0, 1, 2):
        m = method(spec, classes=C, dim=D)
        y = Y.clone()
        for _ in range(losses):
            step = Step(X.float(), y, rng=torch.Generator().manual_seed(0))
            m.loss(step)
            assert not m.proxies.vectors.any()
        m.after_step(Step(X.float(), y, rng=torch.Generator().manual_seed(0)))
        ends.append(m.state_dict())
    for key in ends[0]:
        assert all(torch.equal(ends[0][key], end[key]) for end in ends), key
    assert ends[0]["inner.proxies.vectors"].any()


def test_a_loss_of_another_batch_is_not_kept():
    m, other = (method("vcpa(sample=False)", classes=C, dim=D) for _ in range(2))
    m.loss(Step(X.float(), (Y + 1) % C))
    for one in (m, other):
        one.after_step(Step(X.float(), Y))
    assert torch.equal(m.proxies.vectors, other.proxies.vectors)


def test_proxies_are_buffers_outside_the_optimiser():
    m = method("vcpa(proxy_anchor(per_class=2))", classes=C, dim=D)
    assert m.groups(lr=1.0) == [{"params": [], "lr": 1.0}]
    assert list(m.parameters()) == []
    assert m.proxies.vectors is m.inner.proxies.vectors
    assert m.proxies.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert torch.equal(m.proxies.vectors, torch.zeros(2 * C, D))
    assert torch.equal(m.sigma, torch.ones(2 * C, D))
    assert {"sigma", "inner.proxies.vectors"} <= set(m.state_dict())


def test_eval_mode_takes_the_means():
    m = method("vcpa", classes=C, dim=D)
    m.after_step(Step(X.float(), Y))
    m.eval()
    assert torch.equal(m(X.float(), Y), m.inner.loss(Step(X.float(), Y)))


def test_means_of_the_data_may_be_the_start():
    m = method("vcpa(proxy_anchor(initial=means), sigma=0.5)", classes=C, dim=D)
    m.at_check(torch.nn.Identity(), lambda: X.float(), Y % 2)
    assert torch.allclose(m.proxies.vectors[0], X.float()[Y % 2 == 0].mean(0))
    assert torch.equal(m.sigma, torch.full((C, D), 0.5))


def test_the_published_settings_are_the_defaults():
    m = method("vcpa", classes=C, dim=D)
    assert str(m.spec) == str(method("vcpa(proxy_anchor)", classes=C, dim=D).spec)
    wanted = {"tau": 0.01, "steps": 10, "newton": True, "samples": 1, "sample": True, "sigma_min": 1e-5, "sigma": 1}
    assert {key: m.spec.options[key] for key in wanted} == wanted
    assert (m.inner.alpha, m.inner.delta, m.inner.positives, m.inner.spec.options["positives"]) == (
        32,
        0.1,
        "all",
        "all",
    )
    assert method("vcpa(positives=batch)", classes=C, dim=D).inner.positives == "batch"


@pytest.mark.parametrize(
    ("spec", "space", "sentence"),
    [
        ("vcpa(contrastive)", None, "vcpa needs a loss with proxies; contrastive has none"),
        (
            "vcpa(soft_triple)",
            None,
            "Newton steps of vcpa are closed forms .* do not fit soft_triple: use newton=False",
        ),
        ("vcpa(tau=-1)", None, "tau and lr are at least 0"),
        ("vcpa(steps=0)", None, "steps and samples at least 1"),
        ("vcpa(sigma_min=0)", None, "sigma_min and damping above 0"),
        ("vcpa(damping=0)", None, "sigma_min and damping above 0"),
        ("vcpa(lr=-1)", None, "tau and lr are at least 0"),
        ("vcpa(proxy_anchor(positives=batch))", None, r"write it as vcpa\(proxy_anchor, positives=batch\)"),
        (
            "vcpa(proxy_anchor(positives=all), positives=batch)",
            None,
            r"write it as vcpa\(proxy_anchor, positives=all\)",
        ),
        ("vcpa(sigma=1e-6)", None, "sigma at least sigma_min"),
        ("vcpa(soft_triple, newton=False, positives=batch)", None, "only to proxy_anchor, not to soft_triple"),
        ("vcpa", "ball", "cosine similarity, not for ball"),
    ],
)
def test_unsupported_settings_are_refused(spec, space, sentence):
    with pytest.raises(NearkinError, match=sentence):
        method(spec, classes=C, dim=D, space=space)(X.float(), Y)


def test_a_compiled_run_compiles_the_newton_step(monkeypatch):
    """One graph without breaks, with the same result."""
    traced = torch.compile(newton_step, backend="eager", fullgraph=True, dynamic=False)
    monkeypatch.setattr(module, "compiled_step", lambda: traced)
    monkeypatch.setattr(module, "newton_step", lambda *_, **__: pytest.fail("not the compiled one"))
    m = method("vcpa", classes=C, dim=D)
    m.compiled = True
    m.after_step(Step(X.float(), Y, rng=torch.Generator().manual_seed(0)))
    monkeypatch.undo()
    plain = method("vcpa", classes=C, dim=D)
    plain.after_step(Step(X.float(), Y, rng=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(m.proxies.vectors, plain.proxies.vectors)


# Eq. 30.


def test_uncertainty_against_loops():
    q = gaussian()
    eps = torch.randn(40, 1, D, generator=torch.Generator().manual_seed(0), dtype=F64)
    want = oracle.sigma_bar(*q, eps[:, 0], ddof=1)
    close(module.uncertainty(q, samples=40), torch.tensor(want, dtype=F64))


@pytest.mark.parametrize("width", [1.0, 1e-5])
def test_uncertainty_is_that_of_the_samples_also_of_narrow_gaussians(width):
    q = Gaussian(normal(9, D) * 5, normal(9, D, seed=2).abs() * width)
    eps = torch.randn(1000, 1, D, generator=torch.Generator().manual_seed(0), dtype=F64)
    directions = torch.nn.functional.normalize(q.mu + q.sigma * eps, dim=2)
    torch.testing.assert_close(module.uncertainty(q), directions.std(0).sum(-1), rtol=1e-7, atol=0)


def test_uncertainty_of_classes():
    """A class's is the mean of its proxies'; wide Gaussians are less certain."""
    m = method("vcpa(proxy_anchor(per_class=2))", classes=C, dim=D)
    with torch.no_grad():
        m.proxies.vectors.copy_(normal(2 * C, D))
        m.sigma.copy_(torch.linspace(0.01, 0.5, 2 * C)[:, None] * m.proxies.vectors.norm(dim=1, keepdim=True))
    values = m.class_values()["uncertainty"]
    single = module.uncertainty(Gaussian(m.proxies.vectors, m.sigma))
    close(values, (single[::2] + single[1::2]) / 2)
    assert (values.diff() > 0).all()
