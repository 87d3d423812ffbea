"""Choose the larger test view of a suite, once, on held-out training classes of its baseline.

The baseline's row is trained as the suite says, but without a quarter of the training classes; these are then shown in
every view that `--test-view auto` tries. The test half is not read. The view with the best score goes into the metrics
of the suite, such as "R@1 at 288 of 320".

    python benchmarks/suite_view.py cub_lite0 --data cub:PATH                            # as the suite trains
    python benchmarks/suite_view.py cub_lite0 --data cub:PATH --epochs 3 --fraction 0.4  # a direction, on a CPU
"""

import argparse
from pathlib import Path

from held_out import train_held_out
from rich.console import Console
from timing import source

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import load_suite
from nearkin.console import Reporter
from nearkin.files import write_json
from nearkin.networks.backbones import backbone_settings
from nearkin.training.images import plan_dataset, with_storage
from nearkin.training.plan import make_plan


def suite_view(
    name: str,
    *,
    data: str,
    out: Path | None,
    seed: int = 0,
    epochs: int = 0,
    fraction: float = 1.0,
    device: str = "auto",
) -> None:
    """Choose the view of a suite and write it. `epochs` stands for those of the suite (0)."""
    suite = load_suite(name)
    (run,) = plan_suite(suite, seeds=[seed], rows=[suite.baseline]).runs
    changed = {"fraction": fraction, "device": device} | ({"epochs": epochs} if epochs else {})
    settings = {**run.settings, **changed, "data": data, "select": "validation"}
    plan, reporter = make_plan(settings, backbone_settings(run.settings["backbone"])), Reporter(Console())
    images = plan_dataset(plan)
    found = train_held_out(with_storage(plan, images, reporter=reporter), images, by=suite.sort, reporter=reporter)
    out = out or Path(__file__).parent / "results" / f"view_{name}.json"
    about = {"suite": name, "row": suite.baseline, "seed": seed, "epochs": plan.epochs, "fraction": fraction}
    write_json(out, about | {"images": found["images"], **found["view"], **source()})
    print(f"{found['best']}; written to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="suite")
    parser.add_argument("--data", required=True, help="a data set of the suite, as NAME:PATH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=0, help="instead of the suite's")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the images of each class")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: results/view_SUITE.json beside this script")
    suite_view(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
