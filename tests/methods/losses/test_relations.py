"""The Relations in the headers: a loss that equals another at some setting has the same value there."""

import pytest
import torch
from contract.cases import batch, build

from nearkin.methods.base import Step

SAME = [
    ("mpa(per_class=1, alpha=8.0)", "proxy_anchor(alpha=8.0)"),
    ("soft_triple(per_class=1, delta=0.0, scale=20.0)", "norm_softmax(temperature=0.05)"),
    ("soft_triple(per_class=1, delta=0.2, scale=20.0)", "cosface(margin=0.2, scale=20.0)"),
    (
        "soft_triple(per_class=3, delta=0.2, scale=20.0, similarity=max, tau=0.0)",
        "cosface(margin=0.2, scale=20.0, per_class=3)",
    ),
    ("cosface(margin=0.0, scale=20.0)", "norm_softmax(temperature=0.05)"),
    ("arcface(margin=0.0, scale=20.0)", "norm_softmax(temperature=0.05)"),
    ("proxy_nca_pp(temperature=0.5)", "norm_softmax(temperature=0.25)"),
    ("proxy_gml(ratio=1.0, per_class=1, weight=0.0, scale=4.0)", "norm_softmax(temperature=0.25)"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_proxy_losses_that_meet(one, other):
    a, b = build(one).double(), build(other).double()
    with torch.no_grad():
        b.proxies.vectors.copy_(a.proxies.vectors)
    for seed in range(3):
        x, y = batch(9, seed=seed)
        assert float(a(x, y).detach()) == pytest.approx(float(b(x, y).detach()), rel=1e-6), seed


def test_margin_undivided_is_contrastive():
    """`contrastive(form="c2", reduce="sum")` with m⁺ = β − α, m⁻ = β + α."""
    x, y = batch(9)
    margin = build("margin(sampling=all, over=all, margin=0.2, boundary=1.0)")
    pairs = len(y) * (len(y) - 1)
    want = float(build("contrastive(reduce=sum, positive=0.8, negative=1.2)")(x, y)) / pairs
    assert float(margin(x, y)) == pytest.approx(want)


def test_a_drawn_negative_is_the_expected_one_on_average():
    """`drawn=True` against its mean, over all pairs so that both divide by the same number."""
    x, y = batch(9)
    drawn, expected = build("margin(drawn=True, over=all)"), build("margin(over=all)")
    values = []
    for _ in range(400):
        values.append(drawn(x, y))
        drawn.after_step(Step(x, y))  # a draw hangs on the number of steps so far
    values = torch.stack(values)
    assert values.std() > 0
    error = float(values.std()) / len(values) ** 0.5
    assert float(values.mean()) == pytest.approx(float(expected(x, y)), abs=4 * error)
