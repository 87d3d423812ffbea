"""Speed and memory of losses beside pytorch-metric-learning (PML), in one run on one thread.

    python benchmarks/loss_speed.py                    every loss that both have; needs about 2 GB
    python benchmarks/loss_speed.py --only arcface     rows whose name has this in it
    python benchmarks/loss_speed.py --small            small sizes, in seconds: ratios are meaningless

1. Losses that both libraries have, with the same options, on a batch of 180 with 4 images per class; those with proxies
   also at Stanford-Online-Products scale, a batch of 512 and 11,318 classes. 512 dimensions.
2. Losses with many proxies per class: memory in multiples of the [B, C·K] similarities.
3. Multi-similarity with mining against a memory of 60,000.

Times are of forward and backward together (XBM: and of the update of its memory), processor time, the median over
rounds that alternate between ours and PML's. Memory is the peak of forward and backward, gradients included.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from pytorch_metric_learning import distances, losses, miners
from rich.console import Console
from rich.table import Table
from timing import Work, alternating, source
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nearkin.files import write_json
from nearkin.methods.base import Step
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


class Shared(NamedTuple):
    """A batch for the losses that both libraries have."""

    batch: int
    classes: int
    dim: int
    images_per_class: int = 4


FULL_BATCHES = Shared(180, 100, 512), Shared(512, 11_318, 512)
SMALL_BATCHES = Shared(24, 12, 32), Shared(32, 200, 32)


class Row(NamedTuple):
    what: str
    ours: str
    pml: str
    ratio: float  # subject of the goal
    goal: str
    reached: bool


def squared() -> distances.BaseDistance:
    return distances.LpDistance(power=2)


# Ours, PML's and PML's miner if ours mines.
PAIRS: dict[str, Callable[[], tuple[nn.Module, nn.Module | None]]] = {
    "angular": lambda: (losses.AngularLoss(alpha=45), None),
    "circle": lambda: (losses.CircleLoss(m=0.25, gamma=256), None),
    "contrastive": lambda: (losses.ContrastiveLoss(), None),
    "fast_ap": lambda: (losses.FastAPLoss(num_bins=10), None),
    "lifted": lambda: (losses.LiftedStructureLoss(distance=distances.LpDistance(normalize_embeddings=False)), None),
    "margin(sampling=distance)": lambda: (losses.MarginLoss(), miners.DistanceWeightedMiner()),
    "multi_similarity": lambda: (losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()),
    "multi_similarity(mining=False)": lambda: (losses.MultiSimilarityLoss(), None),
    "nca(scale=9)": lambda: (losses.NCALoss(softmax_scale=9), None),
    "nt_xent": lambda: (losses.NTXentLoss(temperature=0.1), None),
    "ranked_list": lambda: (losses.RankedListLoss(margin=0.4, Tn=5, alpha=1.2), None),
    "supcon": lambda: (losses.SupConLoss(), None),
    "triplet": lambda: (losses.TripletMarginLoss(margin=0.2, distance=squared()), None),
    "triplet(swap=True, smooth=True)": lambda: (
        losses.TripletMarginLoss(margin=0.2, swap=True, smooth_loss=True, distance=squared()),
        None,
    ),
    "triplet(mining=semi_hard)": lambda: (
        losses.TripletMarginLoss(margin=0.2, distance=squared()),
        miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard", distance=squared()),
    ),
}

# Ours, and PML's for C classes and D dimensions.
PROXIES: dict[str, Callable[[int, int], nn.Module]] = {
    "arcface": lambda c, d: losses.ArcFaceLoss(c, d, margin=math.degrees(0.5), scale=64),
    "arcface(per_class=3)": lambda c, d: losses.SubCenterArcFaceLoss(
        num_classes=c, embedding_size=d, margin=math.degrees(0.5), scale=64, sub_centers=3
    ),
    "cosface": lambda c, d: losses.CosFaceLoss(c, d, margin=0.35, scale=64),
    "norm_softmax": lambda c, d: losses.NormalizedSoftmaxLoss(c, d, temperature=0.05),
    "proxy_anchor": lambda c, d: losses.ProxyAnchorLoss(c, d, margin=0.1, alpha=32),
    "proxy_nca_pp": lambda c, d: losses.ProxyNCALoss(c, d, softmax_scale=9),
    "soft_triple(per_class=2, tau=0.0)": lambda c, d: losses.SoftTripleLoss(c, d, centers_per_class=2),
}

XBM_MEMORY = 1024


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
    """Forward and backward, starting and ending without gradients."""

    def step() -> None:
        loss(x, y).backward()
        for p in (x, *more):
            p.grad = None

    return step


def some(rows: int, dim: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, dim, device=device, requires_grad=True)
    return x, torch.randint(classes, (rows,), device=device)


def balanced(size: Shared, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch with some images of each of its classes, near each other."""
    groups = size.batch // size.images_per_class
    y = torch.randperm(size.classes, device=device)[:groups].repeat_interleave(size.images_per_class)
    centres = torch.randn(groups, size.dim, device=device).repeat_interleave(size.images_per_class, 0)
    return (centres + torch.randn(len(y), size.dim, device=device)).requires_grad_(), y


