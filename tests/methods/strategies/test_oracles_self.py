"""The naive oracles of the strategies against autograd, torch's own pieces and exhaustive search."""

import math

import oracles
import pytest
import torch
from methods.strategies import oracle_ccp as ccp
from methods.strategies import oracle_profs as profs
from methods.strategies import oracle_proxy_isa as isa
from methods.strategies import oracle_vcpa as vcpa

F64 = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def labels(size, classes, seed=0):
    return torch.randint(classes, (size,), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------- VCPA


def anchor_loss(x, y, p, *, alpha, delta, positives="all", of=None, size=None):
    """Eq. 4 in tensors; pass the norms of p to hold them constant."""
    of = torch.arange(len(p)) if of is None else torch.tensor(of)
    s = torch.nn.functional.normalize(x, dim=1) @ (p / (p.norm(dim=1, keepdim=True) if size is None else size)).T
    same = y[:, None] == of[None]
    pull = torch.log1p(torch.where(same, (alpha * (delta - s)).exp(), 0).sum(0))
    push = torch.log1p(torch.where(same, 0, (alpha * (s + delta)).exp()).sum(0))
    return pull.sum() / (len(p) if positives == "all" else same.any(0).sum()) + push.mean()


C, D, B = 4, 3, 7
OF = {"one": list(range(C)), "two": [0, 0, 2, 2]}
POINT = {
    "x": normal(B, D, seed=1),
    "y": torch.tensor([0, 0, 2, 2, 2, 0, 2]),  # classes 1 and 3 are absent
    "mu": normal(C, D, seed=2),
    "sigma": normal(C, D, seed=3).abs() + 0.1,
    "q_mu": normal(C, D, seed=4),
    "q_sigma": normal(C, D, seed=5).abs() + 0.1,
}


def kl_of(mu, sigma, q_mu, q_sigma):
    normals = torch.distributions.Normal
    return torch.distributions.kl_divergence(normals(mu, sigma), normals(q_mu, q_sigma)).sum()


def test_kl_is_that_of_torch():
    values = [POINT[k] for k in ("mu", "sigma", "q_mu", "q_sigma")]
    assert vcpa.kl(*values) == pytest.approx(float(kl_of(*values)), rel=1e-12)
    assert vcpa.kl(*values[:2], *values[:2]) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("positives", ["all", "batch"])
@pytest.mark.parametrize("of", ["one", "two"])
@pytest.mark.parametrize("hold", [True, False])
def test_vcpa_derivatives_are_those_of_autograd(positives, of, hold):
    """g of τ·KL + L_PA, and with ‖p̂‖ held the diagonal of its Hessian, averaged over two samples."""
    anchor = {"alpha": 6.0, "delta": 0.1, "positives": positives, "of": OF[of]}
    tau, eps = 0.3, normal(2, C, D, seed=6)
    p = POINT
    sizes = [(p["mu"] + p["sigma"] * e).norm(dim=1, keepdim=True) if hold else None for e in eps]

    def value(mu, sigma):
        parts = [anchor_loss(p["x"], p["y"], mu + sigma * e, **anchor, size=n) for e, n in zip(eps, sizes, strict=True)]
        return tau * kl_of(mu, sigma, p["q_mu"], p["q_sigma"]) + sum(parts) / len(parts)

    args = (p["x"], p["y"], p["mu"], p["sigma"], p["q_mu"], p["q_sigma"], eps)
    got = [torch.tensor(part, dtype=F64) for part in vcpa.derivatives(*args, tau=tau, hold=hold, **anchor)]
    want = torch.autograd.functional.jacobian(value, (p["mu"], p["sigma"]))
    torch.testing.assert_close(tuple(got[:2]), want, rtol=1e-10, atol=1e-12)
    if hold:
        H = torch.autograd.functional.hessian(value, (p["mu"], p["sigma"]))
        want = [H[k][k].reshape(C * D, C * D).diagonal().reshape(C, D) for k in range(2)]
        torch.testing.assert_close(got[2:], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("positives", ["all", "batch"])
def test_vcpa_loss_and_its_gradient_by_x(positives):
    anchor = {"alpha": 6.0, "delta": 0.1, "positives": positives}
    x, p_hat = POINT["x"].clone().requires_grad_(), normal(C, D, seed=7)
    want = anchor_loss(x, POINT["y"], p_hat, **anchor)
    assert vcpa.loss(x, POINT["y"], p_hat, **anchor) == pytest.approx(want.item(), rel=1e-12)
    want.backward()
    got = vcpa.loss_gradient(x.detach(), POINT["y"], p_hat, **anchor)
    torch.testing.assert_close(torch.tensor(got, dtype=F64), x.grad, rtol=1e-10, atol=1e-12)


def test_vcpa_adam_is_that_of_torch():
    """Two batches with the state kept, σ clamped after each step, ‖p̂‖ free."""
    anchor = {"alpha": 6.0, "delta": 0.1, "positives": "all"}
    run = vcpa.Run(C, D, tau=0.3, alpha=6.0, form="adam", lr=0.4, keep=True, sigma_min=0.7)
    mu, sigma = torch.zeros(C, D, dtype=F64), torch.ones(C, D, dtype=F64)
    mu.requires_grad_(), sigma.requires_grad_()
    adam = torch.optim.Adam([mu, sigma], lr=0.4)
    clamped = 0
    for t in range(2):
        eps, last = normal(3, C, D, seed=10 + t), normal(C, D, seed=20 + t)
        q = mu.detach().clone(), sigma.detach().clone()
        for e in eps:
            p_hat = mu + sigma * e
            part = anchor_loss(POINT["x"], POINT["y"], p_hat, **anchor)
            adam.zero_grad()
            (0.3 * kl_of(mu, sigma, *q) + part).backward()
            adam.step()
            with torch.no_grad():
                clamped += int((sigma < 0.7).sum())
                sigma.clamp_(min=0.7)
        with torch.no_grad():
            want = anchor_loss(POINT["x"], POINT["y"], mu + sigma * last, **anchor)
        got = run.step(POINT["x"], POINT["y"], list(eps), last)
        assert got == pytest.approx(want.item(), rel=1e-9)
        torch.testing.assert_close(torch.tensor(run.mu, dtype=F64), mu.detach(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.tensor(run.sigma, dtype=F64), sigma.detach(), rtol=1e-9, atol=1e-11)
    assert clamped


def test_vcpa_newton_steps_by_autograd():
    """Three steps of Eq. 13 with the derivatives of autograd, q fixed; σ is clamped somewhere."""
    x, y, q = POINT["x"], POINT["y"], (POINT["mu"], POINT["sigma"])
    mu, sigma = q
    options = {"tau": 0.1, "alpha": 6.0, "delta": 0.1, "positives": "batch"}
    clamped = 0
    for e in normal(3, C, D, seed=8):
        size = (mu + sigma * e).norm(dim=1, keepdim=True)

        def value(mu, sigma, e=e, size=size):
            part = anchor_loss(x, y, mu + sigma * e, alpha=6.0, delta=0.1, positives="batch", size=size)
            return 0.1 * kl_of(mu, sigma, *q) + part

        g = torch.autograd.functional.jacobian(value, (mu, sigma))
        H = torch.autograd.functional.hessian(value, (mu, sigma))
        H = [H[k][k].reshape(C * D, C * D).diagonal().reshape(C, D) for k in range(2)]
        mu, sigma = mu - g[0] / H[0].clamp_min(0.5), sigma - g[1] / H[1].clamp_min(0.5)
        clamped += int((sigma < 1e-2).sum())
        sigma = sigma.clamp_min(1e-2)
    got = vcpa.newton_steps(x, y, *q, *q, normal(3, C, D, seed=8), sigma_min=1e-2, floor=0.5, **options)
    torch.testing.assert_close(torch.tensor(got, dtype=F64), torch.stack([mu, sigma]), rtol=1e-8, atol=1e-10)
    assert clamped


def test_vcpa_without_kl_is_the_newton_baseline():
    """τ → 0 and ε = 0: μ moves as Proxy-Anchor's proxies by the second-order updates."""
    options = {"alpha": 3.0, "delta": 0.1}
    one = [[1.0] * D for _ in range(C)]
    none = [[[0.0] * D for _ in range(C)]] * 2
    x, y, start = POINT["x"], POINT["y"], POINT["mu"]
    more = {"tau": 1e-13, "sigma_min": 1e-5, "floor": 1.0}
    mu, _ = vcpa.newton_steps(x, y, start, one, start, one, none, **more, **options)
    want = vcpa.newton_proxies(x, y, start, 2, floor=1.0, **options)
    torch.testing.assert_close(torch.tensor(mu), torch.tensor(want), rtol=1e-6, atol=1e-9)


def test_sigma_bar_and_its_companions():
    eps = normal(50, C, D, seed=9)
    p_hat = torch.nn.functional.normalize(POINT["mu"] + POINT["sigma"] * eps, dim=2)
    for ddof in (0, 1):
        want = p_hat.std(0, correction=ddof).sum(1)
        got = torch.tensor(vcpa.sigma_bar(POINT["mu"], POINT["sigma"], eps, ddof), dtype=F64)
        torch.testing.assert_close(got, want)
    assert vcpa.s_bar(POINT["x"], POINT["y"], POINT["mu"])[1] is None
    a, b = normal(9, seed=1), normal(9, seed=2)
    assert vcpa.pearson(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]))[0, 1]))


