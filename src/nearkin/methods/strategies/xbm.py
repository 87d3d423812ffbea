"""XBM. Wang, Zhang, Huang, Scott: Cross-Batch Memory for Embedding Learning. CVPR 2020.

A pair loss within the batch, plus the same loss against a memory of the last embeddings, which drift slowly.

    L = L_pair(batch, batch) + w · L_pair(batch, M)                                                  (Eq. 5 and §3.3)

Symbols
    M the memory of `size` embeddings with labels, first in first out; w its weight (`weight`).
    `reading="code"`: M in the loss already holds the batch, as in the authors' code.

Algorithm
    1  loss          the in-batch loss and the loss against the memory
    2  after_step    from step `start` on, put the detached embeddings into M in place of the oldest

Settings
    start 1,000 steps; size up to the whole training set (SOP); w = 1.
    As CCP's baseline: memory of 25 (CUB, Cars), 400 (In-Shop), 1,400 (SOP) batches.

Departures
    The text does not say whether the batch is in M when the loss is computed. By default it is added after the step.
    The authors' code adds it before the loss, so that pairs of the batch count in both terms: `reading="code"`. That
    code drops positive pairs with s ≥ 1 − 1e-5, to leave out a sample's own copy; here the copy is left out.
    Before `start` the memory is empty and its term is 0: empty slots are neither positive nor negative.

Relations
    `moco` fills its queue by a momentum network; `proxy_isa` keeps only samples that are not outliers.
"""

from typing import Literal

import torch
from torch import Tensor

from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.memory import Memory
from nearkin.methods.strategies.inner_loss import require_pairs


class XBM(Strategy):
    """A pair loss against the batch and a memory of `size` entries that fills from step `start` on."""

    natural_inner = "contrastive(form=c1)"
    later_options = ("reading",)
    has_sample_losses = True
    steps: Tensor

    def __init__(
        self,
        inner: Loss,
        *,
        dim: int,
        size: int = 1024,
        start: int = 1000,
        weight: float = 1.0,
        reading: Literal["text", "code"] = "text",
    ) -> None:
        super().__init__(inner)
        require_pairs(inner, "xbm")
        self.memory = Memory(size, dim)
        self.start, self.weight, self.batch_first = start, weight, reading == "code"
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def loss(self, step: Step) -> Tensor:
        memory = self.memory.references()
        if self.batch_first:
            memory = self.memory.with_batch(step.x.detach(), step.y, keep=self._started(step))
        return self.inner.loss(step) + self.weight * self.inner.objective(self.relation(step, memory))

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if not self.training:
            return
        self.memory.enqueue(step.x.detach(), step.y, keep=self._started(step))
        self.steps += 1

    def _started(self, step: Step) -> Tensor:
        return (self.steps >= self.start).expand(len(step.y))