def beside(what: str, ours: Work, theirs: Work, *, rounds: int, device: torch.device) -> list[Row]:
    """Time and memory of two steps."""
    times = 1 if max(alternating([ours], rounds=1, device=device)[0]) > 50 else 5
    a, b = alternating([ours, theirs], rounds=rounds, device=device, times=times, processors=True)
    time = median(p / q for p, q in zip(a, b, strict=True))
    memory = peak(ours, device), peak(theirs, device)
    megabytes = [f"{m / 1e6:.1f} MB" for m in memory]
    goal = "at most 1 × PML's"
    return [
        Row(f"{what}, time", f"{median(a):.2f} ms", f"{median(b):.2f} ms", time, goal, time <= 1),
        Row(f"{what}, memory", *megabytes, memory[0] / memory[1], goal, memory[0] <= memory[1]),
    ]


def first_and_second(size: Shared, *, only: str, rounds: int, device: torch.device) -> list[Row]:
    """N-pair of the first images of each class with the second ones, as PML pairs them."""
    if only not in "n_pair":
        return []
    x, y = balanced(size._replace(images_per_class=2), device)
    m = method("n_pair(norm=0.0)", classes=size.classes, dim=size.dim)
    pml = losses.NPairsLoss(distance=distances.DotProductSimilarity(normalize_embeddings=False))

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return m.objective(relate(x[::2], y[::2], References(x[1::2], y[1::2]), m.space))

    return beside(f"n_pair, B = {size.batch}", step_of(ours, x, y), step_of(pml, x, y), rounds=rounds, device=device)


def pair_losses(size: Shared, *, only: str, rounds: int, device: torch.device) -> list[Row]:
    rows = []
    for spec, make in PAIRS.items():
        if only in spec:
            x, y = balanced(size, device)
            m, (pml, miner) = method(spec, classes=size.classes, dim=size.dim).to(device), make()
            theirs = step_of(lambda x, y, p=pml, n=miner: p(x, y, n(x, y) if n else None), x, y)
            rows += beside(f"{spec}, B = {size.batch}", step_of(m, x, y), theirs, rounds=rounds, device=device)
    return rows


def proxy_losses(size: Shared, *, only: str, rounds: int, device: torch.device) -> list[Row]:
    rows = []
    for spec, make in PROXIES.items():
        if only in spec:
            x, y = balanced(size, device)
            m = method(spec, classes=size.classes, dim=size.dim).to(device)
            pml = make(size.classes, size.dim).to(device)
            steps = [step_of(loss, x, y, *loss.parameters()) for loss in (m, pml)]
            rows += beside(f"{spec}, B = {size.batch}, C = {size.classes:,}", *steps, rounds=rounds, device=device)
    return rows


