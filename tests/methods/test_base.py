"""The builder, the base classes, and the errors for wrong use."""

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Method, Step, Strategy
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.losses.contrastive import Contrastive
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.methods.strategies import STRATEGIES
from nearkin.methods.strategies.xbm import XBM
from nearkin.space import Space


def batch(size=6, dim=4, classes=3):
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(0)), torch.arange(size) % classes


def test_a_loss_from_its_spec():
    m = method("proxy_anchor(alpha=16, per_class=2)", classes=5, dim=4)
    assert isinstance(m, ProxyAnchor)
    assert m.proxies.vectors.shape == (10, 4)
    assert m.references(*batch()).vectors is m.proxies.vectors, "the batch is compared with the proxies, not itself"
    assert m.spec.options["alpha"] == 16
    assert m.spec.options["delta"] == 0.1, "defaults are kept in the spec too"
    assert method(str(m.spec), classes=5, dim=4).spec == m.spec


def test_a_strategy_around_a_loss():
    m = method("xbm(contrastive(form=c1, margin=0.4), size=16, start=2)", classes=5, dim=4)
    assert isinstance(m, XBM)
    assert isinstance(m.inner, Contrastive)
    assert m.memory.vectors.shape == (16, 4)
    assert m.spec.name == "xbm"
    assert m.spec.args[0].options["margin"] == 0.4
    assert method(str(m.spec), classes=5, dim=4).spec == m.spec


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_a_natural_inner_loss(name):
    m = method(name, classes=3, dim=4)
    assert isinstance(m, Strategy)
    assert isinstance(m.inner, Loss)
    assert m.spec.args[0] == m.inner.spec
    assert m.images_per_class == m.inner.images_per_class


@pytest.mark.parametrize("space", [None, *Space])
def test_one_space_for_all(space):
    m = method("xbm(contrastive)", classes=3, dim=4, space=space)
    assert m.space == m.inner.space == (space or "cosine")
    x, y = batch()
    alone = method("contrastive", classes=3, dim=4, space=space)
    assert torch.equal(m(x * 0.3, y), alone(x * 0.3, y)), "an empty memory adds nothing"


def test_error_messages():
    def refused(spec, match, **given):
        with pytest.raises(NearkinError, match=match) as caught:
            method(spec, **{"classes": 3, "dim": 4, **given})
        assert str(caught.value).endswith(".")

    everything = ", ".join(sorted([*LOSSES, *STRATEGIES]))
    refused(
        "proxy_ancor", rf"^There is no method 'proxy_ancor'\. Did you mean 'proxy_anchor'\? There are: {everything}\.$"
    )
    refused("xbm(contrastiv)", r"There is no method 'contrastiv'\. Did you mean 'contrastive'\?")
    refused("proxy_anchor(alfa=3)", r"^proxy_anchor has no option 'alfa'\. Did you mean 'alpha'\? It has: alpha, delta")
    refused("proxy_anchor(alpha=big)", "^proxy_anchor: alpha must be a number, not 'big'")
    refused("proxy_anchor(classes=3)", "^proxy_anchor has no option 'classes'")
    refused("xbm(contrastive(form=c9))", "^contrastive: form must be one of c1, c2, squared, not 'c9'")
    refused("proxy_anchor(contrastive)", "^proxy_anchor is a loss and takes no inner method; got contrastive")
    refused("xbm(contrastive, triplet_)", r"xbm takes one loss|There is no method 'triplet_'")
    refused("xbm(contrastive, contrastive)", r"^xbm takes one loss, as in xbm\(")
    refused("xbm(xbm)", r"^xbm takes one loss, as in xbm\(")
    refused("xbm(proxy_anchor)", "^xbm needs a loss on pairs of samples")
    refused("proxy_anchor(per_class=0)", "at least one class, dimension and proxy")
    refused("proxy_anchor", "There is no space 'cosin'.* Did you mean 'cosine'", space="cosin")


@pytest.mark.parametrize(
    "name", [name for name, entry in LOSSES.items() if method(name, classes=2, dim=2).proxies is not None]
)
def test_xbm_refuses_every_loss_with_proxies(name):
    with pytest.raises(NearkinError, match=r"^xbm needs a loss on pairs of samples"):
        method(f"xbm({name})", classes=3, dim=4)


