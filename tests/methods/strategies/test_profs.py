"""PROFS: its batches, its pairs, its pull, its hard classes against the naive oracle; its two limits; resume."""

import copy
import itertools
import warnings
from itertools import islice

import oracles
import pytest
import torch
from contract.cases import Run
from contract.test_finite import NoSync
from methods.strategies import oracle_profs as oracle

import nearkin as nk
from nearkin.benchmark.suite import load_suite
from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.relation import References, relate
from nearkin.methods.strategies import profs as module
from nearkin.methods.strategies.profs import deals, mine_classes, projection_steps
from nearkin.space import Space

UNEVEN = torch.tensor([4] * 1 + [2] * 2 + [0] * 3 + [3] * 10 + [1] * 7 + [5] * 4 + [6] * 13)
CPU = torch.device("cpu")


def built(inner="contrastive", *, classes=7, dim=3, **options):
    said = ", ".join(f"{key}={value}" for key, value in options.items())
    return method(f"profs({inner}{', ' if said else ''}{said})", classes=classes, dim=dim)


def drawn(m, count, *, size=12, images=3, seed=0, start=0, labels=UNEVEN):
    return list(islice(m.batches(labels, size, seed=seed, start=start, images_per_class=images), count))


def representatives(batches, images, labels=UNEVEN):
    """Class → its first image in all of the batches; fails if it changes."""
    found = {}
    for index in batches:
        for i in index[::images].tolist():
            assert found.setdefault(int(labels[i]), i) == i
    return found


# Batches.


@pytest.mark.parametrize("rho", [6, 0.3, 2.5])
def test_steps_of_a_projection(rho):
    for images, classes, batch in itertools.product((2, 3), (7, 64, 98, 100, 11_318), (12, 128)):
        ours = projection_steps(rho=rho, images=images, classes=classes, batch=batch)
        assert ours == oracle.projection_steps(rho, images, classes, batch)
    assert built("n_pair", classes=100).projection(128) == 10
    assert built("n_pair", classes=100, steps=3).projection(128) == 3


@pytest.mark.parametrize("hard_classes", [False, True])
@pytest.mark.parametrize("images", [2, 3])
def test_batches_are_of_representatives_and_others(images, hard_classes):
    m = built(steps=5, hard_classes=hard_classes)
    batches = m.batches(UNEVEN, 12, seed=0, images_per_class=images)
    for _ in range(4):
        projection = [stepped(m, next(batches)) for _ in range(5)]
        own = representatives(projection, images)
        assert all(index.dtype == torch.int64 and index.shape == (12,) for index in projection)
        for index in projection:
            assert oracle.faults(index, UNEVEN, own, images) == []


def stepped(m, index, *, model=None, x=None):
    """The batch, after the method has made its step on it."""
    rng = torch.Generator().manual_seed(int(index.sum()))
    x = torch.randn(len(index), 3, generator=rng) if x is None else x
    m.after_step(Step(x, UNEVEN[index], model=model))
    return index


def test_representatives_change_after_each_projection():
    m = built(steps=4, hard_classes=False)
    own = [representatives(drawn(m, 4, start=start), 3) for start in (0, 4, 8, 12)]
    for a, b in itertools.pairwise(own):
        both = [c for c in a if c in b and c != 4]  # class 4 has one image
        assert any(a[c] != b[c] for c in both)


def test_a_class_comes_rho_times_in_a_projection():
    m = built(hard_classes=False, rho=6)
    assert m.projection(6) == 28  # 6 · 4 images of contrastive's own · 7 classes / 6 images in a batch
    batches = drawn(m, 14 * 4, size=6, images=2)
    assert m.projection(6) == 14  # now 2 images per class: 3 classes at once
    own = []
    for start in range(0, len(batches), 14):
        projection = batches[start : start + 14]
        assert torch.bincount(UNEVEN[torch.cat(projection)]).tolist() == [12] * 7
        own.append(representatives(projection, 2))
    assert all(a != b for a, b in itertools.pairwise(own))


