"""Proxy losses agree with pytorch-metric-learning's where the definitions coincide."""

import math

import pytest
import torch
from contract.cases import CLASSES, DIM, batch, build
from pytorch_metric_learning import losses

# Ours, theirs, and how many proxies a class.
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
