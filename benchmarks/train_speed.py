"""How fast training is on this machine: from the start of the process to the score, per batch size, and per method.

    python benchmarks/train_speed.py --data cub:PATH                 # a new process: cold, warm, small batches, methods
    python benchmarks/train_speed.py --data cub:PATH --parts whole

`whole` trains twice with the defaults: the first counts from the start of the process and reads the images, the second
finds them in memory. `batches` trains one epoch per size with and without CUDA graphs. `methods` times steps of every
method beside Proxy-Anchor's, all with the same network and images. Results are written as they come.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from rich.console import Console
from timing import source

import nearkin as nk
from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.files import Json, read_json, write_json
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import backbone_settings
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.optimiser import make_optimiser, parameter_groups
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.step_graph import own_stream

PARTS = ("whole", "batches", "methods")
BATCHES = (32, 60, 180)
STEPS = 20
"""Steps of a method that are timed, after as many others."""


def train(settings: Json, began: float | None = None) -> Json:
    """Train once; return seconds and speed."""
    began = time.time() if began is None else began
    with TemporaryDirectory() as folder:
        run = nk.train(**settings, out=Path(folder) / "run", reporter=Reporter(Console()))
        result = run.read_result()
    seconds = round(time.time() - began, 1)
    print(f"{seconds} s; {result['images_per_second']} images/s; {dict(result['scores'])}", flush=True)
    speed = {"seconds": seconds, "training": result["seconds"], "images_per_second": result["images_per_second"]}
    return {**speed, "scores": result["scores"]}


def time_steps(training: Training, name: str) -> Json:
    """Time the steps of one method with the network and images of a training."""
    plan, embedder, classes = training.plan, training.model.embedder, training.train.images.classes
    objective = method(name, classes=classes, dim=plan.dim, space=None)
    objective.bind(embedder)
    objective.to(training.device)
    optimiser = make_optimiser(plan, parameter_groups(plan, embedder, objective))
    own = dataclasses.replace(training, method=objective, optimiser=optimiser)
    objective.train()
    objective.at_check(embedder, own._embed, own.labels)
    own._begin_epoch()
    batches, times = own.batches(), list[float]()
    for _ in range(2 * STEPS):
        began = time.perf_counter()
        own.run_step(*next(batches))
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        own.step += 1
    return {"ms": round(1000 * median(times[STEPS:]), 3), "slowest_ms": round(1000 * max(times[STEPS:]), 3)}


def time_methods(settings: Json) -> dict[str, Json]:
    """Time the steps of every method; those that end a sub-problem or a projection are the slowest of a row."""
    plan = make_plan({**settings, "warmup": 0, "epochs": 4}, backbone_settings(settings["backbone"]))
    rows: dict[str, Json] = {}
    with TemporaryDirectory() as folder:
        training, _ = build_training(RunFolder(folder), plan, reporter=Reporter())
        with own_stream(training.device):
            for name in ("proxy_anchor", *nk.LOSSES, *nk.STRATEGIES, "proxy_anchor"):
                try:
                    row = time_steps(training, name)
                except Exception as error:  # the others are worth timing
                    row = {"error": f"{type(error).__name__}: {error}"}
                else:
                    row["ratio"] = round(row["ms"] / rows.get("proxy_anchor", row)["ms"], 3)
                print(name, row, flush=True)
                rows["proxy_anchor, again" if name == "proxy_anchor" and len(rows) > 1 else name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for nearkin train")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--epochs", type=int, default=60, help="of a whole training")
    parser.add_argument("--size", type=int, default=0, help="of the network's input, instead of the backbone's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: results/train_speed_DEVICE.json beside this script")
    given = parser.parse_args()
    settings: dict[str, Any] = {"data": given.data, "backbone": given.backbone, "device": given.device}
    settings |= {"size": given.size} if given.size else {}
    device = make_plan(settings, {}).device.partition(":")[0]
    out = given.out or Path(__file__).parent / "results" / f"train_speed_{device}.json"
    done: Json = {"settings": {**settings, "data": given.data.partition(":")[0], "epochs": given.epochs}}
    if out.exists():
        done = read_json(out) | done

    def keep(**found: Any) -> None:
        done.update(found)
        write_json(out, {**done, **source()})

    parts = given.parts.split(",")
    with keep_images_open():
        if "whole" in parts:
            keep(cold=train({**settings, "epochs": given.epochs}, psutil.Process().create_time()))
            keep(warm=train({**settings, "epochs": given.epochs, "seed": 1}))
        if "batches" in parts:
            small: Json = {}
            for batch in BATCHES:
                for graph in (True, False):
                    plan = {**settings, "epochs": 3, "batch": batch, "graph": graph, "metrics": ("R@1",)}
                    small[f"{batch}, {'graph' if graph else 'eager'}"] = train(plan)["images_per_second"]
                    keep(batches=small)
        if "methods" in parts:
            keep(methods=time_methods(settings))


if __name__ == "__main__":
    main()
