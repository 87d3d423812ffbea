"""Train head and proxies on features of a frozen trunk: the time from start to score, and the scores.

Images are decoded before the clock starts. The first training begins with no features in the cache, so it embeds all
images; the others, with other seeds and numbers of views, take what is there. Processor seconds are those of all cores:
on a machine that is busy otherwise they say more than the seconds on the clock.

    python benchmarks/frozen_trunk.py --data cub:PATH --backbone lite0
    python benchmarks/frozen_trunk.py --data cub:PATH --backbone lite0 --views 4 8 --out results/frozen_trunk.json
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from recipe_trials import settings_of
from rich.console import Console
from timing import source

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.files import Json, cache_dir, write_json
from nearkin.networks.backbones import backbone_settings
from nearkin.training.frozen import VERSION
from nearkin.training.images import open_images, plan_dataset, with_storage
from nearkin.training.launch import train
from nearkin.training.model import Model, build_embedder
from nearkin.training.plan import make_plan

METRICS = ("R@1", "MAP@R")


def decode(settings: Json, reporter: Reporter) -> float:
    """Open all images, so that trainings find them; return the seconds."""
    began = time.monotonic()
    plan = make_plan(settings, backbone_settings(settings["backbone"]))
    data = plan_dataset(plan)
    plan = with_storage(plan, data, reporter=reporter)
    model = Model(build_embedder(plan, "cosine"), plan, data.train.names)
    for name, images in (("training", data.train), ("test", data.test)):
        open_images(model, images, name, reporter=reporter)
    return round(time.monotonic() - began, 1)


def measure(settings: Json, reporter: Reporter) -> Json:
    """Train once; return the time from the start to the score, and the score."""
    began, processor = time.monotonic(), time.process_time()
    with TemporaryDirectory() as folder:
        run = train(**settings, metrics=METRICS, reporter=reporter, out=Path(folder) / "run")
        result = run.read_result()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "load": round(os.getloadavg()[1], 1),
        "training_seconds": result["seconds"],
        "scores": result["scores"],
        "before": result["before"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for nearkin train")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--views", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all trainings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "frozen_trunk.json")
    given = parser.parse_args()
    settings = {"data": given.data, "backbone": given.backbone, "device": given.device} | settings_of(given.set)
    reporter = Reporter(Console())
    shutil.rmtree(cache_dir() / f"features-v{VERSION}", ignore_errors=True)
    about = {**settings, "data": given.data.split(":")[0]}
    runs: list[Json] = []
    with keep_images_open():
        decoding = decode(settings, reporter)
        for views in given.views:
            for seed in range(given.seeds):
                made = measure({**settings, "trunk": f"frozen(views={views})", "seed": seed}, reporter)
                runs.append({"views": views, "seed": seed, **made})
                write_json(given.out, {"settings": about, "decoding_seconds": decoding, "runs": runs, **source()})
                print(runs[-1], flush=True)


if __name__ == "__main__":
    main()