def test_other_images_come_evenly():
    m = built(classes=2, steps=1000, hard_classes=False)
    labels = torch.tensor([0] * 4 + [1] * 6)
    index = torch.cat(drawn(m, 1000, size=4, images=2, labels=labels)).view(-1, 2)
    for c, others in ((0, 3), (1, 5)):
        counts = torch.bincount(index[labels[index[:, 0]] == c, 1], minlength=10)
        assert (counts > 0).sum() == others
        assert counts[counts > 0].float().sub(1000 / others).abs().max() < 5 * (1000 / others) ** 0.5


@pytest.mark.parametrize("hands", [3, 4096])
def test_any_batch_can_be_had_by_its_number(hands, monkeypatch):
    monkeypatch.setattr(module, "HANDS", hands)
    m = built(steps=7, hard_classes=False)
    through = drawn(m, 24, seed=5)
    for start in (1, 3, 5, 6, 7, 8, 14, 20):
        assert all(
            torch.equal(a, b) for a, b in zip(through[start:], drawn(m, 24 - start, seed=5, start=start), strict=True)
        )
    for k in range(3):
        representatives(through[7 * k : 7 * k + 7], 3)
    assert not torch.equal(torch.cat(through[:3]), torch.cat(through[3:6])), "what is dealt later is another deal"
    assert not torch.equal(torch.cat(through[:3]), torch.cat(drawn(m, 3, seed=6)))


def test_labels_may_leave_out_classes():
    m = built(classes=20, steps=3)
    labels = UNEVEN * 2 + 5
    for index in islice(m.batches(labels, 6, seed=0, images_per_class=2), 5):
        assert len(labels[index].unique()) == 3
        m.after_step(Step(torch.randn(6, 3), labels[index]))


# Hard classes.


@pytest.mark.parametrize("unknown", [0, 3, 7, 12])
@pytest.mark.parametrize("at_once", [2, 5, 8])
@pytest.mark.parametrize("seed", range(5))
def test_hard_classes(unknown, at_once, seed):
    """Half of the hand, the nearest free class of each in turn, then the other half; some were never embedded."""
    rng = torch.Generator().manual_seed(seed)
    vectors = torch.randn(12, 4, generator=rng, dtype=torch.float64)
    offset = -vectors.square().sum(1) / 2
    offset[torch.randperm(12, generator=rng)[:unknown]] = -torch.inf
    hand = torch.randperm(12, generator=rng)[:at_once]
    half = at_once // 2
    known = [None if offset[c].isneginf() else vectors[c] for c in range(12)]
    want = oracle.hard_classes(hand[:-half], known, at_once, spare=hand[-half:])
    got = mine_classes(vectors, offset, hand).tolist()
    assert len(set(got)) == at_once
    assert set(got) == set(want)
    assert set(got[:-half]) == set(want[: at_once - half]), "the drawn ones come first"


def test_of_equally_near_classes_the_lowest():
    vectors = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])
    got = mine_classes(vectors, -vectors.square().sum(1) / 2, torch.tensor([0, 2]))
    assert got.tolist() == [0, 1]


def test_candidates_may_run_out():
    """Classes 1, 2 and 3 are drawn and known, 0 is spare and was never embedded: 4 is the only class to be mined."""
    vectors = torch.eye(7)
    offset = torch.tensor([-torch.inf, -0.5, -0.5, -0.5, -0.5, -torch.inf, -torch.inf])
    assert mine_classes(vectors, offset, torch.tensor([1, 2, 3, 6, 5, 0])).tolist() == [1, 2, 3, 4, 6, 5]


def test_one_class_at_once_is_not_mined():
    m = built(steps=2)
    assert all(len(UNEVEN[stepped(m, index)].unique()) == 1 for index in drawn(m, 3, size=2, images=2))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("inner", ["contrastive", "n_pair"])
