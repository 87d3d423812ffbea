"""The proximal term ½λ‖θ − θ*‖² of CCP and PROFS, added to the gradients: weights are pulled back to an anchor θ*."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.space import at_least_float32, never_lower


class Anchor(nn.Module):
    """A copy θ* of a model's trainable weights, in buffers: bound once, before anything is loaded."""

    def __init__(self) -> None:
        super().__init__()
        # In a tuple, which a module does not take for a part of itself: the model and where its parameters are kept.
        self.bound: tuple[nn.Module, list[tuple[nn.Parameter, str]]] | None = None

    def bind(self, model: nn.Module) -> None:
        """Keep a copy of every trainable parameter."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.register_buffer(_key(name), at_least_float32(parameter.detach()).clone())
        self.bound = model, self._places(model)

    @torch.no_grad()
    def pull(self, model: nn.Module, weight: float) -> None:
        """Add weight·(θ − θ*) to the gradient of every parameter that has one."""
        theta, anchor = self._pairs(model, lambda p: p.grad is not None)
        if theta:
            gradients = [p.grad for p in theta if p.grad is not None]
            # Two sums in place: the difference θ − θ* would be another copy of the model, allocated in every step.
            torch._foreach_add_(gradients, theta, alpha=weight)
            torch._foreach_add_(gradients, anchor, alpha=-weight)

    @torch.no_grad()
    def renew(self, model: nn.Module) -> None:
        """Move the anchor to where the model is."""
        theta, anchor = self._pairs(model, lambda _: True)
        torch._foreach_copy_(anchor, theta)

    def _pairs(self, model: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> tuple[list[Tensor], list[Tensor]]:
        if not self._buffers:
            raise NearkinError("The proximal term has no anchor: call method.bind(model) before the first step.")
        # Found once: to walk through all modules in every step is what the host would spend most of the pull on.
        known = self.bound[1] if self.bound and self.bound[0] is model else self._places(model)
        pairs = [(p, kept) for p, key in known if wanted(p) and (kept := self._buffers[key]) is not None]
        return [p for p, _ in pairs], [kept for _, kept in pairs]

    def _places(self, model: nn.Module) -> list[tuple[nn.Parameter, str]]:
        """The parameters of a model that are kept, each with the name of its buffer."""
        return [(p, key) for name, p in model.named_parameters() if (key := _key(name)) in self._buffers]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]


def _key(name: str) -> str:
    """A buffer's name holds no dot, and is no attribute of the module."""
    return "at/" + name.replace(".", "/")
