"""CCP against the naive run of Algorithms 1 and 2: sub-problems, the anchor, and resume inside a sub-problem."""

import copy
import os
import signal
import sys

import oracles
import pytest
import torch
from methods.strategies import oracle_ccp

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json, read_tensors
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.proxies import k_center
from nearkin.methods.strategies.ccp import BETTER, draw, pool_size, sub_problem_ends
from nearkin.space import Space

CLASSES, EACH, INPUTS, DIM = 4, 6, 5, 3
LABELS = torch.arange(CLASSES).repeat_interleave(EACH)


class Toy:
    """A linear network on a few points, with the inputs a loop passes to a method; records what the method embeds."""

    def __init__(self, spec, *, seed=0, space="ball", dtype=torch.float64, lr=0.1):
        torch.manual_seed(seed)
        self.points = 0.2 * torch.randn(len(LABELS), INPUTS, dtype=dtype)
        self.model = torch.nn.Linear(INPUTS, DIM, bias=False, dtype=dtype)
        self.method = method(spec, classes=CLASSES, dim=DIM, space=space).to(dtype)
        self.method.bind(self.model)
        groups = [{"params": list(self.model.parameters())}, *self.method.groups(lr)]
        self.optimiser = torch.optim.SGD(groups, lr=lr)
        self.asked = []
        self.done = 0

    def embed(self, index=None, *, augment=False):
        self.asked.append((None if index is None else index.clone(), augment))
        with torch.no_grad():
            return self.model(self.points if index is None else self.points[index])

    def check(self, score=None):
        self.asked.clear()
        self.method.at_check(self.model, self.embed, LABELS, score)

    def batch(self):
        index = next(self.method.batches(LABELS, 8, seed=5, start=self.done, images_per_class=4))
        x, y = self.model(self.points[index]), LABELS[index]
        return Step(x, y, self.model, self.points[index], index)

    def step(self):
        step = self.batch()
        loss = self.method.loss(step)
        self.optimiser.zero_grad()
        loss.backward()
        self.method.after_backward(self.model)
        self.optimiser.step()
        self.method.after_step(step)
        self.done += 1
        return step, float(loss.detach())


# Algorithm 2.


@pytest.mark.parametrize("seed", range(20))
def test_picks_are_those_of_the_naive_choice(seed):
    rng = torch.Generator().manual_seed(seed)
    n, seeds, count = (int(torch.randint(1, most, (), generator=rng)) for most in (12, 6, 12))
    count = min(n, count)
    points = torch.randn(7, n, 4, generator=rng, dtype=torch.float64)
    old = torch.randn(7, seeds, 4, generator=rng, dtype=torch.float64)
    picks = k_center(points, old, count)
    for c in range(7):
        assert picks[c].tolist() == oracle_ccp.k_center(points[c], old[c], count)


def test_equal_distances_and_equal_points():
    square = torch.tensor([[[1.0, 0], [0, 1], [-1, 0], [0, -1]], [[2.0, 2], [2, 2], [0, 1], [2, 2]]])
    old = torch.zeros(2, 1, 2)
    for c in range(2):
        assert k_center(square, old, 4)[c].tolist() == oracle_ccp.k_center(square[c], old[c], 4)


def test_a_draw_has_each_image_of_a_class_before_one_comes_again():
    labels = torch.tensor([2, 0, 1, 0, 0, 2, 0, 1, 0, 2])
    torch.manual_seed(0)
    rows = draw(labels, 4, classes=3)
    assert torch.equal(labels[rows], torch.arange(3)[:, None].expand(3, 4))
    assert [len(set(row)) for row in rows.tolist()] == [4, 2, 3]
    assert rows[1, :2].tolist() == rows[1, 2:].tolist(), "in turn"
    others = [draw(labels, 4, classes=3) for _ in range(20)]
    assert {row for other in others for row in other[0].tolist()} == {1, 3, 4, 6, 8}
    with pytest.raises(NearkinError, match="Class 3 has no training image"):
        draw(labels, 2, classes=4)


def test_a_pool_smaller_than_the_picks_is_a_multiple_of_them():
    assert [pool_size(b, 4) for b in (1, 3, 4, 5, 12)] == [4, 12, 4, 5, 12]


def test_one_image_a_proxy_is_a_random_choice():
    """pool=1: everything that is drawn is picked."""
    toy = Toy("ccp(per_class=3, pool=1)")
    toy.check()
    drawn = toy.asked[-1][0].view(CLASSES, 3)
    x = toy.embed(drawn.flatten()).view(CLASSES, 3, DIM)
    for c in range(CLASSES):
        got = sorted(toy.method.proxies.vectors.view(CLASSES, 3, DIM)[c].tolist())
        torch.testing.assert_close(torch.tensor(got), torch.tensor(sorted(x[c].tolist())))


