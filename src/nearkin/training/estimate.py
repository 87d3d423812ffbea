"""Estimate how long a training will take, by timing the network on a few images before it starts.

Nothing that decides the outcome is touched: weights and batch statistics stay (the network is in eval mode, gradients
go to no parameter), and random numbers come from a generator of the estimate's own.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nearkin.console import duration
from nearkin.data.images import counted
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.views import Augment
from nearkin.networks.embedder import channels_last
from nearkin.networks.eval_mode import evaluating
from nearkin.training.model import Model, autocast
from nearkin.training.plan import Plan

SAMPLE = 32
"""Images of a timed step on a CPU, where the time is proportional to their number."""

REPEATS, SECONDS = 3, 2.0
"""Timed steps of each kind, fewer if they take longer than this."""


class ImageSeconds(NamedTuple):
    """Seconds per image of a training step: with the trunk frozen, as in warm-up, and of the whole network."""

    warming_up: float
    training: float


def time_steps(model: Model, store: Store, augment: Augment) -> ImageSeconds:
    """Time the forward and the backward pass of the network, with the augmentation."""
    plan = model.plan
    count = min(plan.batch, len(store)) if model.device.type == "cuda" else min(plan.batch, len(store), SAMPLE)
    rows = torch.linspace(0, len(store) - 1, count).long()
    with _unchanged(model):
        if plan.frozen_views:
            return ImageSeconds(_time(model, store, augment, rows, frozen=True) / count, 0.0)
        frozen = _time(model, store, augment, rows, frozen=True) if plan.warmup else 0.0
        return ImageSeconds(frozen / count, _time(model, store, augment, rows, frozen=False) / count)


def remaining_seconds(each: ImageSeconds, plan: Plan, *, epochs: int, done: int, per_epoch: int) -> float:
    """Return the time of the steps from step `done` on."""
    total, warm = epochs * per_epoch, (epochs if plan.frozen_views else min(plan.warmup, epochs)) * per_epoch
    frozen = max(warm - done, 0)
    return plan.batch * (frozen * each.warming_up + (total - max(done, warm)) * each.training)


def estimate_words(seconds: float, *, epochs: int, steps: int) -> str:
    """Return the estimate as a sentence."""
    many = counted(epochs, "epoch", "epochs")
    return (
        f"Training to {many} takes about {duration(seconds)}: {counted(steps, 'step', 'steps')}, timed on a few images."
    )


@contextmanager
def _unchanged(model: Model) -> Iterator[None]:
    """Restore modes, gradients' flags and random generators at the end."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.embedder.parameters()]
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with evaluating(model.embedder), torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _time(model: Model, store: Store, augment: Augment, rows: torch.Tensor, *, frozen: bool) -> float:
    """Return the seconds of the fastest of a few steps on these rows, without the first."""
    trunk = {id(parameter) for parameter in model.embedder.trunk.parameters()}
    for parameter in model.embedder.parameters():
        parameter.requires_grad_(not (frozen and id(parameter) in trunk))
    trained = [parameter for parameter in model.embedder.parameters() if parameter.requires_grad]
    rng = torch.Generator(model.device).manual_seed(0)
    seconds: list[float] = []
    while trained and (len(seconds) < 2 or (len(seconds) <= REPEATS and sum(seconds) < SECONDS)):
        began = time.monotonic()
        for _, pixels in itertools.islice(store.read_batches(iter([rows]), read_ahead=0), 1):
            images = channels_last(augment(pixels, rng))
            with autocast(model.device, model.plan.precision):
                x = model.embedder(images)
            torch.autograd.grad(x.sum(), trained, allow_unused=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.monotonic() - began)
    return min(seconds[1:], default=0.0)
