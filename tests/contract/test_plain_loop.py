"""A loop that only calls `method(x, y)` trains as the loop with all verbs, bit for bit."""

import copy
import gc
import io
import weakref
from dataclasses import replace

import pytest
import torch
from contract.cases import STRATEGY_SPECS, Run, batch, build
from contract.test_state import assert_same

from nearkin.errors import LoopWarning
from nearkin.methods.base import Step
from nearkin.methods.catalogue import METHODS, method

DRAWN = ["margin(drawn=True)", "xbm(margin(drawn=True), start=0, size=20)"]
MOVING = [spec for spec in STRATEGY_SPECS + DRAWN if build(spec).updates_state]


class PlainRun(Run):
    """The loop of a user: no `loss`, no `after_step`. Where data or gradients are needed, the lines that docs name."""

    def steps(self, count):
        if not self.done:
            self.method.at_check(self.model, self.embed, self.blobs.labels)
        batches = self.method.batches(self.blobs.labels, self.size, seed=3, start=self.done)
        for _ in range(count):
            self.gradients(next(batches))
            self.update()
        return self

    def gradients(self, index):
        points = self.blobs.points[index]
        loss = self.method(self.model(points), self.blobs.labels[index], images=points, index=index)
        loss.backward()
        self.losses.append(float(loss.detach()))

    def update(self):
        self.method.after_backward(self.model)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.done += 1


def started(kind, spec):
    run = kind(spec)
    run.rng = None  # a plain loop has the global generator
    torch.manual_seed(5)
    return run


@pytest.mark.parametrize("spec", ["proxy_anchor(initial=means)", *STRATEGY_SPECS, *DRAWN])
def test_the_same_losses_and_state_as_with_all_verbs(spec):
    ours, plain = started(Run, spec).steps(4), started(PlainRun, spec).steps(4)
    assert plain.losses == ours.losses
    assert_same(plain.method.state_dict(), ours.method.state_dict())
    assert_same(plain.model.state_dict(), ours.model.state_dict())


@pytest.mark.parametrize("spec", MOVING)
def test_a_state_saved_between_gradient_and_step_is_complete(spec):
    whole, first = started(PlainRun, spec).steps(4), started(PlainRun, spec).steps(2)
    first.gradients(next(first.method.batches(first.blobs.labels, first.size, seed=3, start=2)))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (first.model, first.method, first.optimiser)], file)
    file.seek(0)
    random, second = torch.get_rng_state(), PlainRun(spec, seed=1)
    second.rng = None
    for part, state in zip((second.model, second.method, second.optimiser), torch.load(file), strict=True):
        part.load_state_dict(state)
    for mine, other in ((second.model, first.model), (second.method, first.method)):
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            p.grad = q.grad
    torch.set_rng_state(random)
    second.done = 2
    second.update()
    second.steps(1)
    assert first.losses + second.losses == whole.losses
    assert_same(second.method.state_dict(), whole.method.state_dict())


def pair(spec):
    """Two methods in the same state, an optimiser of each, and two batches."""
    one, other = build(spec), build(spec)
    batches = [batch(20, seed=seed, dtype=torch.float32) for seed in (1, 2)]
    for m in (one, other):  # profs has to know how a batch is made up
        next(m.batches(torch.arange(5).repeat_interleave(4), 2 * (m.images_per_class or 4), seed=0))
    for x, _ in batches:
        x.requires_grad_()
    return (one, torch.optim.SGD(one.groups(0.1))), (other, torch.optim.SGD(other.groups(0.1))), batches


def joined(batches):
    x = torch.cat([x.detach() for x, _ in batches])
    return Step(x, torch.cat([y for _, y in batches]), images=x, batches=len(batches))


def plain(m, x, y):
    torch.manual_seed(0)
    return m(x, y, images=x.detach())