def test_stored_representatives_and_mined_classes(inner, forget):
    """Every batch of a run by the oracle's rule, from the oracle's stored embeddings."""
    m = built(inner, steps=3, forget=forget)
    kept = oracle.Kept(7, forget=forget)
    batches = m.batches(UNEVEN, 10, seed=1, images_per_class=2)
    hands = deals(UNEVEN, CPU, classes=7, at_once=5, steps=3, seed=1, start=0)
    unlike = 0
    for n, (index, deal) in enumerate(zip(batches, hands, strict=False)):
        if n % 3 == 0:
            kept.redrawn()
        want = oracle.hard_classes(deal.hand[:3], kept.vectors, 5, spare=deal.hand[3:])
        assert set(UNEVEN[index].tolist()) == set(want), n
        unlike += set(want) != set(deal.hand.tolist())
        x = torch.randn(10, 3, generator=torch.Generator().manual_seed(n))
        stepped(m, index, x=x)
        kept.store(m.space.project(x), UNEVEN[index], range(0, 10, 2))
        if n == 11:
            break
    assert unlike > 3
    for c in range(7):
        known = kept.vectors[c] is not None and not (forget and (n + 1) % 3 == 0)
        assert bool(m.offset[c].isfinite()) == known
        if known:
            assert m.vectors[c].tolist() == pytest.approx(kept.vectors[c])
            assert float(m.offset[c]) == pytest.approx(-sum(v * v for v in kept.vectors[c]) / 2)


def test_mining_reads_nothing_back_to_the_host():
    m = built(steps=3)
    batches = m.batches(UNEVEN, 12, seed=0, images_per_class=2)
    for _ in range(8):
        with NoSync():
            index = next(batches)
        stepped(m, index)


def test_batches_are_made_on_the_device_of_the_embeddings():
    m = built(steps=3).to("meta")
    assert [index.device.type for index in drawn(m, 5)] == ["meta"] * 5
    assert [index.device.type for index in drawn(built(hard_classes=False).to("meta"), 2)] == ["cpu"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_batches_of_the_cpu_and_waits_for_nothing():
    here, there = built(steps=50), built(steps=50).cuda()
    ours, theirs = (m.batches(UNEVEN, 12, seed=0, images_per_class=2) for m in (here, there))
    for n, index in enumerate(islice(ours, 20)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if n else "default")
            on_gpu = next(theirs)
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(on_gpu.cpu(), index)
        x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(n)), UNEVEN[index]
        here.after_step(Step(x, y))
        there.after_step(Step(x.cuda(), y.cuda()))


def test_only_mining_forbids_to_read_ahead():
    assert built().reads_state
    assert not built(hard_classes=False).reads_state
    assert built(hard_classes=False).vectors.numel() == 0


# Pairs: the six losses.

C, D = 4, 3
BETA = [0.8, 0.9, 1.0, 1.1]
CONTRASTIVE = "contrastive(form=squared, negative=1.1, mining={})"
MARGIN = "margin(sampling={}, learn=True, over={})"
TRIPLET = "triplet(margin=0.4, mining={}, over={}, squared={})"
HOW, OVER = ("all", "hard"), ("all", "nonzero")

SIX = {
    "contrastive(form=c2, positive=0.2, negative=1.1, reduce=sum)": (
        oracle.projection, {"positive": 0.2, "negative": 1.1},
    ),
    **{CONTRASTIVE.format(how): (oracle.contrastive, {"margin": 1.1, "mining": how}) for how in HOW},
    **{
        MARGIN.format(how, over): (oracle.margin, {"delta": 0.2, "boundary": BETA, "mining": how, "over": over})
        for how in HOW for over in OVER
    },
    **{
        TRIPLET.format(how, over, sq): (oracle.triplet, {"margin": 0.4, "mining": how, "over": over, "squared": sq})
        for how in (*HOW, "semi_hard") for over in OVER for sq in (True, False)
    },
    **{f"lifted(smooth={smooth})": (oracle.lifted, {"margin": 1.0, "smooth": smooth}) for smooth in (True, False)},
    "n_pair(norm=0.2)": (oracle.n_pair, {"norm": 0.2}),
    "angular(angle=40.0)": (oracle.angular, {"angle": 40.0}),
    "angular(angle=40.0, n_pair=0.3)": (oracle.angular, {"angle": 40.0, "n_pair_weight": 0.3}),
}  # fmt: skip