# ---------------------------------------------------------------------------------------------- Proxy-ISA


def test_effective_number_is_a_sum_of_powers():
    """E_n = Σ_{j<n} βʲ, V in the limit; ν and σ go to 1/(1 + log(1 + V)), σ stays near 1 early (Fig. 5)."""
    assert isa.effective(7, 10) == pytest.approx(sum(0.9**j for j in range(7)))
    E = isa.effective(10_000, 100)
    nu = isa.lower_bound(E)
    assert math.isclose(E, 100)
    assert isa.decay(E, nu, V=100, tau=1.5) == pytest.approx(1 / (1 + math.log(101)))
    early = isa.effective(50, 100)
    assert isa.decay(early, isa.lower_bound(early), V=100, tau=1.5) == pytest.approx(1, abs=1e-6)


def test_isa_with_unit_weights_is_proxy_anchor():
    run = isa.Run(4, size=9, positive="none", negative="none")
    options = {"alpha": 32.0, "delta": 0.1, "positives": "batch"}
    for t in range(3):
        x, y, p = normal(6, 3, seed=t), labels(6, 4, seed=t), normal(4, 3, seed=30 + t)
        got = run.step(x, y, p, queue_on=True, filter_on=True)
        assert got == pytest.approx(vcpa.loss(x, y, p, **options), rel=1e-12)
    one_class = torch.zeros(6, dtype=torch.long)
    got = run.step(x, one_class, p, queue_on=True, filter_on=True)
    assert got == pytest.approx(vcpa.loss(x, one_class, p, **options), rel=1e-12)


