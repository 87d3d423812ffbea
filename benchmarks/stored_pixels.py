"""Images per second from pixels kept at 2 × the network's size, relative to pixels kept at 8/7 (256 for 224).

Photographs of made noise, sized like CUB-200-2011 (500 × 333 … 500 × 500), are stored both ways. Three figures, each in
alternating rounds of one run, as times new / old (on a CPU, processor time over all cores); below 1.05 costs at most
5 % of the images per second:

1. reading a batch and cutting random crops (`resized_crop`);
2. reading a batch and cutting test views;
3. a whole step of `nearkin train` with Proxy-Anchor: reading, cropping, network, loss and optimiser; on a GPU from a
   graph, as usual.

    python benchmarks/stored_pixels.py                                   # this machine: a GPU if it has one
    python benchmarks/stored_pixels.py --device cpu --batch 16 --images 64 --rounds 3
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from timing import Work, least, source
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels.views import short_side_for
from nearkin.files import write_json
from nearkin.networks.backbones import backbone_row, backbone_settings
from nearkin.training.images import STORED, plan_dataset
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.step_graph import WARM_UP, own_stream

SHAPES = ((333, 500), (375, 500), (400, 500), (500, 500), (500, 375), (500, 333))
CLASSES = 10

IN_A_ROW = 10
"""Calls between waits for a GPU, so that it is the GPU that is timed."""


def make_photos(folder: Path, count: int) -> None:
    """Write photographs of coarse noise, one folder per class."""
    rng = np.random.default_rng(0)
    for number in range(count):
        height, width = SHAPES[number % len(SHAPES)]
        coarse = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
        path = folder / str(number % CLASSES) / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse.resize((width, height)).save(path, quality=90)


def build(settings: dict[str, object], folder: Path) -> Training:
    """A training of these settings, ready for steps of the whole network."""
    plan = make_plan(settings, backbone_settings(str(settings["backbone"])))
    training, _ = build_training(RunFolder(folder), plan, plan_dataset(plan), reporter=Reporter())
    training._begin_epoch()
    return training


def works_of(training: Training, rows: Tensor) -> dict[str, Work]:
    """What is timed."""
    batches, store = training.batches(), training.train.store
    return {
        "training crops": lambda: training.augment(store[rows], training.crops),
        "test views": lambda: training.model.view(store[rows]),
        "training step": lambda: training.run_step(*next(batches)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--batch", type=int, default=180)
    parser.add_argument("--images", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=0, help="of the network's input, instead of the backbone's")
    parser.add_argument("--out", type=Path, help="default: results/stored_pixels_DEVICE.json beside this script")
    given = parser.parse_args()

    size = given.size or backbone_row(given.backbone).size
    usual = {name: getattr(given, name) for name in ("backbone", "batch", "device")}
    usual |= {"size": size, "weights": "none", "warmup": 0, "test": "none"}
    rows = torch.randperm(given.images, generator=torch.Generator().manual_seed(0))[: given.batch]
    figures = {}
    with TemporaryDirectory() as folder:
        os.environ["NEARKIN_CACHE"] = f"{folder}/cache"
        photos = Path(folder) / "photos"
        photos.mkdir()
        make_photos(photos, given.images)
        usual["data"] = f"folder:{photos}"
        old, new = (
            build(usual | {"stored": stored}, Path(folder) / str(stored))
            for stored in (short_side_for(size) / size, STORED)
        )
        times = IN_A_ROW if old.device.type == "cuda" else 1
        with own_stream(old.device):
            both = [works_of(training, rows) for training in (old, new)]
            for work in both:  # so that steps come from a graph
                for _ in range(WARM_UP + 1 if old.plan.uses_graphs else 0):
                    work["training step"]()
            for name in both[0]:
                before, after = least(
                    [work[name] for work in both],
                    rounds=given.rounds,
                    device=old.device,
                    times=times,
                    processors=True,
                )
                speeds = [round(1e3 * given.batch / took, 1) for took in (before, after)]
                ratio = round(after / before, 3)
                figures[name] = {"new / old": ratio, "images/s old": speeds[0], "images/s new": speeds[1]}
                print(f"{name}: time new / old {ratio:.3f} ({speeds[0]:,} and {speeds[1]:,} images/s)", flush=True)
    out = given.out or Path(__file__).parent / "results" / f"stored_pixels_{old.device.type}.json"
    kept = [list(training.model.storage) for training in (old, new)]
    write_json(out, {"figures": figures, "kept": kept, "batch": given.batch, **source()})


if __name__ == "__main__":
    main()
