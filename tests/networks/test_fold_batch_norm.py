"""Folded batch norms: the same outputs and gradients, the same names, nothing changed in train mode, safe to copy."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nearkin.networks import fold_batch_norm
from nearkin.networks.backbones import build_trunk
from nearkin.networks.fold_batch_norm import fold_batch_norms
from nearkin.networks.timm_models import import_timm


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=True), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), norm(8)
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return net.double()


def gradients(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net.zero_grad()
    y = net(x)
    y.square().mean().backward()
    return y.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda n: nn.BatchNorm2d(n, affine=False)])
def test_outputs_and_gradients_stay(norm):
    net, x = network(norm).eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    y, g = gradients(net, x)
    names = list(net.state_dict())
    assert fold_batch_norms(net, x) == 2
    y2, g2 = gradients(net, x)
    torch.testing.assert_close(y2, y)
    assert g2.keys() == g.keys()
    for name in g:
        torch.testing.assert_close(g2[name], g[name])
    assert list(net.state_dict()) == names


@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"padding": "same", "stride": 2}, {"padding": 1, "groups": 8}, {"dilation": 2}]
)
def test_one_pass_without_gradients_computes_the_same(act, options, monkeypatch):
    torch.manual_seed(0)
    import_timm()
    from timm.layers import BatchNormAct2d, create_conv2d

    conv, norm = create_conv2d(8, 16, 3, **options), BatchNormAct2d(16, act_layer=act)
    net, x = nn.Sequential(conv, norm).eval(), 3 * torch.randn(2, 8, 10, 10)
    assert fold_batch_norms(net, x) == 1
    passes = []
    by_one_dnn = fold_batch_norm.convolve_by_one_dnn
    monkeypatch.setattr(fold_batch_norm, "convolve_by_one_dnn", lambda *each: passes.append(1) or by_one_dnn(*each))
    for y in (x, x.contiguous(memory_format=torch.channels_last)):
        with torch.no_grad():
            found = net(y)
        torch.testing.assert_close(found, net(y).detach(), atol=1e-5, rtol=1e-5)
    assert len(passes) == 2
    with torch.no_grad():
        conv.weight[0] = torch.nan
        assert net(x)[:, 0].isnan().all()


def test_batch_norm_in_train_mode_runs_as_ever():
    plain, folded = network().train(), network().train()
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    fold_batch_norms(folded, x)
    assert folded[1].training
    torch.testing.assert_close(folded(x), plain(x))
    torch.testing.assert_close(folded[1].running_mean, plain[1].running_mean)


def test_a_copy_folds_its_own_batch_norms():
    net, x = network().eval(), torch.randn(1, 3, 9, 9, dtype=torch.float64)
    fold_batch_norms(net, x)
    twin = copy.deepcopy(net)
    before = twin(x)
    with torch.no_grad():
        net[0].weight.zero_()
        net[1].bias.zero_()
    torch.testing.assert_close(twin(x), before)
    with torch.no_grad():
        twin[1].bias.add_(1)
    assert not torch.allclose(twin(x), before)


def test_what_does_not_feed_a_batch_norm_directly_stays():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.BatchNorm2d(2))
    assert fold_batch_norms(net, torch.zeros(1, 1, 8, 8)) == 0
    shared = nn.Conv2d(2, 2, 1)
    twice = nn.Sequential(shared, nn.BatchNorm2d(2), shared, nn.BatchNorm2d(2))
    assert fold_batch_norms(twice, torch.zeros(1, 2, 4, 4)) == 0


class Shortcut(nn.Module):
    """A convolution whose output goes on beside its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + self.norm(y)


def test_a_convolution_that_feeds_something_else_too_is_not_folded():
    net, x = Shortcut().eval(), torch.randn(2, 3, 5, 5)
    state = {name: t.clone() for name, t in net.state_dict().items()}
    before = net(x)
    assert fold_batch_norms(net, x) == 0
    assert torch.equal(net(x), before)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


def test_a_whole_backbone_folds():
    net = build_trunk("lite0", weights="none", size=64)
    assert sum(hasattr(m, "folded") for m in net.modules()) == 49


def test_the_next_network_of_the_same_kind_is_not_compiled_again():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    for _ in range(2):
        net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 8, 8)
        assert fold_batch_norms(net, x) == 1
        torch.compile(net, backend=backend)(x)
    assert len(graphs) == 1


def test_kernels_of_every_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, run = build_trunk("lite0", weights="none"), list[Any]()

    def convolve(conv: Any, norm: Any, x: torch.Tensor, _: object) -> torch.Tensor:
        run.append(conv)
        weight = conv.weight * norm.weight[:, None, None, None]
        return torch.nn.functional.conv2d(x, weight, norm.bias, conv.stride, 0, 1, conv.groups)

    monkeypatch.setattr(fold_batch_norm, "convolve", convolve)
    monkeypatch.setattr(fold_batch_norm, "fits_kernels", lambda *_: True)
    monkeypatch.setattr(fold_batch_norm, "kernel_kind", lambda conv, _: (conv.groups > 1, conv.stride))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    fold_batch_norm.compile_kernels(trunk, torch.device("cpu"), nullcontext)
    kinds = [(conv.groups > 1, conv.stride) for conv in run]
    assert sorted(kinds) == [(False, (1, 1)), (False, (2, 2)), (True, (1, 1)), (True, (2, 2))]
    assert all(p.grad is None for p in trunk.parameters())
