"""Choose the larger test view of a suite, once, on held-out training classes of its baseline.

The baseline's row is trained as the suite says, but without a quarter of the training classes; these are then shown in
every view that `--test-view auto` tries. The test half is not read. The view with the best score goes into the metrics
of the suite, such as "R@1 at 288 of 320".

    python benchmarks/suite_view.py cub_lite0 --data cub:PATH                            # as the suite trains
    python benchmarks/suite_view.py cub_lite0 --data cub:PATH --epochs 3 --fraction 0.4  # a direction, on a CPU
"""

import argparse
import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from timing import source

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import load_suite
from nearkin.console import Reporter
from nearkin.data.splits import sample_fraction
from nearkin.files import write_json
from nearkin.networks.backbones import backbone_settings
from nearkin.training.images import open_images, plan_dataset, training_images, with_storage
from nearkin.training.launch import train_model
from nearkin.training.model import load
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.test_view import choose_view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--data", required=True, help="a data set of the suite, as NAME:PATH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=0, help="instead of the suite's")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the images of each class")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: results/view_SUITE.json beside this script")
    given = parser.parse_args()

    suite = load_suite(given.suite)
    (run,) = plan_suite(suite, seeds=[given.seed], rows=[suite.baseline]).runs
    changed = {"fraction": given.fraction, "device": given.device} | ({"epochs": given.epochs} if given.epochs else {})
    settings = {**run.settings, **changed, "data": given.data, "select": "validation"}
    plan, reporter = make_plan(settings, backbone_settings(run.settings["backbone"])), Reporter(Console())
    data = plan_dataset(plan)
    plan = with_storage(plan, data, reporter=reporter)
    trained, held = training_images(plan, data)
    assert held is not None
    held = sample_fraction(held, given.fraction, seed=given.seed)
    own = dataclasses.replace(data, train=trained, test=held)
    with TemporaryDirectory() as folder:
        alone = dataclasses.replace(plan, select="last", fraction=1.0, warmup=min(plan.warmup, plan.epochs // 2))
        train_model(RunFolder(folder), alone, data=own, resume=False, reporter=reporter)
        model = load(folder, device=plan.device)
        found = choose_view(
            model, open_images(model, held, "held-out", reporter=reporter), suite.sort, reporter=reporter
        )
    out = given.out or Path(__file__).parent / "results" / f"view_{suite.name}.json"
    about = {"suite": suite.name, "row": suite.baseline, "seed": given.seed, "epochs": plan.epochs}
    write_json(out, about | {"fraction": given.fraction, "images": len(held), **found, **source()})
    print(f"{found['size']} of {found['short_side']}; written to {out}")


if __name__ == "__main__":
    main()
