"""A running mean of a network's weights over the steps of its training, to measure and keep instead of the last ones.

After step n of the mean its weights move towards the network's by max(1 − d, 1/n): at d = 1 it is the plain mean of
all steps, below 1 it forgets the past at that rate. Running statistics of batch norm are averaged like weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """The mean of a network's weights, in tensors of its own; the network trains on with its weights."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        state = {name: t for name, t in network.state_dict().items() if t.is_floating_point()}
        self.decay, self.weights = decay, list(state.values())  # of the network: training changes them in place
        self.mean = {name: t.clone() for name, t in state.items()}

    @torch.no_grad()
    def add(self, count: int) -> None:
        """Count the network's weights as those of step `count` of the mean, from 1 on."""
        torch._foreach_lerp_(list(self.mean.values()), self.weights, max(1 - self.decay, 1 / count))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give the network the mean as its weights within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, mean in zip(self.weights, self.mean.values(), strict=True):
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)
