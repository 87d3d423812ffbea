"""Proxy losses have the values and gradients of pytorch-metric-learning's where the definitions coincide."""

import math

import pytest
import torch
from contract.cases import CLASSES, DIM, batch, build
from pytorch_metric_learning import losses

from nearkin import method

# Ours, theirs, and the number of proxies per class.
PROXIES = [
    ("proxy_anchor", losses.ProxyAnchorLoss(CLASSES, DIM, margin=0.1, alpha=32), 1),
    ("proxy_nca_pp", losses.ProxyNCALoss(CLASSES, DIM, softmax_scale=9), 1),
    (
        "soft_triple(per_class=3, tau=0.0)",
        losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=3, la=20, gamma=0.1, margin=0.01),
        3,
    ),
    ("norm_softmax", losses.NormalizedSoftmaxLoss(CLASSES, DIM, temperature=0.05), 1),
    ("cosface", losses.CosFaceLoss(CLASSES, DIM, margin=0.35, scale=64), 1),
    ("arcface(margin=0.4)", losses.ArcFaceLoss(CLASSES, DIM, margin=math.degrees(0.4), scale=64), 1),
    (
        "arcface(margin=0.4, per_class=3)",
        losses.SubCenterArcFaceLoss(
            num_classes=CLASSES, embedding_size=DIM, margin=math.degrees(0.4), scale=64, sub_centers=3
        ),
        3,
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "per_class"), PROXIES, ids=[pair[0] for pair in PROXIES])
def test_proxy_losses(ours, theirs, per_class):
    m = build(ours)
    (weights,) = theirs.parameters()
    assert m.proxies.per_class == per_class
    with torch.no_grad():
        weights.copy_(m.proxies.vectors if weights.shape == m.proxies.vectors.shape else m.proxies.vectors.T)
    for seed in range(4):
        x, y = batch(10, seed=seed, dtype=torch.float32)
        assert float(m(x, y).detach()) == pytest.approx(float(theirs(x, y).detach()), rel=1e-5, abs=1e-6)


C, D = 6, 5
SAME = {
    "proxy_anchor(alpha=8, delta=0.3)": lambda: losses.ProxyAnchorLoss(C, D, margin=0.3, alpha=8),
    "mpa(per_class=1)": lambda: losses.ProxyAnchorLoss(C, D, margin=0.1, alpha=32),
    "soft_triple(tau=0.0, per_class=2, scale=9, gamma=0.5, delta=0.2)": lambda: losses.SoftTripleLoss(
        C, D, centers_per_class=2, la=9, gamma=0.5, margin=0.2
    ),
    "proxy_nca_pp(temperature=0.5)": lambda: losses.ProxyNCALoss(C, D, softmax_scale=2),
    "norm_softmax": lambda: losses.NormalizedSoftmaxLoss(C, D, temperature=0.05),
    "cosface(scale=16, margin=0.1)": lambda: losses.CosFaceLoss(C, D, margin=0.1, scale=16),
    "arcface": lambda: losses.ArcFaceLoss(C, D, margin=math.degrees(0.5), scale=64),
    "arcface(per_class=3, scale=10)": lambda: losses.SubCenterArcFaceLoss(
        num_classes=C, embedding_size=D, margin=math.degrees(0.5), scale=10, sub_centers=3
    ),
}


@pytest.mark.parametrize("spec", SAME)
def test_same_value_and_gradients(spec):
    torch.manual_seed(0)
    ours, theirs = method(spec, classes=C, dim=D).double(), SAME[spec]().double()
    x, y = torch.randn(24, D, dtype=torch.float64), torch.randint(C, (24,))
    own = ours.proxies.vectors.detach()[y[0] * ours.proxies.per_class]
    x[0] = 0.1 * own.norm() * x[0] / x[0].norm() - own  # far round: arcface's other branch
    x.requires_grad_()
    (w,) = theirs.parameters()
    turned = w.shape != ours.proxies.vectors.shape  # some of theirs are [D, C·K]
    with torch.no_grad():
        w.copy_(ours.proxies.vectors.T if turned else ours.proxies.vectors)
    a, b = ours(x, y), theirs(x, y)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    of_x, of_proxies = torch.autograd.grad(a, (x, ours.proxies.vectors))
    pml_x, pml_w = torch.autograd.grad(b, (x, w))
    assert of_x.abs().max() > 1e-3
    torch.testing.assert_close(of_x, pml_x, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(of_proxies, pml_w.T if turned else pml_w, rtol=1e-5, atol=1e-7)
