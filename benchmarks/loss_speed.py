"""Speed and memory of losses at Stanford-Online-Products scale, beside pytorch-metric-learning (PML), in one run.

    python benchmarks/loss_speed.py            11,318 classes, 512-d, batch 180; needs about 2 GB
    python benchmarks/loss_speed.py --small    the same table for small sizes, in seconds: ratios are meaningless

Times are of forward and backward together, the minimum over rounds that alternate between ours and PML's. Memory is the
peak of forward and backward beyond parameters and gradients, in multiples of the [B, C·K] similarities.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pytorch_metric_learning import losses, miners
from rich.console import Console
from rich.table import Table
from timing import Work, least, source
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nearkin.files import write_json
from nearkin.methods.base import Method
from nearkin.methods.catalogue import method
from nearkin.methods.losses.multi_similarity import MultiSimilarity
from nearkin.methods.relation import References, relate

MULTI_PROXY = ("soft_triple", "mpa", "mpa_dw", "mpa_ap")


class Size(NamedTuple):
    classes: int
    dim: int
    batch: int
    per_class: int
    memory: int  # of multi_similarity, with its own batch size and dimension
    memory_batch: int
    memory_dim: int


FULL = Size(11_318, 512, 180, 10, 60_000, 64, 128)
SMALL = Size(300, 64, 24, 4, 2_000, 16, 32)


class Row(NamedTuple):
    what: str
    ours: str
    pml: str
    ratio: float  # subject of the goal
    goal: str
    reached: bool


def peak(step: Work, device: torch.device) -> int:
    """The peak memory of a step in bytes, beyond that before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    # The public event list omits allocations inside a parent operator; the record has all of them.
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def step_of(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, *more: nn.Parameter) -> Work:
    """Forward and backward, starting without gradients."""

    def step() -> None:
        for p in (x, *more):
            p.grad = None
        loss(x, y).backward()

    return step


def some(rows: int, dim: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, dim, device=device, requires_grad=True)
    return x, torch.randint(classes, (rows,), device=device)


def speed_of_proxy_anchor(size: Size, *, rounds: int, device: torch.device) -> Row:
    x, y = some(size.batch, size.dim, size.classes, device)
    m: Method = method("proxy_anchor", classes=size.classes, dim=size.dim).to(device)
    pml = losses.ProxyAnchorLoss(size.classes, size.dim).to(device)
    ours, theirs = least(
        [step_of(m, x, y, *m.parameters()), step_of(pml, x, y, *pml.parameters())], rounds=rounds, device=device
    )
    ratio = ours / theirs
    return Row("proxy_anchor, time", f"{ours:.1f} ms", f"{theirs:.1f} ms", ratio, "at most 1 × PML's", ratio <= 1)


def memory_multiple(loss: nn.Module, size: Size, *, device: torch.device) -> float:
    """The peak of a step beyond parameters and gradients, over the bytes of the float32 similarities [B, C·K]."""
    x, y = some(size.batch, size.dim, size.classes, device)
    parameters = list(loss.parameters())
    step = step_of(loss, x, y, *parameters)
    step()  # a first step allocates the device's workspaces
    x.grad = None
    for p in parameters:
        p.grad = None
    gradients = sum(4 * p.numel() for p in (x, *parameters))
    return (peak(step, device) - gradients) / (4 * size.batch * size.classes * size.per_class)


def memory_of_many_proxies(size: Size, *, device: torch.device) -> list[Row]:
    pml = losses.SoftTripleLoss(size.classes, size.dim, centers_per_class=size.per_class).to(device)
    theirs = memory_multiple(pml, size, device=device)
    del pml
    # PML's regulariser: similarities between all proxies in float32, and two byte masks.
    would = 6 * (size.classes * size.per_class) ** 2 / 1e9
    rows = []
    for name in MULTI_PROXY:
        m = method(f"{name}(per_class={size.per_class})", classes=size.classes, dim=size.dim).to(device)
        ours = memory_multiple(m, size, device=device)
        what = f"{name}, K = {size.per_class}, memory"
        beside = f"{theirs:.1f} × without R; with R {would:.0f} GB, not run" if name == "soft_triple" else "has none"
        rows.append(Row(what, f"{ours:.1f} ×", beside, ours, "at most 6 ×", ours <= 6))
    return rows


def speed_of_multi_similarity(size: Size, *, rounds: int, device: torch.device) -> Row:
    x, y = some(size.memory_batch, size.memory_dim, size.classes, device)
    v, labels = some(size.memory, size.memory_dim, size.classes, device)
    v = v.detach()
    m, pml, miner = MultiSimilarity(), losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return m.objective(relate(x, y, References(v, labels), m.space))

    def theirs(x: Tensor, y: Tensor) -> Tensor:
        return pml(x, y, miner(x, y, v, labels), v, labels)

    a, b = least([step_of(ours, x, y), step_of(theirs, x, y)], rounds=rounds, device=device)
    what = f"multi_similarity, mined, memory of {size.memory:,}, time"
    return Row(what, f"{a:.1f} ms", f"{b:.1f} ms", b / a, "at least 5 × faster", b / a >= 5)


def measure(size: Size, *, rounds: int, device: torch.device) -> list[Row]:
    return [
        speed_of_proxy_anchor(size, rounds=rounds, device=device),
        *memory_of_many_proxies(size, device=device),
        speed_of_multi_similarity(size, rounds=rounds, device=device),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default 10)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    size, device = SMALL if args.small else FULL, torch.device(args.device)
    torch.manual_seed(0)
    title = f"C = {size.classes:,}, D = {size.dim}, B = {size.batch}, {device}, {torch.get_num_threads()} threads"
    table = Table("what", "nearkin", "PML", "ratio", "goal", "reached", title=title)
    rows = measure(size, rounds=args.rounds, device=device)
    for row in rows:
        reached = "" if args.small else "yes" if row.reached else "no"
        table.add_row(row.what, row.ours, row.pml, f"{row.ratio:.2f}", row.goal, reached)
    Console(width=160).print(table)
    if args.out:
        threads = torch.get_num_threads()
        write_json(
            args.out, {"size": size._asdict(), "threads": threads, "rows": [r._asdict() for r in rows], **source()}
        )


if __name__ == "__main__":
    main()