def test_isa_by_hand():
    """Two classes in the plane: queue from the second batch on, filter from the third."""
    run = isa.Run(2, size=3, V=4.0, h=0.5, k=0.9, lam=0.1, tau=1.5, alpha=2.0, delta=0.1)
    proxies = [[1.0, 0.0], [0.0, 1.0]]
    first = run.step([[1.0, 0.0], [3.0, 4.0]], [0, 1], proxies, queue_on=False, filter_on=False)
    assert first == pytest.approx((math.log1p(math.exp(-1.8)) + math.log1p(math.exp(2 * (0.1 - 0.8)))) / 2
                                  + (math.log1p(math.exp(2 * 0.7)) + math.log1p(math.exp(0.2))) / 2)  # fmt: skip
    assert (run.n, run.queue, run.S_avg) == ([1, 1], [], [0.0, 0.0])
    run.step([[3.0, 4.0], [4.0, 3.0], [0.0, 2.0]], [0, 0, 1], proxies, queue_on=True, filter_on=False)
    assert run.n == [3, 2]
    assert run.S_avg == pytest.approx([0.7, 1.0])
    x, y = [[-1.0, 0.0], [1.0, 0.0], [0.2, 0.1]], [0, 0, 0]
    got = run.step(x, y, proxies, queue_on=True, filter_on=True)
    E = (1 + 0.75 + 0.75**2, 1.75)
    nu = [1 / (1 + math.log(1 + e)) for e in E]
    eta = [(1 + 0.9 * (1 - 0.5 * S)) * v + 0.1 for S, v in zip((0.7, 1.0), nu, strict=True)]
    sigma = 1 + (1 + math.exp(-1.5)) * (nu[0] - 1) / (1 + math.exp(4 - E[0] - 1.5))
    assert run.filtered == [0], f"−1 < {0.35 - eta[0]}"
    assert [row[0] for row in run.w_plus] == pytest.approx([sigma, sigma, sigma]), "0.894 is too easy as well"
    S = [(-1.0, 0.0), (1.0, 0.0), (2 / math.sqrt(5), 1 / math.sqrt(5))]
    pull = math.log1p(sum(math.exp(sigma * 2 * (0.1 - s[0])) for s in S)) / sigma
    push = (0 + math.log1p(sum(math.exp(2 * (0.1 + s[1])) for s in S))) / 2  # no S is below 0.5 − η
    assert got == pytest.approx(pull + push)
    assert [v for v, _ in run.queue] == [[0.0, 2.0], [1.0, 0.0], [0.2, 0.1]], "the outlier stays out, the oldest left"
    assert run.S_avg == pytest.approx([(1 + 2 / math.sqrt(5)) / 2, 1.0]), "class 1 is not in the batch"
    assert run.n == [6, 2]