def laid_out(inner, images, seed=0, **options):
    """A method that has made batches, one of them, and the rows of its representatives."""
    m = built(inner, classes=C, dim=D, **options).double()
    if getattr(m.inner, "boundary", None) is not None:
        m.inner.boundary.data = torch.tensor(BETA, dtype=torch.float64)
    labels = torch.arange(C).repeat(images)
    index = next(m.batches(labels, C * images, seed=seed, images_per_class=images))
    x = torch.randn(C * images, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return m, x, labels[index], list(range(0, C * images, images))


@pytest.mark.parametrize("inner", SIX)
@pytest.mark.parametrize("images", [2, 3])
def test_objectives(inner, images):
    """All pairs with a representative on one side, and no other."""
    value, options = SIX[inner]
    for seed in range(2):
        m, x, y, rows = laid_out(inner, images, seed)
        assert float(m(x, y).detach()) == pytest.approx(value(x, y, rows, **options), rel=1e-9, abs=1e-12)
        assert torch.equal(m.loss(Step(x, y)), m(x, y))


def test_either_side_can_be_the_anchor():
    for images in (2, 3):
        m, x, y, rows = laid_out("n_pair(norm=0.0)", images, anchors="representatives")
        assert float(m(x, y).detach()) == pytest.approx(oracle.n_pair(x, y, rows, anchors="representatives"))
        m, x, y, rows = laid_out("triplet(margin=0.4)", images, anchors="examples")
        others = oracle.as_references(x, y, rows, others_only=True)
        options = {"margin": 0.4, "squared": True, "mining": "all", "over": "nonzero", "swap": False, "smooth": False}
        assert float(m(x, y).detach()) == pytest.approx(oracles.triplet(*others, **options))


@pytest.mark.parametrize("inner", ["triplet", "n_pair", "lifted"])
def test_gradients_reach_representatives_and_others(inner):
    m, x, y, _ = laid_out(inner, 3)
    x.requires_grad_()
    m(x, y).backward()
    assert (x.grad.abs().sum(1) > 0).all()


def test_two_examples_make_no_pair():
    m, x, y, rows = laid_out("contrastive(form=c2, positive=0, negative=0, reduce=sum)", 3)
    v = m.space.project(x)
    same = sum(float((v[r] - v[r + i]).norm()) for r in rows for i in (1, 2))
    assert float(m(x, y).detach()) == pytest.approx(same)


def test_without_its_batches_it_is_the_inner_loss():
    m = built("triplet", classes=4)
    x, y = torch.randn(9, 3), torch.randint(4, (9,))
    assert torch.equal(m(x, y), method("triplet", classes=4, dim=3)(x, y))


# The two limits.


def law(batches, labels):
    """How often each pair of classes is in a batch, and each ordered pair of images of a class."""
    classes, pairs = {}, {}
    for index in batches:
        grid = index.view(-1, 2)
        assert (labels[grid[:, 0]] == labels[grid[:, 1]]).all()
        assert (grid[:, 0] != grid[:, 1]).all()
        met = tuple(sorted(labels[grid[:, 0]].tolist()))
        classes[met] = classes.get(met, 0) + 1
        for pair in map(tuple, grid.tolist()):
            pairs[pair] = pairs.get(pair, 0) + 1
    return classes, pairs


def test_one_step_per_projection_gives_the_batches_of_n_pair():
    """Two of four classes are in a batch, each with two of three images: all 6 and all 24 pairs are equally likely."""
    labels, count = torch.arange(12) // 3, 1800
    m, n_pair = built("n_pair", classes=4, steps=1, hard_classes=False), method("n_pair", classes=4, dim=3)
    for own in (m.batches(labels, 4, seed=2), n_pair.batches(labels, 4, seed=2)):
        classes, pairs = law(islice(own, count), labels)
        assert (len(classes), len(pairs)) == (6, 24)
        for found, kinds in ((classes.values(), 6), (pairs.values(), 24)):
            expected = sum(found) / kinds
            assert all(abs(n - expected) < 5 * expected**0.5 for n in found)


def test_one_step_per_projection_gives_the_loss_of_n_pair():
    """N-pair on its own batch of N samples and N positives; and no pull, since the anchor is the network itself."""
    labels = torch.arange(12) // 3
    m = built("n_pair", classes=4, steps=1)
    model = torch.nn.Linear(3, 3)
    m.bind(model)
    images = torch.randn(12, 3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for index in islice(m.batches(labels, 8, seed=0), 4):
        x, y = model(images[index]), labels[index]
        s = x[1::2] @ x[::2].T  # samples × positives
        want = torch.nn.functional.cross_entropy(s, torch.arange(4)) + 0.001 * x.square().sum(1).mean() * 2
        loss = m.loss(step := Step(x, y, model=model, index=index))
        torch.testing.assert_close(loss, want)
        optimiser.zero_grad()
        loss.backward()
        before = model.weight.grad.clone()
        m.after_backward(model)
        assert torch.equal(model.weight.grad, before)
        optimiser.step()
        m.after_step(step)


def test_one_endless_projection_keeps_its_representatives():
    """As proxies stay: the loss is the inner one against the same images throughout, pulled to the initial weights."""
    m = built("n_pair", classes=7, steps=10**9, hard_classes=False)
    index = drawn(m, 300, size=8, images=2) + drawn(m, 2, size=8, images=2, start=5000)
    own = representatives(index, 2)
    assert len(own) == 7
    images = torch.randn(len(UNEVEN), 3)
    proxies = References(images[[own[c] for c in range(7)]], torch.arange(7))
    for rows in index[:5]:
        x, y = images[rows], UNEVEN[rows]
        r = relate(x[1::2], y[1::2], proxies, Space.INNER)
        here = torch.isin(r.columns, y)
        among = r._replace(
            s=r.s[:, here], pos=r.pos[:, here], neg=r.neg[:, here], columns=r.columns[here], vectors=r.vectors[here]
        )
        torch.testing.assert_close(m(x, y), m.inner.objective(among))


# Algorithm 1 as a whole.


class Trained:
    """A run of the strategy with a linear network and plain gradient descent."""

    def __init__(self, *, seed=0, **options):
        torch.manual_seed(seed)
        self.inputs = torch.randn(len(UNEVEN), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.model = torch.nn.Linear(5, 3, bias=False, dtype=torch.float64)
        self.method = built("contrastive(form=squared)", **options).double()
        self.method.bind(self.model)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.4)
        self.done, self.seen = 0, []

    def steps(self, count):
        batches = self.method.batches(UNEVEN, 12, seed=3, start=self.done, images_per_class=3)
        for index in islice(batches, count):
            step = Step(self.model(self.inputs[index]), UNEVEN[index], model=self.model, index=index)
            self.optimiser.zero_grad()
            self.method.loss(step).backward()
            self.method.after_backward(self.model)
            self.optimiser.step()
            self.method.after_step(step)
            self.seen.append(index)
            self.done += 1
        return self

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.method.state_dict(), self.done))


