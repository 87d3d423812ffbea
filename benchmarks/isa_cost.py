"""The cost of Proxy-ISA relative to Proxy-Anchor at Stanford-Online-Products scale, measured alternately in one run.

    python benchmarks/isa_cost.py                  the methods alone: 11,318 classes, 512-d, batch 180, queue 1,024
    python benchmarks/isa_cost.py --device cuda    whole training steps: lite0, 224 px, compiled as `nearkin train` does
    python benchmarks/isa_cost.py --small          small sizes, to check that it runs: ratios are meaningless

A step of a method alone is loss, backward and after_step; a training step is zero_grad, network, loss, backward,
clipping, optimiser and after_step; images are loaded beforehand. Queue and filter are on, the queue is full. Times are
the minimum over alternating rounds, so that other load affects both.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import Work, least, source, training_step, wait
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from nearkin.files import write_json
from nearkin.methods.base import Method, Step
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import backbone_settings
from nearkin.training.model import build_embedder
from nearkin.training.plan import make_plan

METHODS = ("proxy_anchor", "proxy_isa(steps_per_epoch=1)")
GOAL = {"cpu": 1.5, "cuda": 1.05}


class Size(NamedTuple):
    classes: int
    dim: int
    batch: int
    pixels: int


FULL = Size(11_318, 512, 180, 224)
SMALL = Size(300, 64, 24, 64)


class Operations(TorchDispatchMode):
    """Counts dispatched operations; one operation is about one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def warmed(spec: str, size: Size, device: torch.device) -> Method:
    """A method after some epochs, with a full queue."""
    torch.manual_seed(0)
    m = method(spec, classes=size.classes, dim=size.dim).to(device)
    for _ in range(2 + 1024 // size.batch):
        x = torch.randn(size.batch, size.dim, device=device)
        m.after_step(Step(x, torch.randint(size.classes, (size.batch,), device=device)))
    return m


def method_alone(spec: str, size: Size, device: torch.device) -> Work:
    m = warmed(spec, size, device)
    x = torch.randn(size.batch, size.dim, device=device, requires_grad=True)
    y = torch.randint(size.classes, (size.batch,), device=device)

    def step() -> None:
        for p in (x, *m.parameters()):
            p.grad = None
        now = Step(x, y)
        m.loss(now).backward()
        m.after_step(now)

    return step


def whole_step(spec: str, size: Size, device: torch.device) -> Work:
    settings = {"backbone": "lite0", "weights": "none", "dim": size.dim, "size": size.pixels, "device": str(device)}
    plan = make_plan({**settings, "batch": size.batch, "compile": device.type == "cuda"}, backbone_settings("lite0"))
    m = warmed(spec, size, device)
    embedder = build_embedder(plan, m.space).to(device, memory_format=torch.channels_last)
    return training_step(m, embedder, plan, torch.randint(size.classes, (size.batch,), device=device))


def launches(step: Work, device: torch.device) -> int:
    """Number of kernels and graphs that a step launches on a GPU, or of operations that it dispatches on a CPU."""
    if device.type != "cuda":
        with Operations() as seen:
            step()
        return seen.count
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        wait(device)
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.count for event in recorded.key_averages() if event.key.startswith(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    size, device = SMALL if args.small else FULL, torch.device(args.device)
    gpu = device.type == "cuda"
    kinds = {"methods alone": method_alone} | ({"training steps": whole_step} if gpu or args.small else {})
    rows: dict[str, dict[str, Any]] = {}
    print(f"C = {size.classes:,}, D = {size.dim}, B = {size.batch}, {device}, {torch.get_num_threads()} threads")
    for kind, make in kinds.items():
        steps = [make(spec, size, device) for spec in METHODS]
        plain, isa = least(steps, rounds=args.rounds, times=20 if gpu else 1, device=device)
        counts = [launches(step, device) for step in steps]
        rows[kind] = {"proxy_anchor_ms": plain, "proxy_isa_ms": isa, "ratio": isa / plain, "launches": counts}
        print(f"{kind}: {plain:.2f} ms and {isa:.2f} ms, {isa / plain:.3f} ×; launches {counts[0]} and {counts[1]}")
    judged, goal = "training steps" if gpu else "methods alone", GOAL[device.type]
    if not args.small:
        print(f"goal for {judged}: at most {goal} ×, {'reached' if rows[judged]['ratio'] <= goal else 'NOT reached'}")
    if args.out:
        about = {"size": size._asdict(), "threads": torch.get_num_threads(), "device": str(device)}
        write_json(args.out, {**about, "goal": goal, "of": judged, "rows": rows, **source()})


if __name__ == "__main__":
    main()