@pytest.mark.parametrize("spec", [*MOVING, "xbm(start=0, size=60)"])  # the last has room for all batches
def test_accumulated_batches_count_as_one(spec):
    """Of all batches between two steps of the optimiser `after_step` makes one."""
    (m, optimiser), (other, same), batches = pair(spec)
    torch.manual_seed(0)
    for x, y in batches:
        m(x, y, images=x.detach()).backward()
    optimiser.step()
    found = m.state_dict()
    torch.manual_seed(0)
    notes = [tuple[torch.Tensor, ...]()] * 2
    for number, (x, y) in enumerate(batches):
        step = Step(x, y, images=x.detach())
        other.loss(step).backward()
        notes[number] = other.noted(step)
    same.step()
    if "proxy_isa" in spec:  # outliers are found by the loss
        step = replace(joined(batches), notes=(torch.cat([n[0] for n in notes]),))
    else:
        step = joined(batches)
    other.after_step(step)
    assert_same(found, other.state_dict())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_epochs_and_projections_are_counted_in_batches(every):
    """However many batches there are in a step of the optimiser, as the batches themselves are drawn."""
    isa, profs = started(PlainRun, "proxy_isa(volume=8)"), started(PlainRun, "profs(steps=4, weight=0.1)")
    per_epoch, changed = len(isa.blobs.labels) // isa.size, []
    isa.method.at_check(isa.model, isa.embed, isa.blobs.labels)
    drawn = profs.method.batches(profs.blobs.labels, profs.size, seed=3)
    for number in range(1, 3 * 4 + 1):
        isa.gradients(torch.arange(isa.size) + isa.size * (number % per_epoch))
        profs.gradients(next(drawn))
        if number % every == 0:
            anchor = profs.method.state_dict()["anchor.at/weight"].clone()
            isa.update()
            profs.update()
            changed += [number] * (not torch.equal(profs.method.state_dict()["anchor.at/weight"], anchor))
            assert int(isa.method.state_dict()["steps"]) == number
            assert bool((isa.method.memory.labels >= 0).any()) == (number - every >= per_epoch)
    assert changed == [number for number in range(every, 13, every) if number % 4 < every]


@pytest.mark.parametrize("spec", MOVING)
def test_without_a_step_of_an_optimiser_nothing_moves(spec):
    (m, _), _, batches = pair(spec)
    before = copy.deepcopy(m.state_dict())
    for x, y in batches:
        plain(m, x, y).backward()
    after = m.state_dict()
    assert_same({key: after[key] for key in before}, before)
    assert {key.split(".")[0] for key in after.keys() - before.keys()} == {"pending"}


@pytest.mark.parametrize("spec", MOVING)
def test_calling_after_step_too_moves_once(spec):
    (m, optimiser), (other, same), ((x, y), (u, v)) = pair(spec)
    plain(m, x, y).backward()
    optimiser.step()
    m.after_step(Step(x, y.int(), images=x.detach()))  # another object with the same content
    plain(m, u, v)
    torch.manual_seed(0)
    step = Step(x, y, images=x.detach())
    other.loss(step).backward()
    same.step()
    other.after_step(step)
    assert_same(m.state_dict(), other.state_dict())


def test_the_batch_of_a_loss_is_known_by_its_content():
    """VCPA draws noise in its loss, so a second computation would be another state."""
    states = []
    for other in (lambda t: t, lambda t: t.detach(), lambda t: t.detach().clone()):
        m, (x, y) = build("vcpa"), batch(dtype=torch.float32)
        torch.manual_seed(0)
        m.loss(Step(x, y))
        m.after_step(Step(other(x), other(y).short()))
        states.append(m.state_dict())
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])
    m.loss(Step(x, y))
    assert m.noted(Step(x + 1, y)) == ()