@pytest.mark.parametrize("spec", ["proxy_anchor", "contrastive", "xbm(contrastive)"])
@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (torch.zeros(4), torch.zeros(4).long(), r"embeddings \[B, D\] and labels \[B\]; got \[4\] and \[4\]"),
        (torch.zeros(4, 4), torch.zeros(4, 1).long(), r"got \[4, 4\] and \[4, 1\]"),
        (torch.zeros(4, 4), torch.zeros(3).long(), r"got \[4, 4\] and \[3\]"),
        (torch.zeros(0, 4), torch.zeros(0).long(), r"got \[0, 4\] and \[0\]"),
        (torch.zeros(4, 4), torch.zeros(4), r"Labels are integers; got torch.float32"),
        (torch.zeros(4, 4), torch.zeros(4).bool(), r"Labels are integers; got torch.bool"),
        (torch.zeros(2, 4), torch.tensor([0, -1]), r"Labels run from 0.*; got -1 to 0"),
    ],
)
def test_invalid_batches_are_refused(spec, x, y, match):
    with pytest.raises(NearkinError, match=match):
        method(spec, classes=3, dim=4)(x, y)


def test_labels_out_of_range_are_refused_by_proxy_losses():
    x = torch.randn(2, 4)
    with pytest.raises(NearkinError, match=r"^Labels run from 0 to 2 here; got 1 to 3\.$"):
        method("proxy_anchor", classes=3, dim=4)(x, torch.tensor([1, 3]))
    assert method("contrastive", classes=3, dim=4)(x, torch.tensor([1, 300])).isfinite()


def test_forward_is_the_loss_of_a_bare_step():
    x, y = batch()
    for spec in ("proxy_anchor", "contrastive", "xbm(contrastive)"):
        m = method(spec, classes=3, dim=4)
        assert torch.equal(m(x, y), m.loss(Step(x, y)))
        assert torch.equal(m(x, y.to(torch.int32)), m(x, y))


def test_groups_give_proxies_their_speed():
    m = method("proxy_anchor(speed=7)", classes=3, dim=4)
    (group,) = m.groups(0.1)
    assert group["params"] == [m.proxies.vectors]
    assert group["lr"] == pytest.approx(0.7)
    assert method("contrastive", classes=3, dim=4).groups(0.1) == [{"params": [], "lr": 0.1}]


def test_groups_give_a_boundary_its_speed():
    m = method("profs(margin(learn=True, speed=20))", classes=3, dim=4)
    (group,) = m.groups(0.1)
    assert group["params"] == [m.inner.boundary]
    assert group["lr"] == pytest.approx(2.0)


def test_groups_hold_every_parameter_once_with_its_speed():
    class Both(Method):
        def __init__(self):
            super().__init__()
            self.inner = method("proxy_anchor(speed=7)", classes=3, dim=4)
            self.bound = torch.nn.Parameter(torch.zeros(2))

    m = Both()
    fast, plain = m.groups(0.1)
    assert fast["params"] == [m.inner.proxies.vectors]
    assert fast["lr"] == pytest.approx(0.7)
    assert plain["params"] == [m.bound]
    assert plain["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", [*LOSSES, *STRATEGIES])
def test_groups_cover_the_parameters(name):
    m = method(name, classes=3, dim=4)
    listed = [id(p) for group in m.groups(1.0) for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in m.parameters())


def test_batches_follow_the_methods_wish():
    labels = torch.arange(8).repeat_interleave(6)
    pairs = next(method("contrastive", classes=8, dim=4).batches(labels, 16, seed=0))
    assert sorted(torch.bincount(labels[pairs]).tolist())[-4:] == [4, 4, 4, 4]
    two = next(method("contrastive", classes=8, dim=4).batches(labels, 16, seed=0, images_per_class=2))
    assert set(torch.bincount(labels[two]).tolist()) <= {0, 2}
    drawn = method("proxy_anchor", classes=8, dim=4)
    assert len(next(drawn.batches(labels, 16, seed=0)).unique()) == 16
    again = drawn.batches(labels, 16, seed=0, start=2)
    run = drawn.batches(labels, 16, seed=0)
    next(run), next(run)
    for _ in range(4):
        assert torch.equal(next(run), next(again))


def test_proxies_from_data_at_the_first_check():
    x, labels = batch()
    m = method("proxy_anchor(initial=means)", classes=3, dim=4)
    m.at_check(torch.nn.Identity(), lambda *_, **__: x, labels)
    for c in range(3):
        torch.testing.assert_close(m.proxies.vectors.detach()[c], x[labels == c].mean(0))


def test_lowering_a_method_leaves_its_state():
    class Bound(Method):
        def __init__(self):
            super().__init__()
            self.bound = torch.nn.Parameter(torch.full((2,), 1 / 3))

    m = torch.nn.Sequential(Bound(), torch.nn.Linear(2, 2)).half()
    assert m[0].bound.dtype == torch.float32
    assert m[1].weight.dtype == torch.float16
    assert m.double()[0].bound.dtype == torch.float64
