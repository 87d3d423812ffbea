"""Proxy-ISA against the naive run of Algorithm 1, its limits, Proposition 1, epochs, resume, planted wrong labels."""

import math

import pytest
import torch
from methods.strategies import oracle_proxy_isa as oracle

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.relation import log1p_sum_exp, relate
from nearkin.methods.samplers import steps_per_epoch
from nearkin.methods.strategies import proxy_isa as isa
from nearkin.space import Space

CLASSES, DIM, SIZE, IMAGES = 6, 3, 7, 30  # four steps an epoch
F64 = torch.float64

# An option's word and the two penalties of Table 3 that the oracle knows.
PENALTIES = dict(zip(("none", "negative", "effective", "bounded", "decayed"), oracle.TABLE_3, strict=True))
# The published settings filter nothing that is drawn at random in three dimensions.
STRICT = {"volume": 9.0, "hardness": 0.9, "sensitivity": 0.3, "margin": 0.05, "tau": 2.0}


def build(inner="proxy_anchor(alpha=6)", *, classes=CLASSES, dim=DIM, seed=0, **options):
    torch.manual_seed(seed)
    inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return method(f"proxy_isa({inner}, {inside})", classes=classes, dim=dim).double()


def oracle_of(m, **more):
    """The naive run with the options of a method."""
    o = m.spec.options
    positive, negative = PENALTIES[o["penalty"]]
    return oracle.Run(
        CLASSES, size=o["size"], V=o["volume"], h=o["hardness"], k=o["sensitivity"], lam=o["margin"], tau=o["tau"],
        positive=positive, negative=negative, count=o["count"], code=o["reading"] == "code", **more,
    )  # fmt: skip


def batches(count, *, seed=0):
    """Class 5 never occurs; the others are clusters with outliers; sometimes a batch has one class."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=rng, dtype=F64)
    for number in range(count):
        y = torch.randint(CLASSES - 1, (SIZE,), generator=rng)
        y = y[:1].expand(SIZE).clone() if number % 9 == 8 else y
        x = centres[y] + 0.7 * torch.randn(SIZE, DIM, generator=rng, dtype=F64)
        yield x, y, torch.randint(IMAGES, (SIZE,), generator=rng)


def told(m, images=IMAGES):
    m.at_check(torch.nn.Identity(), lambda: torch.zeros(images, DIM), torch.arange(images) % CLASSES)
    return m


def queue_of(m):
    """The memory's entries, oldest first."""
    order = (int(m.memory.pointer) + torch.arange(len(m.memory.labels))) % len(m.memory.labels)
    order = [j for j in order.tolist() if m.memory.labels[j] >= 0]
    return [(m.memory.vectors[j].tolist(), int(m.memory.labels[j])) for j in order]