# Algorithm 1.


def test_a_run_is_that_of_the_naive_loop():
    """Draws, steps, snapshots, pulls and redraws over five sub-problems, beside the oracle step by step."""
    toy = Toy("ccp(contrastive(form=c2, positive=0.4, negative=0.8, reduce=sum), per_class=2, pool=5, weight=0.3)")

    def summed(x, y, proxies, labels):
        return oracle_ccp.generalised_contrastive(x, y, proxies, labels, alpha=0.2, beta=0.6) * len(x) * len(labels)

    run = oracle_ccp.Run(
        toy.model.weight.detach(),
        CLASSES,
        per_class=2,
        weight=0.3,
        lr=0.02,
        patience=3,
        least=BETTER,
        objective=summed,
    )
    for group in toy.optimiser.param_groups:
        group["lr"] = 0.02
    toy.check()
    seeds, pool = (index for index, _ in toy.asked)
    assert all(augment for _, augment in toy.asked)
    run.draw(toy.points[pool], LABELS[pool], run.embed(toy.points[seeds]))
    scores = [5.0, 6.0, 6.0 + BETTER / 2, 5.0, 4.0, 9.0, 3.0, 9.1, 1.0, 2.0, 9.1, 1.0, 1.0, 0.5, 0.2, 8.0, 7.0, 6.0]
    scores.append(5.0)
    for number, score in enumerate(scores):
        for _ in range(3):
            step, loss = toy.step()
            assert loss == pytest.approx(run.step(toy.points[step.index], step.y), rel=1e-9)
        toy.check(score)
        again = bool(toy.asked)
        pool = toy.asked[-1][0] if again else torch.arange(1)
        assert (run.check(score, toy.points[pool], LABELS[pool]) == "renew") == again, number
        torch.testing.assert_close(toy.method.proxies.vectors.detach(), run.proxies)
        torch.testing.assert_close(toy.model.weight.detach(), run.theta)
    assert int(toy.method.problems) == run.patience.problem == 4
    ends = sub_problem_ends(scores, 3)
    assert [3 * (b - a) for a, b in zip([0, *ends], ends, strict=False)] == run.lengths


@pytest.mark.parametrize(
    "spec",
    [
        "contrastive(form=c1, margin=0.5)",
        "contrastive(form=c2, positive=0, negative=0.3841)",
        "contrastive(form=c2, positive=0.2652, negative=0.5409)",
        "contrastive(form=c2, positive=0.2858, negative=0.5130)",
        "multi_similarity(alpha=2, beta=40, base=0.5, mining=False)",
        "multi_similarity(alpha=14.35, beta=75.83, base=0.66, mining=False)",
        "multi_similarity(alpha=8.49, beta=57.38, base=0.41, mining=False)",
        "triplet(margin=0.0961, squared=False)",
        "triplet(margin=0.1190, squared=False)",
        "triplet(margin=0.0451, squared=False)",
    ],
)
@pytest.mark.parametrize("pair_weight", [0.0, 0.1])
def test_the_losses_of_the_appendix_in_the_ball(spec, pair_weight):
    """The inner loss of batch × proxies, in the ball, plus the same loss within the batch if set."""
    torch.manual_seed(1)
    m = method(f"ccp({spec}, per_class=3, pair_weight={pair_weight})", classes=CLASSES, dim=DIM, space="ball").double()
    x, y = 0.6 * torch.randn(8, DIM, dtype=torch.float64), torch.arange(8) % CLASSES
    assert (x.norm(dim=1) > 1).any()
    assert (x.norm(dim=1) < 1).any(), "both kinds of points of the ball"
    oracle = oracles.ORACLES[m.inner.spec.name]
    rest = {**m.inner.spec.options, "space": "ball"}
    p = m.proxies
    want = oracle(x.tolist(), y.tolist(), p.vectors.tolist(), p.labels.tolist(), [-1] * len(p.labels), **rest)
    if pair_weight:
        want += pair_weight * oracle(x.tolist(), y.tolist(), x.tolist(), y.tolist(), list(range(8)), **rest)
    assert float(m(x, y).detach()) == pytest.approx(want, rel=1e-9)


