"""Run folders and images for tests: models are small random networks."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nearkin.files import write_json, write_tensors
from nearkin.networks.backbones import backbone_settings
from nearkin.training.model import Model, build_embedder
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder


def make_run(folder: Path, *, names: tuple[str, ...] = (), seed: int = 0, **settings: Any) -> Path:
    """Write a run folder with random weights."""
    plan = make_plan({"dim": 8, "device": "cpu", "stored": 2.0, **settings}, backbone_settings("conv4"))
    torch.manual_seed(seed)
    embedder = build_embedder(plan, "cosine")
    run = RunFolder(folder)
    write_json(run.config, {"plan": dataclasses.asdict(plan), "method": plan.method, "space": "cosine"})
    model = Model(embedder, plan, names)
    about = {"names": names, "step": 0, "epoch": 0, "preprocessing": model.preprocessing()}
    about |= {"architecture": model.architecture()}
    write_tensors(run.model, embedder.state_dict(), about)
    return folder


def make_ensemble(folder: Path, *, parts: int = 2, **settings: Any) -> Path:
    """Write the folder of a cross-validation with random weights."""
    names = [f"fold-{number + 1}" for number in range(parts)]
    for seed, name in enumerate(names):
        make_run(folder / name, seed=seed, **settings)
    write_json(RunFolder(folder).config, {"parts": names})
    return folder


def make_images(folder: Path, *, classes: int = 3, each: int = 4, seed: int = 0) -> list[Path]:
    """Write one folder of small images per class: large patches that are the same within a class, and some noise."""
    rng = np.random.default_rng(seed)
    paths = []
    for c in range(classes):
        patches = np.kron(rng.integers(10, 246, size=(3, 4, 3)), np.ones((20, 20, 1)))
        (folder / f"class {c}").mkdir(parents=True, exist_ok=True)
        for n in range(each):
            pixels = patches + rng.integers(-10, 10, size=patches.shape)
            paths.append(folder / f"class {c}" / f"{n}.png")
            Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    return paths