@pytest.mark.parametrize("size", [5, 16, 200])
@pytest.mark.parametrize("count", ["samples", "batches"])
@pytest.mark.parametrize("inner", ["proxy_anchor(alpha=6, delta=0.2)", "proxy_nca(scale=3)"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_sequence_of_batches_is_algorithm_1(penalty, inner, count, size):
    """24 batches, six epochs: loss, n, S_avg, queue and filter, the proxies moving between loss and after_step."""
    compare(build(inner, size=size, penalty=penalty, count=count, **STRICT), inner)


@pytest.mark.parametrize("inner", ["proxy_anchor(alpha=6, delta=0.2)", "proxy_nca(scale=3)"])
def test_a_sequence_of_batches_is_the_authors_program(inner):
    exact = {**STRICT, "hardness": 0.5}  # so that 1/h, where S_avg starts, is a float32
    compare(build(inner, size=16, reading="code", **exact), inner, later=4)


def compare(m, inner, *, later=0):
    """A method beside the naive run, with queue and filter `later` steps later than in the text."""
    told(m)
    nca = inner.startswith("proxy_nca")
    run = oracle_of(m, **({"inner": "proxy_nca", "scale": 3.0} if nca else {"alpha": 6.0, "delta": 0.2}))
    rng = torch.Generator().manual_seed(1)
    filtered = [0] * IMAGES
    easy = informative = cut = 0
    for number, (x, y, index) in enumerate(batches(24)):
        before = m.proxies.vectors.detach().clone()
        step = Step(x, y, index=index)
        got = m.loss(step)
        with torch.no_grad():  # the optimiser
            m.proxies.vectors += 0.1 * torch.randn(CLASSES, DIM, generator=rng, dtype=F64)
        m.after_step(step)
        switches = {"queue_on": number >= 4 + later, "filter_on": number >= 8 + later}
        want = run.step(x, y, before, moved=m.proxies.vectors.detach(), **switches)
        assert float(got.detach()) == pytest.approx(want, rel=1e-10), number
        assert m.seen.tolist() == run.n
        assert m.average.tolist() == pytest.approx(run.S_avg, abs=1e-12)
        kept, wanted = queue_of(m), run.queue
        assert [label for _, label in kept] == [label for _, label in wanted]
        torch.testing.assert_close([v for v, _ in kept], [v for v, _ in wanted])
        for row in run.filtered:
            filtered[int(index[row])] += 1
        assert m.filtered.tolist() == filtered
        own = [run.w_plus[i][c] for i, c in enumerate(y.tolist())]
        informative, easy = informative + sum(w > 1 for w in own), easy + sum(w < 1 for w in own)
        cut += sum(w < 1 for row in run.w_minus for w in row)
    assert sum(filtered) > 3, "the filter acts"
    assert int(m.seen[5]) == 0
    if m.penalty in ("effective", "bounded", "decayed"):
        assert informative > 10
        assert easy > 10
    assert (cut > 10) == (m.penalty != "none")


def test_the_weights_are_constants_of_the_gradient():
    """Central differences of Eq. 13 by the oracle, with the weights of the middle point."""
    m = told(build("proxy_anchor(alpha=6)", size=16, filter_from=1, queue_from=1, **STRICT))
    run = oracle_of(m, alpha=6.0)
    *earlier, (x, y, _) = batches(8)
    for a, b, _ in earlier:
        m.after_step(Step(a, b))
        run.step(a, b, m.proxies.vectors.detach(), queue_on=True, filter_on=True)
    x.requires_grad_()
    m.loss(Step(x, y)).backward()
    proxies = m.proxies.vectors.detach()
    run.step(x.detach(), y, proxies, queue_on=True, filter_on=True)

    def value(x_, p_):
        S = [[oracle.cosine(a, p) for p in p_.tolist()] for a in x_.tolist()]
        return oracle.loss(S, y.tolist(), run.w_plus, run.w_minus, alpha=6.0, delta=0.1)

    for at, grad in ((x.detach(), x.grad), (proxies, m.proxies.vectors.grad)):
        for i, j in ((0, 0), (2, 1), (5, 2)):
            ends = []
            for sign in (1, -1):
                moved = at.clone()
                moved[i, j] += sign * 1e-6
                ends.append(value(moved, proxies) if at is not proxies else value(x.detach(), moved))
            assert float(grad[i, j]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("inner", ["proxy_anchor(alpha=6)", "proxy_anchor(positives=all)", "proxy_nca"])
def test_without_penalty_it_is_the_inner_loss(inner):
    m = told(build(inner, size=16, penalty="none", filter_from=1, queue_from=1, **STRICT))
    for x, y, _ in batches(6):
        torch.testing.assert_close(m(x, y), m.inner(x, y))
        m.after_step(Step(x, y))


def test_the_average_over_weights_keeps_what_all_means():
    """`positives="all"` and "batch" differ by |C⁺|/C in the positive term, as they do without weights."""
    both = [build(f"proxy_anchor(positives={p})", size=16, steps_per_epoch=1, **STRICT) for p in ("batch", "all")]
    for x, y, _ in batches(6):
        values = [m(x, y) for m in both]
        r = relate(x, y, both[0].proxies.references(), Space.COSINE)
        weights = both[0]._weigh(r)[0]
        pull = both[0].inner.pull_and_push(r, weights)[0] / isa.averages(weights, r)[0]
        share = len(set(y.tolist())) / CLASSES
        torch.testing.assert_close(values[0] - values[1], (1 - share) * pull)
        for m in both:
            m.after_step(Step(x, y))


# Equations 8–17.

N = torch.tensor([0, 1, 2, 10, 100, 10**5], dtype=F64)


@pytest.mark.parametrize("V", [1.5, 100.0, 1e6])
def test_the_effective_number_runs_from_0_over_1_to_v(V):
    E = isa.effective_number(N, V=V)
    assert E[:2].tolist() == pytest.approx([0, 1], abs=1e-12)
    assert (E.diff() >= 0).all()
    assert float(isa.effective_number(torch.tensor(1e9, dtype=F64), V=V)) == pytest.approx(V)
    assert E[2:5].tolist() == pytest.approx([oracle.effective(n, V) for n in (2, 10, 100)], rel=1e-6)


def test_float32_holds_the_effective_number():
    exact = isa.effective_number(N, V=1e4)
    torch.testing.assert_close(isa.effective_number(N.float(), V=1e4).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("V", [2.0, 100.0, 3000.0])
def test_the_decay_goes_from_1_to_its_bound(V):
    """σ is 1 at first, ν in the end and never below it; the same as Eq. 17 as printed."""
    n = torch.arange(0, int(20 * V), max(1, int(V / 7)), dtype=F64)
    E = isa.effective_number(n, V=V)
    nu = isa.lower_bound(E)
    sigma = isa.decay(E, nu, V=V, tau=1.5)
    assert float(sigma[0]) == pytest.approx(1)
    assert float(sigma[-1]) == pytest.approx(1 / (1 + math.log(1 + V)), rel=1e-3)
    assert (sigma >= nu - 1e-12).all()
    assert (nu.diff() < 0).sum() > 20
    want = [oracle.decay(float(e), float(v), V=V, tau=1.5) for e, v in zip(E, nu, strict=True)]
    assert sigma.tolist() == pytest.approx(want, abs=1e-12)


def test_the_search_narrows_with_progress_and_widens_with_hardness():
    far = [isa.progress(N, torch.full_like(N, s), V=100, h=0.5, k=0.9, margin=0.1, tau=1.5) for s in (0.2, 0.8)]
    length = [p.learned - p.outlier for p in far]
    assert (length[0].diff() < 0).all()
    assert (length[0] > length[1]).all(), "a class of lower similarity is harder"
    assert float(length[0][0]) == pytest.approx((1 + 0.9 * 0.9) + 0.1)


def test_borders_of_the_informative_range():
    s = torch.tensor([-0.1, 0.0, 0.3, 0.31, -0.11], dtype=F64)
    edges = {"learned": torch.tensor(0.3, dtype=F64), "outlier": torch.tensor(-0.1, dtype=F64)}
    assert isa.positive_weights(s, torch.tensor(0.4, dtype=F64), **edges).tolist() == [1.4, 1.4, 1.4, 0.4, 0.4]
    E = torch.tensor(5.0, dtype=F64)
    assert isa.negative_weights(s, E, outlier=edges["outlier"]).tolist() == [1, 1, 1, 1, 0.2]


def test_proposition_1():
    """Eq. 6: log(1 + Σ e^a) is the maximum of Σ P(i)·a_i + H(P), at the distribution that is its gradient (Eq. 18)."""
    rng = torch.Generator().manual_seed(0)
    for weight in (1.0, 0.3):  # Eq. 11: weights stand in the payoffs
        payoffs = (weight * 8 * (0.1 - torch.rand(5, 1, generator=rng, dtype=F64))).requires_grad_()
        value = log1p_sum_exp(payoffs, torch.ones(5, 1, dtype=torch.bool), by="column").sum()
        value.backward()
        plain = payoffs.detach()[:, 0].tolist()
        left, right, best = oracle.proposition_1(plain)
        assert float(value.detach()) == pytest.approx(left, rel=1e-12)
        assert right == pytest.approx(left, rel=1e-12)
        assert payoffs.grad[:, 0].tolist() == pytest.approx(best[:-1], rel=1e-10)
        for spread in (0.01, 0.3, 3.0):
            for _ in range(100):
                noise = spread * torch.randn(6, generator=rng, dtype=F64)
                other = (torch.tensor(best, dtype=F64).log() + noise).softmax(0).tolist()
                assert oracle.regularised(other, plain) < left


# Epochs, state, sentences.


@pytest.mark.parametrize(("images", "size"), [(30, 7), (35, 7), (7, 7), (100, 9)])
def test_an_epoch_is_that_of_the_loop(images, size):
    """Queue on at the first step of epoch 2, filter at that of epoch 3, by the number of training images."""
    m = told(build(size=500, **STRICT), images)
    per_epoch = steps_per_epoch(images, size)
    for number in range(3 * per_epoch):
        step = Step(torch.randn(size, DIM, dtype=F64), torch.zeros(size, dtype=torch.int64))
        assert bool(m._since(2, size)) == (number >= per_epoch)
        assert bool(m._since(3, size)) == (number >= 2 * per_epoch)
        m.after_step(step)
        assert bool((m.memory.labels >= 0).any()) == (number >= per_epoch)


def test_steps_per_epoch_can_be_given():
    m = build(size=50, steps_per_epoch=2)
    for number, (x, y, _) in enumerate(batches(4)):
        m.after_step(Step(x, y))
        assert bool((m.memory.labels >= 0).any()) == (number >= 2)


def test_a_loop_without_epochs_is_refused():
    m = build()
    x, y, _ = next(batches(1))
    assert m(x, y).isfinite()
    with pytest.raises(NearkinError, match="call at_check before the first step, or set steps_per_epoch"):
        m.after_step(Step(x, y))


def test_a_loaded_method_resumes():
    """A new method takes over the buffers whose size depends on the data."""
    m, other = told(build(size=16, **STRICT)), build(size=16, seed=1, **STRICT)
    everything = list(batches(20))

    def run(method_, part):
        losses = []
        for x, y, index in part:
            step = Step(x, y, index=index)
            losses.append(method_.loss(step).detach())
            method_.after_step(step)
        return losses

    run(m, everything[:10])
    told(m)
    other.load_state_dict(m.state_dict())
    assert len(other.filtered) == IMAGES
    assert other.checks.tolist() == [0, 10]
    assert torch.equal(other.history[1], m.average)
    assert torch.equal(torch.stack(run(other, everything[10:])), torch.stack(run(m, everything[10:])))
    for key, value in m.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    assert int(m.filtered.sum()) > 0


def test_classes_that_never_appear_stay_finite():
    m = method("proxy_isa(steps_per_epoch=1, size=8, volume=2)", classes=1000, dim=4)
    for number in range(30):
        x = torch.randn(4, 4, requires_grad=True)
        step = Step(x, torch.tensor([0, 0, 999, number % 3]))
        loss = m.loss(step)
        loss.backward()
        m.after_step(step)
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert m.proxies.vectors.grad.isfinite().all()
    assert all(value.isfinite().all() for value in m.state_dict().values())
    assert (m.average[3:999] == 0).all()


def test_the_filter_is_that_of_the_loss():
    """Proxies that move in between do not change which samples are outliers; without a loss they decide."""
    x, y, index = next(batches(1))
    results = []
    for look in (True, False):
        m = told(build(size=16, filter_from=1, queue_from=1, **STRICT))
        m.average.fill_(1.0)  # what lies off its proxy is an outlier
        with torch.no_grad():
            m.proxies.vectors[y] = x
        step = Step(x, y, index=index)
        if look:
            m.loss(step)
        with torch.no_grad():
            m.proxies.vectors.mul_(-1)
        m.seen.fill_(10**6)
        m.after_step(step)
        results.append(int(m.filtered.sum()))
    assert results[0] < SIZE
    assert results[1] == SIZE


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("proxy_isa(contrastive)", "needs a loss with proxies; contrastive has none"),
        ("proxy_isa(soft_triple(per_class=3))", "one proxy per class; this one has 3"),
        ("proxy_isa(volume=1)", "volume, the upper limit of E, is a number above 1"),
        ("proxy_isa(penalty=sigma)", "penalty must be one of none, negative, effective, bounded, decayed"),
        ("proxy_isa(size=0)", "at least one entry"),
        ("proxy_isa(margin=-0.1)", "margin must be a number of at least 0, not -0.1"),
        ("proxy_isa(sensitivity=-1)", "sensitivity must be a number of at least 0"),
        ("proxy_isa(hardness=0)", "hardness must be a number above 0"),
        ("proxy_isa(tau=-1)", "tau must be a number of at least 0"),
        ("proxy_isa(queue_from=0)", "queue_from and filter_from are epochs from 1 on"),
        ("proxy_isa(filter_from=-2)", "queue_from and filter_from are epochs from 1 on"),
        ("proxy_isa(steps_per_epoch=-1)", "steps_per_epoch is at least 0"),
    ],
)
def test_unsupported_settings_are_refused(spec, sentence):
    with pytest.raises(NearkinError, match=sentence):
        method(spec, classes=3, dim=4)


@pytest.mark.parametrize("inner", ["norm_softmax(per_class=1)", "proxy_nca_pp", "mpa(per_class=1)"])
def test_any_loss_with_one_proxy_a_class_can_be_weighted(inner):
    m = told(build(inner, size=16, **STRICT))
    for x, y, _ in batches(10):
        step = Step(x, y)
        assert m.loss(step).isfinite()
        m.after_step(step)


# Wrong labels. The letters of benchmarks/isa_noise.py take minutes; these are points about twenty centres.


def trained_on_wrong_labels(spec, *, epochs=25, classes=20, each=20, part=20):
    """A linear map trained on points of which one in `part` has a wrong label: the method, and the wrong ones."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    true = torch.arange(classes).repeat_interleave(each)
    points = torch.randn(classes, 16, generator=rng)[true] + 0.5 * torch.randn(len(true), 16, generator=rng)
    wrong = torch.isin(torch.arange(len(true)), torch.randperm(len(true), generator=rng)[: len(true) // part])
    other = (true + torch.randint(1, classes, (len(true),), generator=rng)) % classes
    labels = torch.where(wrong, other, true)
    model = torch.nn.Linear(16, 16)
    m = method(spec, classes=classes, dim=16)
    optimiser = torch.optim.Adam([{"params": model.parameters(), "lr": 0.01}, *m.groups(0.0002)])
    m.at_check(model, lambda: model(points), labels)
    batches_ = m.batches(labels, 40, seed=0)
    for _ in range(epochs * len(true) // 40):
        index = next(batches_)
        step = Step(model(points[index]), labels[index], index=index)
        optimiser.zero_grad()
        m.loss(step).backward()
        optimiser.step()
        m.after_step(step)
    return m, wrong


def test_the_filter_finds_planted_wrong_labels():
    """With the border at the average of a class: 20 of 20 here, filtered in a quarter of the epochs or more."""
    m, wrong = trained_on_wrong_labels("proxy_isa(hardness=1, sensitivity=0, margin=0)")
    caught = m.filtered >= 6
    assert caught[wrong].double().mean() >= 0.9
    assert wrong[caught].double().mean() >= 0.5
    assert (m.filtered[wrong] > 0).double().mean() >= 0.9


def test_the_published_border_lies_too_far_out_to_find_them():
    """h = 0.15, k = 0.9, λ = 0.1 put it below −0.3, where no sample of this training ever is."""
    m, _ = trained_on_wrong_labels("proxy_isa", epochs=8)
    assert float(m._progress().outlier.max()) < -0.3
    assert int(m.filtered.sum()) == 0


def test_the_history_of_very_many_classes_is_of_fewer_checks(monkeypatch):
    monkeypatch.setattr(isa, "HISTORY", 4 * CLASSES)
    m = build(steps_per_epoch=1)
    for check in range(20):
        m.steps.fill_(check)
        m.average.fill_(check)
        m.at_check(torch.nn.Identity(), lambda: torch.zeros(IMAGES, DIM), torch.arange(IMAGES) % CLASSES)
        assert len(m.history) <= 4
        assert m.checks[0] == 0
        assert m.checks[-1] == check
        assert torch.equal(m.history[:, 0].long(), m.checks)
