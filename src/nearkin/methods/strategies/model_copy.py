"""Copies of a model in buffers: a base for them, and the anchor of the proximal term in CCP and PROFS."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.state import PreciseModule
from nearkin.space import at_least_float32


class ModelCopy(PreciseModule):
    """Copies of a model's tensors, in buffers. Bind it once, before anything is loaded."""

    prefix: str  # of the buffers' names, which hold no dot and are no attribute of the module

    def key(self, name: str) -> str:
        """The buffer that holds the tensor of this name."""
        return self.prefix + name.replace(".", "/")

    def store(self, name: str, t: Tensor) -> None:
        """Keep a copy of a tensor."""
        t = t.detach()
        self.register_buffer(self.key(name), (at_least_float32(t) if t.is_floating_point() else t).clone())


class Anchor(ModelCopy):
    """θ*, a copy of a model's trainable weights; the proximal term ½λ‖θ − θ*‖² pulls the model back to it."""

    prefix = "at/"

    def __init__(self) -> None:
        super().__init__()
        # In a tuple, so that nn.Module does not register the model as a submodule.
        self.bound: tuple[nn.Module, list[tuple[nn.Parameter, str]]] | None = None

    def bind(self, model: nn.Module) -> None:
        """Copy every trainable parameter."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.store(name, parameter)
        self.bound = model, self._parameters_with_keys(model)

    @torch.no_grad()
    def pull(self, model: nn.Module, weight: float) -> None:
        """Add weight·(θ − θ*) to the gradient of every parameter that has one."""
        theta, anchor = self._pairs(model, lambda p: p.grad is not None)
        if theta:
            gradients = [p.grad for p in theta if p.grad is not None]
            # Two sums in place: the difference θ − θ* would allocate another copy of the model in every step.
            torch._foreach_add_(gradients, theta, alpha=weight)
            torch._foreach_add_(gradients, anchor, alpha=-weight)

    @torch.no_grad()
    def renew(self, model: nn.Module) -> None:
        """Move the anchor to the model's current weights."""
        theta, anchor = self._pairs(model, lambda _: True)
        torch._foreach_copy_(anchor, theta)

    def _pairs(self, model: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> tuple[list[Tensor], list[Tensor]]:
        if not self._buffers:
            raise NearkinError("The proximal term has no anchor: call method.bind(model) before the first step.")
        # Walking through all modules would take most of the host's time in a pull, so the pairs are kept.
        known = self.bound[1] if self.bound and self.bound[0] is model else self._parameters_with_keys(model)
        pairs = [(p, kept) for p, key in known if wanted(p) and (kept := self._buffers[key]) is not None]
        return [p for p, _ in pairs], [kept for _, kept in pairs]

    def _parameters_with_keys(self, model: nn.Module) -> list[tuple[nn.Parameter, str]]:
        """The copied parameters of a model, each with the name of its buffer."""
        return [(p, key) for name, p in model.named_parameters() if (key := self.key(name)) in self._buffers]