@pytest.mark.parametrize("count", ["samples", "batches"])
def test_isa_weights_over_many_batches(count):
    """Every case of Eq. 16 occurs, and the state is what its definition says, rebuilt from the history."""
    run = isa.Run(4, size=12, V=5.0, h=0.9, k=0.1, lam=0.05, count=count, inner="proxy_nca")
    kept, seen, n, S_avg = [], set(), torch.zeros(4, dtype=torch.long), [0.0] * 4
    for t in range(25):
        x, y = normal(6, 3, seed=t), labels(6, 4, seed=t)
        p, moved = normal(4, 3, seed=90) + 0.1 * t, normal(4, 3, seed=91) + 0.1 * t
        assert math.isfinite(run.step(x, y, p, queue_on=t >= 2, filter_on=t >= 4, moved=moved))
        n += y.bincount(minlength=4) if count == "samples" else y.bincount(minlength=4) > 0
        assert run.n == n.tolist()
        if t >= 2:
            kept += [(i, t) for i in range(6) if i not in run.filtered]
            for c in y.unique().tolist():
                mine = [normal(6, 3, seed=s)[i] for i, s in kept[-12:] if labels(6, 4, seed=s)[i] == c]
                if mine:
                    S_avg[c] = torch.cosine_similarity(torch.stack(mine), moved[c][None]).mean().item()
        assert run.S_avg == pytest.approx(S_avg), "a class that is not in the batch keeps its own"
        for i in range(6):
            c = int(y[i])
            seen |= {("+", round(run.w_plus[i][c] - run.sigma[c], 9)), ("f", i in run.filtered)} if t >= 4 else set()
            seen |= {("-", run.w_minus[i][c] == 1) for c in range(4) if c != y[i]}
        want = [v for i, s in kept[-12:] for v in normal(6, 3, seed=s)[i].tolist()]
        assert [v for vector, _ in run.queue for v in vector] == want
    assert seen == {("+", 1.0), ("+", 0.0), ("f", True), ("f", False), ("-", True), ("-", False)}


def test_isa_penalties():
    """Table 3's five columns at one point, inside and outside of the informative range, and Eq. 16's ω⁻."""
    assert [isa.negative_weight(S, 0.5, 0.2, E, h=0.8) for S, E in ((0.1, 4.0), (0.1, 0.0), (0.2, 4.0))] == [0.25, 1, 1]
    point = {"S_avg": 0.5, "eta": 0.2, "h": 0.8}
    assert [isa.positive_weight(S, penalty=0.3, **point) for S in (0.1, 0.3, 0.4, 0.5)] == [0.3, 1.3, 1.3, 0.3]
    assert isa.positive_weight(0.3, penalty=0.3, inside="one", **point) == 1
    weights = []
    for positive, negative in isa.TABLE_3:
        run = isa.Run(2, size=4, V=5.0, positive=positive, negative=negative)
        run.n = [20, 20]
        run.step([[1.0, 0.0], [-1.0, 0.1]], [0, 1], [[1.0, 0.0], [0.0, 1.0]], queue_on=True, filter_on=True)
        weights.append((run.w_plus[0][0], run.w_minus[1][0]))
    E = isa.effective(20, 5.0)
    nu = isa.lower_bound(E)
    sigma = isa.decay(E, nu, V=5.0, tau=1.5)
    assert weights == [(1, 1), (1, 1 / E), (1 / E, 1 / E), (nu, 1 / E), (sigma, 1 / E)]


