"""For a loop that only calls `loss = method(x, y)`: batches wait here until an optimiser has stepped."""

from typing import Any

import torch
from torch import Tensor

from nearkin.methods.step import Step, optimiser_steps

KEY = "pending."


class PendingBatches:
    """Batches that the state of a method has not been updated with, each with the optimiser's steps before it."""

    def __init__(self) -> None:
        self.held: list[tuple[int, Step]] = []

    def add_at_gradient(self, loss: Tensor, step: Step) -> None:
        """Hold the batch as soon as the gradient of its loss is taken, and once however often that is."""
        seen = list[None]()

        def add(_: Tensor) -> None:
            if not seen:
                seen.append(None)
                self.held.append((optimiser_steps(), step))

        loss.register_hook(add)  # type: ignore[no-untyped-call]

    def ready(self) -> list[Step]:
        """The batches after whose gradient an optimiser has stepped."""
        taken = optimiser_steps()
        return [step for before, step in self.held if before != taken]

    def waiting(self) -> list[tuple[int, Step]]:
        """The other batches, to be held on."""
        taken = optimiser_steps()
        return [(before, step) for before, step in self.held if before == taken]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """All tensors by name, for a state dict."""
        named = [step.tensors() for _, step in self.held]
        return {f"{prefix}{KEY}{n}.{name}": t for n, tensors in enumerate(named) for name, t in tensors.items()}

    def take_from(self, state_dict: dict[str, Any], prefix: str, device: torch.device | None) -> None:
        """Hold the batches of a state dict, which lose their entries there, in place of the present ones."""
        found: dict[int, dict[str, Tensor]] = {}
        for key in [key for key in state_dict if key.startswith(prefix + KEY)]:
            number, name = key.removeprefix(prefix + KEY).split(".", 1)
            found.setdefault(int(number), {})[name] = state_dict.pop(key).to(device)
        self.held = [(optimiser_steps(), Step.from_tensors(found[n])) for n in sorted(found)]