def test_the_first_sub_problem_is_not_held_to_anything_and_the_next_to_the_best_weights():
    toy = Toy("ccp(per_class=2, pool=3, weight=0.7, patience=2)")
    toy.check()
    home = toy.model.weight.detach().clone()

    def pulls():
        toy.optimiser.zero_grad()
        toy.method.loss(toy.batch()).backward()
        plain = toy.model.weight.grad.clone()
        toy.method.after_backward(toy.model)
        return toy.model.weight.grad - plain

    toy.step()
    assert not torch.equal(toy.model.weight, home)
    assert not pulls().any()
    toy.check(50.0)
    best, proxies = toy.model.weight.detach().clone(), toy.method.proxies.vectors.detach().clone()
    for score in (49.0, 49.0):
        toy.step()
        assert torch.equal(toy.method.converged, proxies)
        toy.check(score)
    assert int(toy.method.problems) == 1
    torch.testing.assert_close(pulls(), 0.7 * (toy.model.weight.detach() - best))
    assert not torch.equal(toy.model.weight, best), "the network is not rolled back"
    toy.method.eval()
    assert not pulls().any()


def test_new_proxies_are_embeddings_of_their_class_far_from_the_old_ones():
    """Merged proxies start apart again, and no pick is nearer to the old ones than the rest of the pool."""
    toy = Toy("ccp(per_class=2, pool=6, patience=1)", space="cosine")
    toy.check()
    with torch.no_grad():
        toy.method.proxies.vectors.copy_(toy.method.proxies.vectors[::2].repeat_interleave(2, 0))
    toy.check(2.0)
    old = Space.COSINE.project(toy.method.converged).view(CLASSES, 2, DIM)
    toy.check(1.0)
    new = toy.method.proxies.vectors.detach().view(CLASSES, 2, DIM)
    ((pool, augment),) = toy.asked
    assert augment
    x = Space.COSINE.project(toy.embed(pool)).view(CLASSES, 6, DIM)
    far = torch.cdist(x, old).amin(2)
    for c in range(CLASSES):
        assert set(pool.view(CLASSES, 6)[c].tolist()) == set((c == LABELS).nonzero().flatten().tolist())
        assert torch.cdist(new[c], x[c]).amin(1).max() < 1e-6
        assert torch.cdist(new[c][:1], old[c]).min() == pytest.approx(float(far[c].max()))


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_where_sub_problems_end(patience):
    rng = torch.Generator().manual_seed(patience)
    scores = (torch.randint(0, 6, (40,), generator=rng) * 0.7 * BETTER + 10).tolist()
    naive = oracle_ccp.Patience(patience, least=BETTER)
    want = [number for number, score in enumerate(scores, start=1) if naive.check(score) == "renew"]
    assert sub_problem_ends(scores, patience) == want
    assert len(want) > 3
    toy = Toy(f"ccp(per_class=1, patience={patience})")
    toy.check()
    got = [number for number, score in enumerate(scores, start=1) if toy.check(score) is None and toy.asked]
    assert got == want


def test_every_counts_checks_and_needs_no_score():
    toy = Toy("ccp(per_class=1, every=2, weight=0.5)")
    assert not toy.method.needs_score
    toy.check()
    redrawn = []
    for _ in range(5):
        toy.step()
        toy.check()
        redrawn.append(bool(toy.asked))
    assert redrawn == [False, True, False, True, False]
    assert float(toy.method.strength) == 0.5