def test_proposition_1():
    payoffs = (3 * normal(5, seed=3)).tolist()
    left, right, P = isa.proposition_1(payoffs)
    assert left == pytest.approx(right, rel=1e-12)
    assert sum(P) == pytest.approx(1)
    others = torch.distributions.Dirichlet(torch.ones(6, dtype=F64)).sample((200,)).tolist()
    assert all(isa.regularised(Q, payoffs) < left for Q in others)


# ---------------------------------------------------------------------------------------------- CCP


@pytest.mark.parametrize("seeds", [0, 1, 3])
def test_k_center_is_greedy(seeds):
    """Each pick is farther from seeds and earlier picks than any other left would be; distances only fall."""
    pool, old = normal(9, 2, seed=1), normal(seeds, 2, seed=2)
    picks = ccp.k_center(pool, old, 9)
    assert sorted(picks) == list(range(9))
    reach = []
    for k in range(1 if not seeds else 0, 9):
        known = torch.cat([old, pool[picks[:k]]])
        near = torch.cdist(pool, known, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
        assert near[picks[k]] == near.max()
        reach.append(float(near.max()))
    assert reach == sorted(reach, reverse=True)


def test_k_center_ties_and_a_small_pool():
    square = [[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]]
    assert ccp.k_center(square, [[0.0, 0.0]], 4) == [0, 1, 2, 3], "(0, −1) is 1 from the seed as the others are"
    assert ccp.k_center(square[:2], [[0.0, 0.0]], 3) == [0, 1, 0]
    assert ccp.k_center([[1.0], [3.0], [2.0]], [[0.0]], 2) == [1, 0], "the largest norm first; then 1 and 2 tie at 1"
    new = ccp.redraw([[5.0], [1.0], [2.0], [9.0]], [1, 0, 0, 1], [[0.0], [6.0]], [0, 1])
    assert new == [[2.0], [9.0]]


def test_greedy_cover_is_near_the_best():
    """Exact at k = 1 and k = n, never better than the best, never twice as wide; both fall with k."""
    for seed in range(5):
        points = normal(7, 2, seed=seed)
        greedy, best = ccp.covering_radii(points), ccp.covering_radii(points, exact=True)
        assert (greedy[0], greedy[-1]) == (best[0], 0.0)
        assert all(b <= g <= 2 * b for g, b in zip(greedy, best, strict=True))
        assert greedy == sorted(greedy, reverse=True)
    x, y = normal(8, 2, seed=3), torch.tensor([0, 1, 1, 0, 2, 2, 2, 2])
    far = torch.cdist(x, x)[y[:, None] != y[None]]
    assert ccp.inter_class_distance(x, y) == pytest.approx(float(far.mean()), rel=1e-6)
    assert ccp.covering_radius([[0.0], [2.0], [5.0], [9.0], [4.0]], [0, 0, 0, 1, 1]) == pytest.approx(
        ((3 + 2 + 0) / 3 + (5 + 0) / 2) / 2
    )


def test_patience():
    p = ccp.Patience(patience=3, least=0.5)
    said = [p.check(s) for s in (1.0, 1.4, 2.0, 2.1, 2.0, 2.5, 0.1, 0.2, math.nan, 0.0, 9.0)]
    assert said == [
        "better",
        "stale",
        "better",
        "stale",
        "stale",
        "renew",
        "better",
        "stale",
        "stale",
        "renew",
        "better",
    ]
    assert p.problem == 2


def test_ccp_run_goes_towards_its_anchor():
    """λ = 0 until the first sub-problem is over; then a step is −lr·(∇ + λ(θ − θ*)), θ* the best and not the last."""
    inputs, y = normal(12, 4, seed=5), torch.arange(12) % 3
    run = ccp.Run(normal(2, 4, seed=6), 3, per_class=2, weight=0.7, lr=0.05, patience=2)
    run.draw(inputs, y, [[0.0, 0.0]] * 6)
    largest = [run.embed(inputs[y == c]).norm(dim=1).max() for c in range(3)]
    torch.testing.assert_close(run.proxies[::2].norm(dim=1), torch.stack(largest))
    theta, kept = [run.theta], None
    for score in (0.1, 0.2, 0.1, 0.1):
        losses = [run.step(inputs, y) for _ in range(3)]
        assert losses[-1] < losses[0]
        theta.append(run.theta)
        last = run.check(score, inputs, y)
        kept = run.theta if last == "better" else kept
    assert (last, run.lengths) == ("renew", [12])
    assert torch.equal(run.anchor, theta[2])
    assert torch.equal(run.anchor, kept)
    assert torch.equal(run.theta, theta[4]), "not rolled back"
    assert run.proxies.tolist() == ccp.redraw(inputs @ theta[4].T, y, run.kept_proxies, run.labels)
    before, proxies = run.theta.clone().requires_grad_(), run.proxies.clone().requires_grad_()
    loss = ccp.generalised_contrastive(inputs @ before.T, y, proxies, run.labels)
    (loss + 0.35 * (before - run.anchor).square().sum()).backward()
    run.step(inputs, y)
    torch.testing.assert_close(run.theta, before.detach() - 0.05 * before.grad)
    torch.testing.assert_close(run.proxies, proxies.detach() - 0.05 * proxies.grad)


# ---------------------------------------------------------------------------------------------- PROFS

BATCH = {"x": normal(12, 3, seed=11), "y": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]), "rows": [0, 3, 6, 9]}


