"""How fast training is on this machine: from the start of the process to the score, per batch size, and per method.

    python benchmarks/train_speed.py --data cub:PATH                 # a new process: cold, warm, small batches, methods
    python benchmarks/train_speed.py --data cub:PATH --parts methods

`whole` trains three seeds with the defaults: the first counts from the start of the process and reads the images, the
others find them in memory. `batches` trains three epochs per size with and without CUDA graphs; the last is timed.
`methods` times steps of every method beside Proxy-Anchor's, all with the same network and images, and counts what a
step does: how often images pass the network, and the operations of PyTorch. Results are written as
they come; one that fails is recorded with its error, and the others are measured.
"""

import argparse
import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from timing import source
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import nearkin as nk
from nearkin.console import Reporter, plain_table
from nearkin.data.pixels.open import keep_images_open
from nearkin.files import Json, read_json, write_json
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import Trunk
from nearkin.training.defaults import fit_plan
from nearkin.training.images import plan_dataset, with_storage
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.optimiser import make_optimiser, parameter_groups
from nearkin.training.plan import make_plan, resolve_device
from nearkin.training.run_folder import RunFolder
from nearkin.training.step_graph import StepGraph, own_stream

PARTS = ("whole", "batches", "methods")
BATCHES = (32, 60, 180)
REFERENCE = "proxy_anchor"


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def process_start() -> float:
    """Return when this process was started, on Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine was started
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def attempt(work: Callable[[], Json]) -> Json:
    """Return what a function measures, or its error: the other measurements are worth having."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def train(settings: Mapping[str, Any], began: float | None = None) -> Json:
    """Train once; return seconds and speed."""
    began = time.time() if began is None else began
    with TemporaryDirectory() as folder:
        run = nk.train(**settings, out=Path(folder) / "run", reporter=Reporter(Console()))
        result = run.read_result()
    seconds = round(time.time() - began, 1)
    print(f"{seconds} s; {result['images_per_second']} images/s; {dict(result['scores'])}", flush=True)
    speed = {"seconds": seconds, "training": result["seconds"], "images_per_second": result["images_per_second"]}
    return {**speed, "scores": result["scores"]}


def time_steps(training: Training, name: str, count: int) -> Json:
    """Time steps of one method with the network and images of a training, after as many others."""
    plan, embedder, classes = training.plan, training.model.embedder, training.train.images.classes
    objective = method(name, classes=classes, dim=embedder.dim, space=None)
    objective.bind(embedder)
    objective.to(training.device)
    optimiser = make_optimiser(plan, parameter_groups(plan, embedder, objective))
    own = dataclasses.replace(training, method=objective, optimiser=optimiser)
    objective.train()
    objective.at_check(embedder, own._embed, own.labels)
    own._begin_epoch()
    batches, times = own.batches(), list[float]()
    passes: list[bool] = []
    counting = register_module_forward_hook(lambda module, *_: passes.append(isinstance(module, Trunk)))
    with Operations() as operations:
        own._one_step(*next(batches))
    counting.remove()
    for _ in range(2 * count):
        own.step += 1
        began = time.perf_counter()
        own.run_step(*next(batches))
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    row = {"ms": round(1000 * median(times[count:]), 3), "slowest_ms": round(1000 * max(times[count:]), 3)}
    row["graph"] = isinstance(own.run_step, StepGraph) and own.run_step.recorded is not None
    del own.run_step  # it refers to the training: without it the memory of its graph is free at once
    return {**row, "passes": sum(passes), "operations": operations.count}


def time_methods(settings: Mapping[str, Any], names: list[str], count: int, keep: Callable[[Json], None]) -> None:
    """Time the steps of every method; those that end a sub-problem or a projection are the slowest of a row."""
    settings = {**settings, "warmup": 0, "epochs": 4}
    data, reporter = plan_dataset(make_plan(settings, {})), Reporter()
    plan = with_storage(fit_plan(settings, data).plan, data, reporter=reporter)
    rows: dict[str, Json] = {}
    with TemporaryDirectory() as folder:
        training, _ = build_training(RunFolder(folder), plan, data, reporter=reporter)
        with own_stream(training.device):
            for name in (REFERENCE, *names, REFERENCE):
                row = attempt(lambda name=name: time_steps(training, name, count))  # type: ignore[misc]
                if "ms" in row and "ms" in (first := rows.get(REFERENCE, row)):
                    row["ratio"] = round(row["ms"] / first["ms"], 3)
                rows[f"{name}, again" if name in rows else name] = row
                keep(rows)
    table = [
        [name, *(str(row.get(key, "–")) for key in ("ms", "ratio", "passes", "operations"))]
        for name, row in rows.items()
    ]
    print(plain_table(["method", "ms", "ratio", "passes", "operations"], table), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for nearkin train")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--epochs", type=int, default=60, help="of a whole training")
    parser.add_argument("--size", type=int, default=0, help="of the network's input, instead of the backbone's")
    parser.add_argument("--methods", default="", help="which to time, instead of all")
    parser.add_argument("--steps", type=int, default=20, help="of each method that are timed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: results/train_speed_DEVICE.json beside this script")
    given = parser.parse_args()
    start = process_start()
    imported = round(time.time() - start, 1)
    settings: dict[str, Any] = {"data": given.data, "backbone": given.backbone, "device": given.device}
    settings |= {"size": given.size} if given.size else {}
    device = resolve_device(given.device).type
    out = given.out or Path(__file__).parent / "results" / f"train_speed_{device}.json"
    about = {**settings, "data": given.data.partition(":")[0], "epochs": given.epochs}
    done: Json = {"settings": about, **source()}
    if out.exists() and all(
        (known := read_json(out))[name] == done[name] for name in ("settings", "commit", "hardware")
    ):
        done = known | done  # the parts of one file are of the same code

    def keep(**found: Any) -> None:
        done.update(found)
        write_json(out, done)

    parts = given.parts.split(",")
    with keep_images_open():
        if "whole" in parts:
            whole = {**settings, "epochs": given.epochs}
            keep(cold={"imports": imported, **attempt(lambda: train(whole, start))})
            keep(warm=attempt(lambda: train({**whole, "seed": 1})))
            keep(third=attempt(lambda: train({**whole, "seed": 2})))
        if "batches" in parts:
            small: Json = {}
            for batch in BATCHES:
                for graph in (True, False):
                    plan = {**settings, "epochs": 3, "batch": batch, "graph": graph, "metrics": ("R@1",)}
                    small[f"{batch}, {'graph' if graph else 'eager'}"] = attempt(lambda plan=plan: train(plan))  # type: ignore[misc]
                    keep(batches=small)
        if "methods" in parts:
            names = given.methods.split(",") if given.methods else [*nk.LOSSES, *nk.STRATEGIES]
            names = [name for name in names if name != REFERENCE]
            failed = attempt(lambda: time_methods(settings, names, given.steps, lambda rows: keep(methods=rows)) or {})
            keep(**({"methods": failed} if failed else {}))


if __name__ == "__main__":
    main()
