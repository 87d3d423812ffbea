"""Shared by the scripts: timing in alternating rounds, a training step without its images, provenance of a result."""

import shlex
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nearkin.files import Json, provenance
from nearkin.methods.base import Method, Step
from nearkin.networks.embedder import Embedder
from nearkin.training.model import autocast
from nearkin.training.optimiser import make_optimiser, set_training
from nearkin.training.plan import Plan

Work = Callable[[], object]


def least(
    works: list[Work], *, rounds: int, device: torch.device, times: int = 1, processors: bool = False
) -> list[float]:
    """Minimal milliseconds of each function over alternating rounds."""
    return [min(took) for took in alternating(works, rounds=rounds, device=device, times=times, processors=processors)]


def alternating(
    works: list[Work], *, rounds: int, device: torch.device, times: int = 1, processors: bool = False
) -> list[list[float]]:
    """Milliseconds of each function in each round, which call all in turn after a warm-up, so that load affects all."""
    took = [
        [milliseconds(work, device, times=times, processors=processors) for work in works] for _ in range(rounds + 1)
    ]
    return [list(each) for each in zip(*took[1:], strict=True)]


def milliseconds(work: Work, device: torch.device, *, times: int = 1, processors: bool = False) -> float:
    """Milliseconds of one function, called `times` in a row. `processors` measures processor time over all cores."""
    clock = time.process_time if processors and device.type == "cpu" else time.perf_counter
    wait(device)
    start = clock()
    for _ in range(times):
        work()
    wait(device)
    return 1e3 * (clock() - start) / times


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_step(m: Method, embedder: Embedder, plan: Plan, y: Tensor) -> Work:
    """A step of `nearkin train` after warm-up, without reading and augmenting the images."""
    device, side, channels = y.device, embedder.trunk.size, embedder.trunk.channels
    network = torch.compile(embedder, mode="reduce-overhead") if plan.compile else embedder
    set_training(embedder, embedder.trunk, plan, warming_up=False)
    optimiser = make_optimiser(plan, [{"params": list(embedder.parameters()), "lr": plan.lr}, *m.groups(plan.lr)])
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    images = torch.randn(len(y), channels, side, side, device=device).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimiser.zero_grad()
        with autocast(device, plan.precision):
            x = network(images)
        now = Step(x, y, embedder, images)
        m.loss(now).backward()
        m.after_backward(embedder)
        if plan.clip_value:
            torch.nn.utils.clip_grad_value_(parameters, plan.clip_value)
        if plan.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
        optimiser.step()
        m.after_step(now)

    return step


def source() -> Json:
    """The provenance of a result: command without the place of the file, versions, commit, hardware, date."""
    words = ["python", *sys.argv]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return {"command": shlex.join(words), **provenance()}