def cross_batch_memory(size: Shared, *, only: str, rounds: int, device: torch.device) -> list[Row]:
    """XBM on a full memory. PML's has no term within the batch, but has the batch in the memory."""
    if only not in "xbm":
        return []
    x, y = balanced(size, device)
    m = method(f"xbm(contrastive, size={XBM_MEMORY}, start=0)", classes=size.classes, dim=size.dim).to(device)
    pml = losses.CrossBatchMemory(losses.ContrastiveLoss(), size.dim, memory_size=XBM_MEMORY).to(device)

    def ours() -> None:
        step = Step(x, y)
        m.loss(step).backward()
        x.grad = None
        m.after_step(step)

    theirs = step_of(pml, x, y)
    for _ in range(XBM_MEMORY // size.batch + 1):
        ours()
        theirs()
    return beside(f"xbm, memory of {XBM_MEMORY:,}, B = {size.batch}", ours, theirs, rounds=rounds, device=device)


def memory_multiple(loss: nn.Module, size: Size, *, device: torch.device) -> float:
    """The peak of a step beyond parameters and gradients, over the bytes of the float32 similarities [B, C·K]."""
    x, y = some(size.batch, size.dim, size.classes, device)
    parameters = list(loss.parameters())
    step = step_of(loss, x, y, *parameters)
    step()  # a first step allocates the device's workspaces
    gradients = sum(4 * p.numel() for p in (x, *parameters))
    return (peak(step, device) - gradients) / (4 * size.batch * size.classes * size.per_class)


def memory_of_many_proxies(size: Size, *, only: str, device: torch.device) -> list[Row]:
    rows = []
    for name in MULTI_PROXY:
        if only in name:
            m = method(f"{name}(per_class={size.per_class})", classes=size.classes, dim=size.dim).to(device)
            ours, pml = memory_multiple(m, size, device=device), "has none"
            if name == "soft_triple":
                theirs = losses.SoftTripleLoss(size.classes, size.dim, centers_per_class=size.per_class).to(device)
                # PML's regulariser: similarities between all proxies in float32, and two byte masks.
                would = 6 * (size.classes * size.per_class) ** 2 / 1e9
                multiple = memory_multiple(theirs, size, device=device)
                pml = f"{multiple:.1f} × without R; with R {would:.0f} GB, not run"
            what = f"{name}, K = {size.per_class}, B = {size.batch}, C = {size.classes:,}, memory / [B, C·K]"
            rows.append(Row(what, f"{ours:.1f} ×", pml, ours, "at most 6 ×", ours <= 6))
    return rows


def speed_of_multi_similarity(size: Size, *, only: str, rounds: int, device: torch.device) -> list[Row]:
    if only not in "multi_similarity":
        return []
    x, y = some(size.memory_batch, size.memory_dim, size.classes, device)
    v, labels = some(size.memory, size.memory_dim, size.classes, device)
    v = v.detach()
    m, pml, miner = MultiSimilarity(), losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return m.objective(relate(x, y, References(v, labels), m.space))

    def theirs(x: Tensor, y: Tensor) -> Tensor:
        return pml(x, y, miner(x, y, v, labels), v, labels)

    a, b = alternating([step_of(ours, x, y), step_of(theirs, x, y)], rounds=rounds, device=device, processors=True)
    ratio = median(p / q for p, q in zip(a, b, strict=True))
    what = f"multi_similarity, memory of {size.memory:,}, B = {size.memory_batch}, time"
    return [Row(what, f"{median(a):.1f} ms", f"{median(b):.1f} ms", ratio, "at most 0.2 × PML's", ratio <= 0.2)]


def measure(
    size: Size, batches: tuple[Shared, Shared], *, rounds: int, device: torch.device, only: str = ""
) -> list[Row]:
    few, many = batches
    timed = {"only": only, "rounds": rounds, "device": device}
    return [
        *pair_losses(few, **timed),
        *first_and_second(few, **timed),
        *cross_batch_memory(few, **timed),
        *proxy_losses(few, **timed),
        *proxy_losses(many, **timed),
        *memory_of_many_proxies(size, only=only, device=device),
        *speed_of_multi_similarity(size, **timed),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--only", default="", help="only rows whose loss has this in its name")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    size, batches = (SMALL, SMALL_BATCHES) if args.small else (FULL, FULL_BATCHES)
    rows = measure(size, batches, rounds=args.rounds, device=torch.device(args.device), only=args.only)
    threads = torch.get_num_threads()
    table = Table("what", "nearkin", "PML", "ratio", "goal", "reached", title=f"{args.device}, {threads} threads")
    for row in rows:
        reached = "" if args.small else "yes" if row.reached else "no"
        table.add_row(row.what, row.ours, row.pml, f"{row.ratio:.2f}", row.goal, reached)
    Console(width=170).print(table)
    if args.out:
        sizes = {"size": size._asdict(), "batches": [batch._asdict() for batch in batches]}
        write_json(args.out, {**sizes, "threads": threads, "rows": [r._asdict() for r in rows], **source()})


if __name__ == "__main__":
    main()
