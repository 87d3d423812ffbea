"""Whether a recipe loses on other data than it was chosen on: embedded letters and made pictures, beside the defaults.

Both are trained with the defaults of their network and with the recipe, with the same seeds, and measured on the test
classes after the last epoch, in the test view of each. The made pictures are drawn here: a class is a shape of several
coloured parts, shown turned, shifted, scaled and in other light before a random background. Results are written after
every training to `results/recipes/check_NAME.json` beside this script. Run again, the command makes what is missing.

    python benchmarks/recipe_check.py strong                                   # on a GPU
    python benchmarks/recipe_check.py paper --data letters --epochs 10         # on a CPU
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from timing import source

from nearkin.evaluation.statistics import paired_t
from nearkin.files import Json, read_json, write_json
from nearkin.training.launch import train
from nearkin.training.run_folder import RunFolder

METRICS = ("R@1", "MAP@R")

SIDE = 160
"""Side of the made pictures."""


def draw_pictures(folder: Path, *, classes: int, each: int, seed: int = 0) -> None:
    """Write one folder of pictures per class; test classes are the second half, as in every folder."""
    for c in range(classes):
        rng = np.random.default_rng((seed, c))
        parts = [
            (rng.integers(3, 8), rng.uniform(0.15, 0.45), rng.uniform(-0.45, 0.45, 2), rng.integers(40, 216, 3))
            for _ in range(4)
        ]
        (folder / f"{c:03}").mkdir(parents=True, exist_ok=True)
        for number in range(each):
            picture = _draw(parts, np.random.default_rng((seed, c, number)))
            picture.save(folder / f"{c:03}" / f"{number}.png")


def _draw(parts: Sequence[tuple[int, float, np.ndarray, np.ndarray]], rng: np.random.Generator) -> Image.Image:
    noise = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    picture = noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    angle, scale = rng.uniform(-0.5, 0.5), SIDE * rng.uniform(0.35, 0.6)
    middle, light = SIDE * rng.uniform(0.38, 0.62, 2), rng.uniform(0.6, 1.3)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    for corners, radius, at, colour in parts:
        around = 2 * math.pi * np.arange(corners) / corners
        outline = at + radius * np.stack([np.cos(around), np.sin(around)], 1)
        points = middle + scale * (outline + rng.normal(0, 0.03, outline.shape)) @ turn
        shade = np.clip(light * (colour + rng.normal(0, 12, 3)), 0, 255).astype(int)
        draw.polygon([tuple(point) for point in points], fill=tuple(shade.tolist()))
    grain = np.asarray(picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.5)))) + rng.normal(
        0, 8, (SIDE, SIDE, 3)
    )
    return Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", nargs="+", choices=("letters", "pictures"), default=["letters", "pictures"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=0, help="instead of the network's (0)")
    parser.add_argument("--classes", type=int, default=200, help="half of them train")
    parser.add_argument("--each", type=int, default=20, help="images per class")
    parser.add_argument(
        "--size", type=int, default=0, help="of all trainings with pictures (0: the network's, or the recipe's)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recipes")
    given = parser.parse_args()
    path = given.out / f"check_{given.recipe}.json"
    setting = {key: getattr(given, key) for key in ("recipe", "epochs", "classes", "each", "size")}
    known: Json = read_json(path) if path.exists() else {}
    data: dict[str, dict[str, list[Json]]] = known["data"] if known.get("setting") == setting else {}
    with TemporaryDirectory() as folder:
        for name in given.data:
            spec = f"glyphs(classes={given.classes}, samples={given.each})"
            if name == "pictures":
                draw_pictures(Path(folder) / name, classes=given.classes, each=given.each)
                spec = f"folder:{folder}/{name}"
            runs = data.setdefault(name, {"": [], given.recipe: []})
            more = {"epochs": given.epochs} if given.epochs else {}
            more |= {"size": given.size} if given.size and name == "pictures" else {}
            for seed, recipe in itertools.product(range(given.seeds), runs):
                if all(run["seed"] != seed for run in runs[recipe]):
                    run = train(
                        data=spec,
                        recipe=recipe,
                        seed=seed,
                        metrics=METRICS,
                        device=given.device,
                        out=Path(folder) / f"{name}-{recipe}-{seed}",
                        **more,
                    )
                    runs[recipe].append({"seed": seed, **outcome(run)})
                    write_json(path, {"setting": setting, "differences": differences(data), "data": data, **source()})
                    print(f"{name}, {recipe or 'defaults'}, seed {seed}: {runs[recipe][-1]['scores']}", flush=True)
    for line, found in differences(data).items():
        print(f"{line}: {found['difference']:+.2f} (95 % interval {found['low']:+.2f} to {found['high']:+.2f})")


def outcome(run: RunFolder) -> Json:
    """What is kept of a run."""
    result, plan = run.read_result(), read_json(run.config)["plan"]
    del plan["data"]
    return {"scores": result["scores"], "seconds": result["seconds"], "plan": plan}


def differences(data: dict[str, dict[str, list[Json]]]) -> Json:
    """By how much the recipe is above the defaults, over the seeds that both have."""
    found: Json = {}
    for name, (usual, own) in ((name, runs.values()) for name, runs in data.items()):
        for metric in METRICS:
            scores = [{run["seed"]: run["scores"][metric] for run in runs} for runs in (usual, own)]
            seeds = sorted(scores[0].keys() & scores[1].keys())
            if len(seeds) > 1:
                test = paired_t([scores[1][seed] for seed in seeds], [scores[0][seed] for seed in seeds])
                found[f"{name}, {metric}"] = {"difference": test.difference, "low": test.low, "high": test.high}
    return found


if __name__ == "__main__":
    main()
