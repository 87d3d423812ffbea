"""Triplets listed one by one, for swap and smooth: large batches in blocks."""

import pytest
import torch

from nearkin import method
from nearkin.methods.losses import triplet as module


@pytest.mark.parametrize("spec", ["triplet(swap=True)", "triplet(smooth=True, mining=semi_hard, over=all)"])
def test_blocks_change_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=rng, dtype=torch.float64).requires_grad_()
    y = torch.randint(5, (20,), generator=rng)
    loss = method(spec, classes=5, dim=4)(x, y)
    (gradient,) = torch.autograd.grad(loss, x)
    monkeypatch.setattr(module, "TERMS", 7 * 20)  # blocks of seven pairs
    again = method(spec, classes=5, dim=4)(x, y)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(torch.autograd.grad(again, x)[0], gradient)
