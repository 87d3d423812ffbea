"""Proxies: grouped by class, drawn once, never below float32."""

import copy

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import METHODS, method
from nearkin.methods.proxies import Proxies
from nearkin.spec import option_names
from nearkin.training.row_adamw import RowAdamW


def test_rows_are_grouped_by_class():
    proxies = Proxies(3, 5, per_class=4)
    assert proxies.vectors.shape == (12, 5)
    for c in range(3):
        assert proxies.labels[4 * c : 4 * c + 4].tolist() == [c] * 4
    assert proxies.classes == 3
    refs = proxies.references()
    assert refs.vectors is proxies.vectors
    assert refs.labels is proxies.labels
    assert refs.rows is None
    assert refs.per_class == 4


def test_the_random_start_has_the_stated_spread():
    torch.manual_seed(0)
    vectors = Proxies(200, 100, initial="normal").vectors
    assert float(vectors.detach().std()) == pytest.approx((2 / 200) ** 0.5, rel=0.03)
    assert abs(float(vectors.detach().mean())) < 0.01


@pytest.mark.parametrize(("classes", "dim", "per_class"), [(0, 4, 1), (3, 0, 1), (3, 4, 0)])
def test_nothing_to_hold_is_refused(classes, dim, per_class):
    with pytest.raises(NearkinError, match="at least one"):
        Proxies(classes, dim, per_class=per_class)


def test_labels_and_vectors_are_in_the_state():
    assert set(Proxies(3, 2).state_dict()) >= {"vectors", "labels", "drawn"}


LABELS = [0, 2, 0, 1, 0, 2, 0, 0]  # 5 of class 0, 1 of class 1, 2 of class 2, none of class 3


def naive_means(x, old, per_class):
    """Proxy k of a class: the mean of its samples k, k + K, k + 2K, …; without any it stays as it was."""
    out = []
    for c in range(4):
        rows = [i for i, label in enumerate(LABELS) if label == c]
        for k in range(per_class):
            mine = rows[k::per_class]
            out.append(sum(x[i] for i in mine) / len(mine) if mine else old[c * per_class + k])
    return torch.stack(out)


@pytest.mark.parametrize("per_class", [1, 2, 3])
def test_means_of_the_data(per_class):
    torch.manual_seed(1)
    proxies = Proxies(4, 3, per_class=per_class, initial="means")
    old, x = proxies.vectors.detach().clone(), torch.randn(len(LABELS), 3)
    proxies.from_data(lambda: x, torch.tensor(LABELS))
    torch.testing.assert_close(proxies.vectors.detach(), naive_means(x, old, per_class))
    assert proxies.vectors.requires_grad


def test_the_data_is_looked_at_once_and_a_loaded_state_knows_it():
    proxies = Proxies(4, 3, initial="means")
    x = torch.randn(len(LABELS), 3)
    proxies.from_data(lambda: x, torch.tensor(LABELS))
    drawn = proxies.vectors.detach().clone()
    fresh = Proxies(4, 3, initial="means")
    fresh.load_state_dict(proxies.state_dict())
    for p in (proxies, fresh):
        p.from_data(lambda: x + 1, torch.tensor(LABELS))
        assert torch.equal(p.vectors.detach(), drawn)


def test_a_random_start_never_asks_for_embeddings():
    proxies = Proxies(4, 3, initial="normal")
    before = proxies.vectors.detach().clone()

    def embed():
        raise AssertionError("nobody should embed the training set")

    proxies.from_data(embed, torch.tensor(LABELS))
    assert torch.equal(proxies.vectors.detach(), before)


def test_low_precision_embeddings_make_float32_proxies():
    proxies = Proxies(4, 3, initial="means")
    proxies.from_data(lambda: torch.randn(len(LABELS), 3).half(), torch.tensor(LABELS))
    assert proxies.vectors.dtype == torch.float32


@pytest.mark.parametrize("lower", [torch.nn.Module.half, torch.nn.Module.bfloat16])
def test_lowering_a_whole_model_leaves_the_proxies(lower):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Proxies(3, 2))
    before = model[1].vectors.detach().clone()
    lower(model)
    assert model[0].weight.dtype != torch.float32
    assert model[1].vectors.dtype == torch.float32
    assert torch.equal(model[1].vectors.detach(), before)
    assert model[1].labels.dtype == torch.int64


def test_float64_is_followed():
    assert Proxies(3, 2).double().vectors.dtype == torch.float64


SAMPLING = [name for name, entry in METHODS.items() if "sample_rate" in option_names(entry)]
Y = torch.tensor([3, 3, 39, 0])