def test_steps_of_a_projection():
    assert [profs.projection_steps(6, 2, L, 128) for L in (100, 98, 11_318)] == [10, 10, 1062]
    assert profs.projection_steps(6, 2, 64, 128) == 6, "a whole number stays"


def test_faults_of_a_batch():
    images, representatives = [0, 0, 0, 1, 1, 1, 2], [1, 4, 6]
    assert profs.faults([1, 0, 4, 3], images, representatives, 2) == []
    assert profs.faults([1, 4, 6, 2, 5, 6], images, representatives, 2) == [], "layout is free; class 2 has one image"
    assert profs.representative_rows([1, 4, 6, 2, 5, 6], images, representatives) == [0, 1, 2]
    for wrong in ([0, 1, 4, 3], [1, 1, 4, 3], [1, 0, 2, 4], [1, 4], [1, 0, 4, 3, 6, 0], [0, 2, 4, 3]):
        assert profs.faults(wrong, images, representatives, 2), wrong


def test_hard_classes_are_the_nearest_not_in_the_batch():
    """Against a search over all orders of candidates: each chosen class is nearer than all that were free then."""
    vectors = normal(9, 2, seed=12).tolist()
    vectors[2] = vectors[7] = None
    drawn, count = [5, 2, 0, 3], 8
    chosen = profs.hard_classes(drawn, vectors, count, spare=[5, 7, 2, 1, 4, 6, 8])
    assert chosen[:4] == drawn
    assert len(set(chosen)) == count
    free = {1, 4, 6, 8}
    for d, c in zip([5, 0, 3], chosen[4:7], strict=True):
        assert all(math.dist(vectors[d], vectors[c]) <= math.dist(vectors[d], vectors[o]) for o in free)
        free.remove(c)
    assert chosen[7] == 7, "class 2 has no embedding and brings none: the first spare one that is not there"
    assert profs.hard_classes([0], [[0.0], None, [1.0], [-1.0]], 2) == [0, 2], "of equal ones the lowest"
    kept = profs.Kept(4, forget=True)
    kept.store(BATCH["x"], BATCH["y"], [3])
    assert [v is None for v in kept.vectors] == [True, False, True, True]
    kept.redrawn()
    assert kept.vectors == [None] * 4


def test_pairs_have_a_representative():
    rows, y = BATCH["rows"], BATCH["y"].tolist()
    every = profs.pairs(y, rows)
    assert len(every) == 4 * 11
    assert sum(same for *_, same in every) == 8
    assert {(r, j) for r, j, _ in every} == {(r, j) for r in rows for j in range(12) if r != j}
    d = torch.cdist(BATCH["x"], BATCH["x"])
    hard = profs.hard_pairs(BATCH["x"], y, rows, space="euclidean")
    for r in rows:
        other = [j for j in range(12) if y[j] != y[r]]
        assert {j for a, j, same in hard if a == r and same} == {r + 1, r + 2}
        assert [j for a, j, same in hard if a == r and not same] == sorted(other, key=lambda j: d[r, j])[:2]