def test_a_missing_score_is_refused(tmp_path):
    toy = Toy("ccp")
    toy.check()
    with pytest.raises(NearkinError, match="there is no such score: set select=validation"):
        toy.check()
    with pytest.raises(NearkinError, match="set select=validation"):
        nk.train(data="glyphs(classes=48, samples=6)", method="ccp", device="cpu", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_it_cannot_wrap_and_settings_that_cannot_be():
    with pytest.raises(NearkinError, match="pairs of samples"):
        method("ccp(proxy_anchor)", classes=4, dim=3)
    for wrong in ("pool=0", "patience=0", "every=-1", "weight=-1.0"):
        with pytest.raises(NearkinError, match="ccp needs"):
            method(f"ccp({wrong})", classes=4, dim=3)


def test_eval_mode_draws_nothing():
    toy = Toy("ccp(per_class=1)")
    toy.method.eval()
    before = copy.deepcopy(toy.method.state_dict())
    toy.check()
    toy.check(3.0)
    assert all(torch.equal(value, before[key]) for key, value in toy.method.state_dict().items())


def test_no_weight_no_pull():
    toy = Toy("ccp(per_class=1, weight=0, patience=1)")
    toy.check()
    for score in (2.0, 1.0):
        toy.step()
        toy.check(score)
    toy.method.loss(toy.batch()).backward()
    before = toy.model.weight.grad.clone()
    toy.method.after_backward(toy.model)
    assert torch.equal(toy.model.weight.grad, before)


# Samples in place of proxies.


def test_samples_stand_for_themselves():
    """Their images follow each batch, and the loss compares with their embeddings, gradients and all."""
    toy = Toy("ccp(contrastive(negative=1), per_class=2, pool=3, anchors=samples, patience=1)")
    assert list(toy.method.parameters()) == []
    assert toy.method.reads_state
    toy.check()
    chosen = toy.method.chosen.clone()
    assert torch.equal(LABELS[chosen], torch.arange(CLASSES).repeat_interleave(2))
    step = toy.batch()
    assert torch.equal(step.index[8:], chosen)
    x, y = step.x.tolist(), step.y.tolist()
    rest = {**toy.method.inner.spec.options, "space": "ball"}
    batch = step.index[:8].tolist()
    rows = [batch.index(row) if row in batch else -1 for row in chosen.tolist()]
    assert -1 in rows
    assert max(rows) >= 0, "one that is in the batch already"
    want = oracles.contrastive(x[:8], y[:8], x[8:], y[8:], rows, **rest)
    step.x.retain_grad()
    loss = toy.method.loss(step)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(want, rel=1e-9)
    assert step.x.grad[8:].abs().sum() > 0
    toy.check(2.0)
    assert torch.equal(toy.method.chosen, chosen)
    toy.check(1.0)
    assert int(toy.method.problems) == 1
    assert toy.asked[0][1] is False, "the old samples are embedded as they are"
    assert torch.equal(toy.asked[0][0], chosen)
    assert not torch.equal(toy.method.chosen, chosen)
    assert torch.equal(LABELS[toy.method.chosen], LABELS[chosen])
    with pytest.raises(NearkinError, match="samples for anchors"):
        toy.method(torch.randn(4, DIM), torch.arange(4))


# Resume.


@pytest.mark.parametrize("anchors", ["proxies", "samples"])
def test_a_loaded_method_resumes_inside_a_sub_problem(anchors):
    spec = f"ccp(per_class=2, pool=3, weight=0.4, patience=2, anchors={anchors})"

    def begin(seed):
        toy = Toy(spec, seed=seed)
        toy.points = Toy(spec).points
        return toy

    whole = begin(0)
    whole.check()
    for score in (3.0, 2.0, 2.0, 5.0):  # one sub-problem is over, the next has a best check
        whole.step()
        whole.check(score)
    whole.step()
    other = begin(1)
    for name in ("model", "method"):
        getattr(other, name).load_state_dict(copy.deepcopy(getattr(whole, name).state_dict()))
    other.done = whole.done
    for toy in (whole, other):
        torch.manual_seed(7)  # what a redraw draws with, which a run saves
        for score in (4.0, 4.5, 1.0):
            toy.check(score)
            toy.step()
    assert int(whole.method.problems) == 2
    for name in ("model", "method"):
        a, b = getattr(whole, name).state_dict(), getattr(other, name).state_dict()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_stopped_inside_a_sub_problem_resumes_bit_for_bit(tmp_path, monkeypatch):
    settings = {
        "data": "glyphs(classes=48, samples=6)",
        "method": "ccp(contrastive(negative=1), per_class=2, pool=3, patience=1)",
        "epochs": 3,
        "batch": 24,
        "dim": 8,
        "lr": 0.01,
        "warmup": 0,
        "space": "ball",
        "select": "validation",
        "check_every": 1,
        "seed": 2,
        "device": "cpu",
    }
    whole = nk.train(**settings, out=tmp_path / "whole")
    scores = [e["score"] for e in whole.events() if e["event"] == "check"]
    over = sub_problem_ends(scores, 1)
    stop = next(n for n in range(over[0] + 1, len(scores)) if n not in over and n + 1 not in over)
    training = sys.modules["nearkin.training.loop"].Training
    step = training._one_step

    def interrupt(self, *batch):
        if self.step == stop - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings, out=tmp_path / "cut")
    tensors, about = read_tensors(tmp_path / "cut" / "checkpoint.safetensors")
    assert about["step"] == stop
    assert int(tensors["method.problems"]) == sum(end <= stop for end in over) > 0
    resumed = nk.train(out=tmp_path / "cut", resume=True)
    first, second = (read_tensors(run.checkpoint)[0] for run in (whole, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert read_json(whole.result)["scores"] == read_json(resumed.result)["scores"]