def sampling(name="proxy_anchor", rate=0.3, *, seed=0, per_class=2):
    torch.manual_seed(seed)
    initial = {"initial": "normal"} if name == "proxy" else {}
    return method(name, classes=40, dim=5, per_class=per_class, sample_rate=rate, **initial)


def test_every_method_with_proxies_of_its_own_samples_them():
    assert set(SAMPLING) == {name for name, entry in METHODS.items() if "speed" in option_names(entry)} - {
        "margin",
        "ccp",
    }


@pytest.mark.parametrize("name", SAMPLING)
def test_a_step_uses_its_own_classes_and_others_at_random(name):
    m = sampling(name)
    x = torch.randn(4, 5, requires_grad=True)
    seen = []
    for _ in range(20):
        refs = m.proxies.references(Y)
        classes = refs.labels[::2]
        assert len(classes) == 12
        assert torch.equal(classes, classes.unique())
        assert torch.equal(refs.labels, classes.repeat_interleave(2))
        assert torch.equal(refs.vectors, m.proxies.vectors[m.proxies.vectors.rows_in_use])
        assert set(Y.tolist()) <= set(classes.tolist())
        m.zero_grad()
        loss = m.loss(Step(x, Y))
        assert torch.equal(loss, m.loss(Step(x, Y))), "a second look draws the same"
        loss.backward()
        touched = m.proxies.vectors.grad.any(1).nonzero().flatten()
        assert set(touched.tolist()) <= set(m.proxies.vectors.rows_in_use.tolist())
        seen.append(classes.tolist())
        m.after_step(Step(x, Y))
    others = [c for classes in seen for c in classes if c not in Y.tolist()]
    assert len(set(others)) > 30, "the draw changes from step to step"
    assert len({tuple(classes) for classes in seen}) == 20


def test_each_other_class_is_drawn_equally_often():
    proxies, counts = sampling(rate=0.25).proxies, torch.zeros(40)
    for _ in range(2000):
        counts[proxies.references(Y).labels[::2]] += 1
        proxies.count_step()
    others = counts[[c for c in range(40) if c not in Y.tolist()]]
    share = (10 - 3) / 37
    assert float((others / 2000 - share).abs().max()) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_the_draw_depends_on_seed_step_and_batch_alone():
    a, b, other = (sampling(seed=seed).proxies for seed in (0, 0, 1))
    torch.rand(3)
    assert torch.equal(a.references(Y).labels, b.references(Y).labels)
    assert not torch.equal(a.references(Y).labels, other.references(Y).labels)
    for _ in range(3):
        a.count_step()
    fresh = sampling(seed=5).proxies
    fresh.load_state_dict(copy.deepcopy(a.state_dict()))
    assert torch.equal(a.references(Y).labels, fresh.references(Y).labels)


def test_more_classes_in_a_batch_than_the_rate_allows_are_all_used():
    y = torch.arange(20)
    assert set(sampling(rate=0.1).proxies.references(y).labels.tolist()) >= set(range(20))


def test_all_classes_are_used_in_eval_mode_and_without_a_batch():
    proxies = sampling().proxies
    assert len(proxies.references().labels) == 80
    assert len(proxies.eval().references(Y).labels) == 80


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sample_of_all_classes_is_dense(name):
    """A rate that rounds up to all classes: the whole machinery, and the numbers of a rate of 1, bit for bit."""
    dense, all_of_it = sampling(name, 1.0), sampling(name, 0.999)
    torch.manual_seed(1)
    x = torch.randn(4, 5)
    results = []
    for m in (dense, all_of_it):
        points = x.clone().requires_grad_()
        m.loss(Step(points, Y)).backward()
        results.append((points.grad, m.proxies.vectors.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD, RowAdamW])
def test_a_plain_loop_with_any_optimiser_trains(optimiser):
    m = sampling(per_class=1)
    made, x = optimiser(m.groups(0.001)), torch.nn.functional.one_hot(Y % 5, 5).float()
    losses = []
    for _ in range(30):
        loss = m(x, Y)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    m.catch_up()
    assert int(m.proxies.steps) == 30
    assert sum(losses[-5:]) < sum(losses[:5])


def test_options_that_cannot_be_are_refused():
    with pytest.raises(NearkinError, match="above 0 and at most 1"):
        sampling(rate=0.0)
    for name in ("vcpa", "proxy_isa", "proxy_updates"):
        with pytest.raises(NearkinError, match="leave out sample_rate"):
            method(f"{name}(proxy_anchor(sample_rate=0.5))", classes=3, dim=2)


def test_without_sampling_the_state_is_that_of_older_versions():
    assert set(Proxies(3, 2).state_dict()) == {"vectors", "labels", "drawn"}