@pytest.mark.parametrize("hard_classes", [False, True])
def test_weights_over_several_projections(hard_classes):
    run = Trained(steps=3, weight=0.5, hard_classes=hard_classes)

    def objective(x, y, rows):
        v = torch.nn.functional.normalize(x, dim=1)
        terms = []
        for r, j, same in oracle.pairs(y, rows):
            d = (v[r] - v[j]).square().sum().clamp_min(1e-12).sqrt()
            terms.append(d**2 if same else (1 - d).clamp_min(0) ** 2)
        return sum(terms) / len(terms)

    naive = oracle.Run(run.model.weight.detach(), steps=3, objective=objective, weight=0.5, lr=0.4)
    for n in range(8):
        run.steps(1)
        index = run.seen[-1]
        naive.step(run.inputs[index], UNEVEN[index], list(range(0, 12, 3)))
        torch.testing.assert_close(run.model.weight.detach(), naive.theta)
        at = naive.theta if (n + 1) % 3 == 0 else naive.anchor
        torch.testing.assert_close(run.method.anchor.state_dict()["at/weight"], at)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_run_stopped_within_a_projection_resumes_bit_for_bit(stop, forget):
    whole = Trained(steps=3, weight=0.1, forget=forget).steps(9)
    first = Trained(steps=3, weight=0.1, forget=forget).steps(stop)
    second = Trained(steps=3, weight=0.1, forget=forget, seed=1)
    model, own, done = first.state()
    second.model.load_state_dict(model)
    second.method.load_state_dict(own)
    second.done = done
    second.steps(9 - stop)
    assert all(torch.equal(a, b) for a, b in zip(first.seen + second.seen, whole.seen, strict=True))
    assert torch.equal(second.model.weight, whole.model.weight)
    assert all(torch.equal(a, whole.method.state_dict()[key]) for key, a in second.method.state_dict().items())


