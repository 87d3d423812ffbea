"""AdamW that updates only the rows of a parameter that a step has used, for proxies of very many classes.

Moments, their bias correction and weight decay belong to a row: at its t-th update a row w with gradient g is

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
    w ← (1 − η λ) w − η m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)

A row that is not in use keeps w, m, v and t. So a row that every step uses is trained as by AdamW, bit for bit on a
CPU; another one neither decays nor drifts on old moments in between. Time and memory traffic grow with the rows in use.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RowAdamW(torch.optim.AdamW):
    """AdamW that treats groups with `by_row` as above. Their rows in use are the attribute `rows_in_use` [n].

    A parameter without that attribute is updated in all rows.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        by_row = [(p, group) for group in self.param_groups if group.get("by_row") for p in group["params"]]
        gradients = [p.grad for p, _ in by_row]
        for p, group in by_row:
            if p.grad is not None:
                self._update_rows(p, p.grad, group)
                p.grad = None  # so that AdamW passes it over
        loss = super().step(closure)
        for (p, _), gradient in zip(by_row, gradients, strict=True):
            p.grad = gradient
        return loss

    def _update_rows(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(len(p), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        rows = getattr(p, "rows_in_use", None)
        if rows is None:
            rows = torch.arange(len(p), device=p.device)
        (beta1, beta2), lr = group["betas"], group["lr"]
        g = gradient.index_select(0, rows)
        t = state["step"].index_select(0, rows) + 1
        m = state["exp_avg"].index_select(0, rows).lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        for name, value in (("step", t), ("exp_avg", m), ("exp_avg_sq", v)):
            state[name].index_copy_(0, rows, value)
        size = (lr / (1 - beta1 ** t.double())).to(p.dtype)[:, None]
        root = (1 - beta2 ** t.double()).sqrt().to(p.dtype)[:, None]
        w = p.index_select(0, rows).mul_(1 - lr * group["weight_decay"])
        p.index_copy_(0, rows, w.sub_(m.mul_(size).div_(v.sqrt_().div_(root).add_(group["eps"]))))