def test_methods_in_one_process_wait_for_a_step_each():
    (one, _), (two, optimiser), ((x, y), (u, v)) = pair("xbm(start=0, size=20)")
    plain(one, x, y).backward()
    optimiser = torch.optim.SGD([u], lr=0.1)
    plain(two, u, v).backward()
    optimiser.step()
    plain(one, x, y)
    plain(two, u, v)
    assert one.memory.labels[: len(y)].equal(y)
    assert two.memory.labels[: len(v)].equal(v)


def test_state_is_up_to_date_after_eval_and_checks():
    for read in (lambda m: m.eval(), lambda m: m.state_dict(), lambda m: m.at_check(None, None, None)):
        (m, _), _, ((x, y), _) = pair("xbm(start=0, size=20)")
        plain(m, x, y).backward()
        torch.optim.SGD([x], lr=0.1).step()
        read(m)
        assert m.memory.labels[: len(y)].equal(y)


def test_batches_without_gradient_are_not_remembered():
    (m, _), _, ((x, y), _) = pair("xbm(start=0, size=20)")
    with torch.no_grad():
        plain(m, x, y)
    plain(m, x, y)
    torch.optim.SGD([x], lr=0.1).step()
    assert int(m.memory.pointer) == 0
    m.eval()
    plain(m, x, y).backward()
    m.train()
    torch.optim.SGD([x], lr=0.1).step()
    assert int(m.state_dict()["memory.pointer"]) == 0


def test_a_gradient_taken_twice_counts_once():
    (m, _), _, ((x, y), _) = pair("xbm(start=0, size=60)")
    loss = plain(m, x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.optim.SGD([x], lr=0.1).step()
    assert int(m.state_dict()["memory.pointer"]) == len(y)


def test_nothing_keeps_a_method_or_the_graph_of_its_loss_alive():
    (m, _), _, ((x, y), _) = pair("vcpa")
    z = x * 2
    loss = plain(m, z, y)
    graph, known = weakref.ref(z), weakref.ref(m)
    loss.backward()
    del loss, z
    gc.collect()
    assert graph() is None, "the pending batch holds no graph"
    del m
    gc.collect()
    assert known() is None


LACKING = {
    "ccp": r"^ccp draws its proxies from embeddings of the training set\. .* method.after_backward\(model\)",
    "moco": r"^moco embeds each batch a second time: call method.bind\(model\) .* images=images\)",
    "profs": r"^profs chooses the images of each batch: .* draw the batches from method.batches",
    "proxy": r"^proxy draws its proxies from embeddings of the training set\. Before the first step, call method.at_",
    "proxy(triplet, initial=means)": r"^Proxies with initial=means start from embeddings of the training set",
    "proxy_isa": r"^proxy_isa counts epochs: call at_check before the first step, or set steps_per_epoch\.",
    "proxy_updates": r"^proxy_updates moves its proxies at the learning rate of the run.* method.groups\(lr\)",
    "vcpa(newton=False)": r"^vcpa\(newton=False\) moves its proxies at the learning rate of the run",
    "proxy_anchor(initial=means)": r"^Proxies with initial=means start from embeddings",
}


@pytest.mark.parametrize("spec", LACKING)
def test_what_a_plain_loop_lacks_is_said_once(spec, recwarn):
    m = method(spec, classes=5, dim=4)
    x, y = batch(dtype=torch.float32)
    x.requires_grad_()
    with pytest.warns(LoopWarning, match=LACKING[spec]) as caught:
        m(x, y).backward()
    assert caught[0].filename == __file__
    assert str(caught[0].message).endswith(" Until then the method's state does not change.") == m.updates_state
    before = copy.deepcopy(m.state_dict())
    torch.optim.SGD([x], lr=0.1).step()
    recwarn.clear()
    m(x, y)
    assert_same(m.state_dict(), before)
    assert not recwarn


@pytest.mark.parametrize("name", [name for name in METHODS if name not in LACKING])
def test_other_methods_lack_nothing(name, recwarn):
    plain(build(name), *batch(dtype=torch.float32))
    assert not recwarn
