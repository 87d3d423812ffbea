"""The proximal pull against autograd of ½λ‖θ − θ*‖², where parameters have gradients and where not; resume."""

import copy

import pytest
import torch
from torch import nn

from nearkin.errors import NearkinError
from nearkin.methods.strategies.model_copy import Anchor


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def bound(seed=0):
    """A network that has moved away from its anchor."""
    model, anchor = network(seed), Anchor()
    anchor.bind(model)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    return model, anchor


def backward(model):
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(6, 4)).square().sum().backward()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_pull_is_the_gradient_of_the_proximal_term():
    model, anchor = bound()
    home = dict(network(0).named_parameters())
    backward(model)
    term = sum((p - home[name].detach()).square().sum() for name, p in model.named_parameters())
    (0.5 * 0.3 * term).backward()
    want = gradients(model)
    backward(model)
    anchor.pull(model, 0.3)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, want[name])


def test_only_parameters_with_a_gradient_are_pulled():
    model, anchor = bound()
    model[0].requires_grad_(False)
    backward(model)
    before = gradients(model)
    anchor.pull(model, 0.3)
    after = gradients(model)
    assert set(before) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_parameters_frozen_at_bind_have_no_anchor():
    model, anchor = network(0), Anchor()
    model[1].requires_grad_(False)
    anchor.bind(model)
    assert len(anchor.state_dict()) == 4
    model[1].requires_grad_(True)
    backward(model)
    before = gradients(model)
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    anchor.pull(model, 1.0)
    unmoved = {name for name in before if torch.equal(gradients(model)[name], before[name])}
    assert unmoved == {"1.weight", "1.bias"}


def test_at_the_anchor_there_is_no_pull():
    model, anchor = bound()
    anchor.renew(model)
    backward(model)
    before = gradients(model)
    anchor.pull(model, 0.7)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, before[name], rtol=1e-6, atol=1e-6)  # 0.7 θ − 0.7 θ, each rounded


def test_the_anchor_does_not_move_with_the_model():
    model, anchor = bound()
    before = copy.deepcopy(anchor.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(anchor.state_dict()[key], before[key]) for key in before)
    anchor.renew(model)
    assert all(not anchor.state_dict()[key].any() for key in before)


def test_a_loaded_anchor_pulls_as_the_saved_one():
    model, anchor = bound()
    anchor.renew(model)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    backward(model)
    anchor.pull(model, 0.3)
    want = gradients(model)

    other = Anchor()
    other.bind(network(7))
    other.load_state_dict(anchor.state_dict())
    backward(model)
    other.pull(model, 0.3)
    assert all(torch.equal(gradients(model)[name], want[name]) for name in want)


def test_copies_of_both_go_on_by_themselves():
    """The cached pairs of the bound model are not used for another model."""
    model, anchor = bound()
    other, again = copy.deepcopy(model), copy.deepcopy(anchor)
    with torch.no_grad():
        for p in other.parameters():
            p += 1.0
    for net, kept in ((other, again), (other, anchor), (model, again)):
        backward(net)
        plain = gradients(net)
        kept.pull(net, 0.5)
        for name, p in net.named_parameters():
            home = anchor.state_dict()["at/" + name.replace(".", "/")]
            torch.testing.assert_close(p.grad, plain[name] + 0.5 * (p.detach() - home))


def test_lower_precision_leaves_the_anchor():
    _, anchor = bound()
    before = copy.deepcopy(anchor.state_dict())
    anchor.half()
    assert all(torch.equal(anchor.state_dict()[key], before[key]) for key in before)


def test_an_anchor_that_was_never_bound_says_so():
    model = network(0)
    backward(model)
    with pytest.raises(NearkinError, match="bind"):
        Anchor().pull(model, 0.3)