def test_eval_mode_moves_nothing():
    run = Trained(steps=2).steps(3)
    before = copy.deepcopy(run.method.state_dict())
    run.method.eval()
    run.method.after_step(Step(torch.randn(12, 3), UNEVEN[run.seen[-1]], model=run.model))
    assert all(torch.equal(value, before[key]) for key, value in run.method.state_dict().items())
    assert run.method.count_on_host == 3


def test_without_a_weight_there_is_no_anchor():
    m = built(weight=0.0)
    m.bind(torch.nn.Linear(3, 3))
    assert not [key for key in m.state_dict() if "at/" in key]


STUDY = load_suite("profs_lite0")
ROWS = STUDY.rows


def test_the_study_chooses_nothing_on_test_and_compiles_one_network():
    assert STUDY.settings["select"] == "validation"
    assert {key for row in ROWS.values() for key in row.settings} <= {"images_per_class", "space", "short_start"}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_study_trains(name):
    """Six losses with their baselines, with representatives, and with hard classes: 20 rows."""
    assert len(ROWS) == 20
    run = Run(ROWS[name].methods["cub"]).steps(4)
    assert torch.tensor(run.losses).isfinite().all()
    assert len(set(run.losses)) == 4


def test_a_training_run(tmp_path):
    """In the loop itself, with another number of images per class than the default of the loss."""
    settings = {"data": "glyphs(classes=48, samples=6)", "backbone": "conv4", "dim": 16, "epochs": 1, "batch": 24}
    run = nk.train(method="profs(n_pair, steps=2)", images_per_class=3, device="cpu", out=tmp_path / "run", **settings)
    assert run.result.exists()


# Refusals.


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: built("proxy_anchor"), "pairs of samples"),
        (lambda: built(rho=0), "rho above 0"),
        (lambda: built(weight=-1), "at least 0"),
        (lambda: built(steps=-1), "at least 0"),
        (lambda: built().batches(UNEVEN, 12, seed=0, images_per_class=1), "at least 2 images"),
        (lambda: built().batches(UNEVEN, 12, seed=0, images_per_class=0), "at least 2 images"),
        (lambda: built().batches(UNEVEN, 12, seed=0, images_per_class=5), "multiple"),
        (lambda: built().batches(UNEVEN, 16, seed=0, images_per_class=2), "8 classes and there are 7"),
        (lambda: built().batches(UNEVEN, 100, seed=0, images_per_class=2), "from 40"),
        (lambda: built().batches(UNEVEN, 12, seed=-1, images_per_class=2), "Seed and start"),
        (lambda: built(classes=6).batches(UNEVEN, 12, seed=0, images_per_class=2), "built for 6 classes"),
        (lambda: laid_out("triplet", 3)[0](torch.randn(7, 3), torch.zeros(7, dtype=torch.int64)), "batch of 7"),
    ],
)  # fmt: skip
def test_refusals(call, sentence):
    with pytest.raises(NearkinError, match=sentence):
        call()
