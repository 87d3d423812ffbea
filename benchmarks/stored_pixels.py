"""Images per second from pixels kept at 2 × the network's size, relative to pixels kept at 8/7 (256 for 224).

Photographs of made noise, sized like CUB-200-2011 (500 × 333 … 500 × 500), are stored both ways. Three figures, each in
alternating rounds of one run, as times new / old (on a CPU, processor time over all cores); below 1.05 costs at most
5 % of the images per second:

1. reading a batch and cutting random crops (`resized_crop`);
2. reading a batch and cutting test views;
3. a whole training step of Proxy-Anchor with that batch: reading, cropping, network, loss and optimiser.

    python benchmarks/stored_pixels.py                                   # this machine: a GPU if it has one
    python benchmarks/stored_pixels.py --device cpu --batch 16 --images 64 --rounds 3
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from timing import least, source
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.pixels.decode import Storage
from nearkin.data.pixels.open import open_store
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.views import augment
from nearkin.files import write_json
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.training.model import Model, autocast, build_embedder, storage_of
from nearkin.training.optimiser import make_optimiser, parameter_groups, set_training
from nearkin.training.plan import Plan, make_plan

SHAPES = ((333, 500), (375, 500), (400, 500), (500, 500), (500, 375), (500, 333))


def make_photos(folder: Path, count: int) -> Images:
    """Write photographs of coarse noise in ten classes."""
    rng, paths = np.random.default_rng(0), []
    for number in range(count):
        height, width = SHAPES[number % len(SHAPES)]
        coarse = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
        paths.append(folder / f"{number}.jpg")
        coarse.resize((width, height)).save(paths[-1], quality=90)
    return Images(paths, torch.arange(count) % 10, tuple(f"c{c}" for c in range(10)))


def open_as(storage: Storage, images: Images, device: torch.device) -> Store:
    """Keep the images in the device's memory."""
    return open_store(images, **storage._asdict(), device=device, location="device")[0]


def training_step(plan: Plan, model: Model, view: Callable[..., Tensor], labels: Tensor) -> Callable[..., None]:
    """A step of `nearkin train` from its rows to its updated weights."""
    embedder, device = model.embedder, model.device
    objective = method("proxy_anchor", classes=10, dim=plan.dim).to(device)
    optimiser = make_optimiser(plan, parameter_groups(plan, embedder, objective))  # type: ignore[arg-type]
    set_training(embedder, embedder.trunk, plan, warming_up=False)
    network = torch.compile(embedder, mode="reduce-overhead") if plan.compile else embedder

    def step(store: Store, rows: Tensor, rng: torch.Generator) -> None:
        optimiser.zero_grad()
        images = view(store[rows], rng).contiguous(memory_format=torch.channels_last)
        with autocast(device, plan.precision):
            x = network(images)
        objective.loss(Step(x, labels[rows], embedder, images)).backward()
        optimiser.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--batch", type=int, default=180)
    parser.add_argument("--images", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: results/stored_pixels_DEVICE.json beside this script")
    given = parser.parse_args()

    plan = make_plan({"backbone": given.backbone, "batch": given.batch, "device": given.device, "stored": 2.0}, {})
    device = torch.device(plan.device)
    plan = make_plan({**vars(plan), "compile": device.type == "cuda"}, {})
    model = Model(build_embedder(plan, "cosine").to(device, memory_format=torch.channels_last), plan, ())  # type: ignore[call-overload]
    how = {"size": model.size, "short_side": model.short_side, "normalise": model.embedder.trunk.normalise}
    view, rng = augment(plan.augment, **how, compiled=plan.compile), torch.Generator(device).manual_seed(0)  # type: ignore[arg-type]
    with TemporaryDirectory() as folder:
        images = make_photos(Path(folder), given.images)
        kept = (Storage(model.short_side), storage_of(plan, model.size))
        old, new = (open_as(storage, images, device) for storage in kept)
    rows = torch.randperm(given.images, generator=torch.Generator().manual_seed(0))[: given.batch]
    step = training_step(plan, model, view, images.labels.to(device))
    works: dict[str, Callable[[Store], object]] = {
        "training crops": lambda store: view(store[rows], rng),
        "test views": lambda store: model.view(store[rows]),
        "training step": lambda store: step(store, rows, rng),
    }
    figures = {}
    for name, work in works.items():
        both = [partial(work, old), partial(work, new)]
        before, after = least(both, rounds=given.rounds, device=device, processors=True)
        speeds = [round(1e3 * given.batch / took, 1) for took in (before, after)]
        figures[name] = {"new / old": round(after / before, 3), "images/s old": speeds[0], "images/s new": speeds[1]}
        print(f"{name}: time new / old {after / before:.3f} ({speeds[0]:,} and {speeds[1]:,} images/s)", flush=True)
    out = given.out or Path(__file__).parent / "results" / f"stored_pixels_{device.type}.json"
    write_json(out, {"figures": figures, "kept": [list(s) for s in kept], "batch": given.batch, **source()})


if __name__ == "__main__":
    main()