def test_objectives_are_the_losses_on_the_same_pairs():
    """Each objective against the oracle of its loss, given the representatives as one side."""
    x, y, rows = BATCH["x"], BATCH["y"], BATCH["rows"]
    anchors, references = profs.as_anchors(x, y, rows), profs.as_references(x, y, rows)
    others = profs.as_references(x, y, rows, others_only=True)
    c2 = {"form": "c2", "margin": 0.5, "positive": 0.2, "negative": 1.1, "reduce": "sum", "mining": "all"}
    for args in (anchors, references):
        want = oracles.contrastive(*args, **c2)
        assert profs.projection(x, y, rows, positive=0.2, negative=1.1) == pytest.approx(want)
    for mining in ("all", "hard"):
        options = {**c2, "form": "squared", "mining": mining}
        got = profs.contrastive(x, y, rows, margin=1.1, mining=mining)
        assert got == pytest.approx(oracles.contrastive(*anchors, **options))
        for over in ("all", "nonzero"):
            options = {"margin": 0.2, "boundary": 0.9, "learn": True, "beta": [0.8, 0.9, 1.0, 1.1], "nu": 0.0}
            options |= {"sampling": mining, "drawn": False, "cutoff": 0.5, "upper": 1.4, "over": over}
            got = profs.margin(x, y, rows, delta=0.2, boundary=[0.8, 0.9, 1.0, 1.1], mining=mining, over=over)
            assert got == pytest.approx(oracles.margin(*anchors, **options))
    for mining in ("all", "hard", "semi_hard"):
        for over in ("all", "nonzero"):
            options = {"margin": 0.4, "squared": True, "mining": mining, "over": over}
            want = oracles.triplet(*anchors, **options, swap=False, smooth=False)
            assert profs.triplet(x, y, rows, **options) == pytest.approx(want)
    for smooth in (True, False):
        got = profs.lifted(x, y, rows, margin=1.0, smooth=smooth)
        assert got == pytest.approx(oracles.lifted(*references, margin=1.0, smooth=smooth))
    got = profs.n_pair(x, y, rows, norm=0.2)
    assert got == pytest.approx(oracles.n_pair(*others, norm=0.2))
    got = profs.n_pair(x, y, rows, anchors="representatives")
    assert got == pytest.approx(oracles.n_pair(*anchors, norm=0.0))
    got = profs.angular(x, y, rows, angle=40.0, n_pair_weight=0.3)
    assert got == pytest.approx(oracles.angular(*references, angle=40.0, n_pair=0.3, positives=8))


def test_profs_run_goes_towards_its_anchor():
    """λ(θ − θ⁽ᵏ⁾) is 0 at the first step of each projection and not after; one endless projection keeps θ⁽⁰⁾."""

    def objective(x, y, rows):
        return sum(((x[r] - x[j]).norm() if same else (1 - (x[r] - x[j]).norm()).clamp_min(0)) for r, j, same in
                   profs.pairs(y, rows)) / len(y)  # fmt: skip

    inputs, y, rows = normal(12, 4, seed=13), BATCH["y"], BATCH["rows"]
    start = normal(2, 4, seed=14)
    run = profs.Run(start, steps=2, objective=objective, weight=0.6, lr=0.05)
    anchors, theta = [], start
    for t in range(5):
        at = theta.clone().requires_grad_()
        anchors.append(theta if t % 2 == 0 else anchors[-1])
        (objective(inputs @ at.T, y.tolist(), rows) + 0.3 * (at - anchors[-1]).square().sum()).backward()
        run.step(inputs, y, rows)
        theta = theta - 0.05 * at.grad
        torch.testing.assert_close(run.theta, theta)
    assert run.k == 2
    endless = profs.Run(start, steps=10**9, objective=objective)
    for _ in range(3):
        endless.step(inputs, y, rows)
    assert torch.equal(endless.anchor, start)
