"""The cost of VCPA's proxy steps: ratios measured in one run.

    python benchmarks/vcpa_cost.py                  the M = 10 Newton steps relative to ten times the five products
                                                    [C, B]·[B, D] they need; C = 11,318, B = 180, D = 512
    python benchmarks/vcpa_cost.py --device cuda    training steps of vcpa relative to those of proxy_anchor: lite0,
                                                    batch 180, 224 px, 100 classes, compiled as nearkin train does
    … --small                                       small sizes, to check that it runs: ratios are meaningless

Times are the minimum over alternating rounds. A training step is that of nearkin train: augmentation, network, loss,
backward, optimiser, method. With a compiled network VCPA's Newton step is compiled, too; in the row "eager" it is not.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import Work, least, source

from nearkin.console import Reporter
from nearkin.files import write_json
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.training.launch import build_training
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder

M, PRODUCTS = 10, 5


class Row(NamedTuple):
    what: str
    milliseconds: float
    ratio: float  # to the first row
    goal: float | None


def newton_alone(device: torch.device, *, small: bool, rounds: int) -> list[Row]:
    """The Newton steps of a batch, including storing the result, relative to the products alone."""
    C, B, D = (300, 24, 64) if small else (11_318, 180, 512)
    m = method(f"vcpa(steps={M}, tau=0.001)", classes=C, dim=D).to(device)
    x, y = torch.randn(B, D, device=device), torch.randint(C, (B,), device=device)
    weights, f = torch.rand(C, B, device=device), torch.nn.functional.normalize(x, dim=1)

    def products() -> None:
        for _ in range(M * PRODUCTS):
            weights @ f

    def newton() -> None:
        m.after_step(Step(x, y))  # without a loss before, the steps are taken here

    bare, ours = least([products, newton], rounds=rounds, device=device)
    what = f"C = {C:,}, B = {B}, D = {D}"
    return [
        Row(f"{M} × {PRODUCTS} bare products, {what}", bare, 1.0, None),
        Row(f"{M} Newton steps", ours, ours / bare, 4.0),
    ]


def training_step(spec: str, folder: str, device: torch.device, *, small: bool, fuse: bool) -> Work:
    """A step of nearkin train on 100 classes with arbitrary images."""
    given: dict[str, Any] = {
        "data": f"glyphs(classes={20 if small else 200})",
        "method": spec,
        "backbone": "conv4" if small else "lite0",
        "weights": "none",
        "batch": 30 if small else 180,
        "size": 32 if small else 224,
        "warmup": 0,
        "compile": not small,
        "device": str(device),
    }
    training, _ = build_training(RunFolder(folder), make_plan(given, {}), reporter=Reporter())
    training.method.compiled = fuse and not small
    training._begin_epoch()
    batches = training.batches()

    def step() -> None:
        training._one_step(*next(batches))

    return step


def whole_steps(device: torch.device, *, small: bool, rounds: int) -> list[Row]:
    """Training steps of Proxy-Anchor and of VCPA."""
    asked = (("proxy_anchor", True), (f"vcpa(steps={M})", True), (f"vcpa(steps={M})", False))
    with tempfile.TemporaryDirectory() as folder:
        steps = [training_step(spec, folder, device, small=small, fuse=fuse) for spec, fuse in asked]
        for step in steps:  # compilation, and the recording of CUDA graphs
            for _ in range(1 if small else 20):
                step()
        times = least(steps, rounds=rounds, device=device, times=3 if small else 50)
    names = ("proxy_anchor, training step", f"vcpa(steps={M})", f"vcpa(steps={M}), Newton step eager")
    goals = (None, 1.10, None)
    return [Row(n, t, t / times[0], g) for n, t, g in zip(names, times, goals, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default): Newton steps alone; cuda: training steps")
    parser.add_argument("--steps", action="store_true", help="also training steps on a CPU")
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    measure = whole_steps if args.steps or device.type == "cuda" else newton_alone
    rows = measure(device, small=args.small, rounds=args.rounds)
    threads = torch.get_num_threads()
    table = Table("what", "ms", "ratio", "goal", "reached", title=f"{device}, {threads} threads")
    for row in rows:
        reached = "" if row.goal is None or args.small else "yes" if row.ratio <= row.goal else "no"
        goal = "" if row.goal is None else f"at most {row.goal:g}"
        table.add_row(row.what, f"{row.milliseconds:.2f}", f"{row.ratio:.3f}", goal, reached)
    Console(width=120).print(table)
    if args.out:
        about = {"device": str(device), "threads": threads}
        write_json(args.out, {**about, "small": args.small, "rows": [r._asdict() for r in rows], **source()})


if __name__ == "__main__":
    main()
