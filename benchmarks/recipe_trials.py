"""Try settings on held-out training classes, and measure the chosen ones once on the test half.

A trial changes the recipe `paper`, trains a third of its epochs without a quarter of the training classes, and scores
that quarter in the view of the training and in the best one: exactly what `--test-view auto` does before a training.
Trials that gain on their own are then tried together. The test half is not read.

    python benchmarks/recipe_trials.py --data cub:PATH --suite cub_lite0 --seconds 200       # the most promising first
    python benchmarks/recipe_trials.py --data cub:PATH --final paper together "together at 288" --seeds 0,1,2

`--suite` first chooses the larger test view of a suite, as suite_view.py does. `--final` trains on all classes with the
settings of a trial, for all epochs, and measures the test half in the view of the training and in the one that the
trial chose. A trial that was not made yet is made first. Results are written after every training, to
`results/recipes/` beside this script.
"""

import argparse
import ast
import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from held_out import train_held_out
from rich.console import Console
from suite_view import suite_view
from timing import source

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json, write_json
from nearkin.networks.backbones import backbone_settings
from nearkin.training.chosen_view import SquareView, view_settings
from nearkin.training.images import embed_images, measure, open_images, plan_dataset
from nearkin.training.launch import train_model
from nearkin.training.model import load
from nearkin.training.plan import Plan, make_plan
from nearkin.training.recipes import recipe_settings
from nearkin.training.run_folder import RunFolder

SIDE = 448
"""Short side at which images are kept, for all sizes of the network, so that they are read once."""

TRIALS: dict[str, dict[str, Any]] = {
    "paper": {},
    "cosine": {"schedule": "cosine"},
    "head rate x10": {"head_lr": 1e-3},
    "constant rate, mean": {"schedule": "constant", "average": 1.0, "average_from": 30},
    "layer norm": {"layer_norm": True},
    "gem": {"pool": "gem"},
    "crops from 0.16": {"augment": "resized_crop(scale=(0.16, 1))"},
    "rate x2, cosine": {"schedule": "cosine", "lr": 2e-4},
    "jitter": {"augment": "jitter(resized_crop)"},
    "erase": {"augment": "erase(resized_crop)"},
    "smooth softmax": {
        "method": "norm_softmax(temperature=0.05, smoothing=0.1)", "layer_norm": True, "images_per_class": 0
    },
    "mpa": {"method": "mpa_ap"},
    "ramp, cosine": {"schedule": "cosine", "ramp": 3},
    "rate x2, constant, mean": {"schedule": "constant", "lr": 2e-4, "average": 1.0, "average_from": 30},
}  # fmt: skip
"""Changes of the recipe `paper`, the most promising first."""

SIZES = {"together": 224, "paper at 256": 256, "together at 256": 256, "paper at 288": 288, "together at 288": 288}
"""Trials after those: all that gains, at several sizes."""

GAIN = 0.3
"""How much a trial has to gain on its own to be part of `together`."""

METRICS = ("R@1", "MAP@R")


class Trials:
    """The trials of one file: those that were made, and making more."""

    def __init__(self, given: argparse.Namespace, reporter: Reporter) -> None:
        self.given, self.reporter = given, reporter
        self.path = given.out / "trials.json"
        self.made: dict[str, Json] = read_json(self.path)["trials"] if self.path.exists() else {}
        self.data = plan_dataset(self.plan({}))

    def plan(self, settings: Mapping[str, Any], **more: Any) -> Plan:
        """The plan of some changes, with the epochs of the recipe."""
        given = self.given
        base = {"backbone": "lite0", "metrics": METRICS, "device": given.device, "data": given.data}
        chosen = {**recipe_settings("paper"), **base, **settings, **more, **given.set}
        plan = make_plan(chosen, backbone_settings(chosen["backbone"]))
        return dataclasses.replace(plan, stored=SIDE / (plan.size or 224))

    def make(self, name: str, settings: dict[str, Any]) -> None:
        """Make one trial and write all that were made."""
        began = time.monotonic()
        plan = self.plan(settings, seed=self.given.seed)
        found = train_held_out(
            plan, self.data, by="MAP@R", metrics=METRICS, shorter=True, reporter=self.reporter
        )  # fmt: skip
        score = sum(found["scores"][f"{metric} at {found['best']}"] for metric in METRICS) / len(METRICS)
        seconds = round(time.monotonic() - began, 1)
        self.made[name] = {"settings": settings, "score": round(score, 3), **found, "seconds": seconds}
        self.write()
        print(f"{name}: {score:.2f} in {seconds} s; {found['scores']}", flush=True)

    def write(self) -> None:
        ranking = sorted(self.made, key=lambda name: -self.made[name]["score"])
        about = {
            "recipe": "paper",
            "set": self.given.set,
            "data": self.given.data.split(":")[0],
            "seed": self.given.seed,
        }
        write_json(self.path, {**about, "ranking": ranking, "trials": self.made, **source()})

    def settings(self, name: str) -> dict[str, Any]:
        """The settings of a trial by its name."""
        if name in TRIALS:
            return TRIALS[name]
        size = {"size": SIZES[name]}
        return size if name.startswith("paper") else {**self.gains(), **size}

    def gains(self) -> dict[str, Any]:
        """All changes that gain on their own; of two that change the same setting the better one."""
        scores = {name: self.made[name]["score"] for name in TRIALS if name in self.made}
        together: dict[str, Any] = {}
        for name in sorted(scores, key=lambda each: -scores[each]):
            if scores[name] >= scores["paper"] + GAIN and not together.keys() & TRIALS[name].keys():
                together |= TRIALS[name]
        return together

    def rest(self) -> Iterator[str]:
        """The names of trials that fit into the seconds, by the time that the last ones took."""
        ends = time.monotonic() + self.given.seconds
        for number, name in enumerate(names := [*TRIALS, *SIZES]):
            if name in self.made:
                continue
            single = max((trial["seconds"] for trial in self.made.values()), default=0.0)
            kept = 0.0 if name in SIZES else single * (1 + 1.65)  # for `together` at 224 and at 288
            if time.monotonic() + single + kept > ends and name not in ("together", "together at 288"):
                print(f"{name}: left out, {len(names) - number} trials are left")
                continue
            yield name


def final(trials: Trials, name: str, seed: int) -> Json:
    """Train on all classes, and measure the test half in both views."""
    reporter, made = trials.reporter, trials.made[name]
    view = view_settings(made["view"])
    plan = trials.plan(made["settings"], **view, seed=seed)
    with TemporaryDirectory() as folder:
        run = RunFolder(folder)
        train_model(run, plan, data=trials.data, resume=False, reporter=reporter)
        model, result = load(run, device=plan.device), run.read_result()
        chosen = SquareView(model.test_size, model.short_side)
        scores = {
            f"{metric} at {chosen.size} of {chosen.short_side}": value for metric, value in result["scores"].items()
        }
        model.show(test_size=0, test_crop=0.0)
        if (usual := SquareView(model.test_size, model.short_side)) != chosen:
            opened = open_images(model, trials.data.test, "test", reporter=reporter)
            measured = measure(embed_images(model, opened, reporter=reporter), METRICS)
            scores |= {f"{metric} at {usual.size} of {usual.short_side}": value for metric, value in measured.items()}
    rounded = {metric: round(value, 3) for metric, value in scores.items()}
    print(f"{name}, seed {seed}: {rounded} in {result['seconds']} s", flush=True)
    return {
        "seed": seed,
        "scores": rounded,
        "seconds": result["seconds"],
        "images_per_second": result["images_per_second"],
    }


def measure_final(trials: Trials, name: str, seeds: list[int]) -> None:
    """Measure a trial's settings on the test half with several seeds, and write all of them."""
    path = trials.given.out / f"final {name}.json".replace(" ", "_").replace(",", "")
    runs: list[Json] = []
    for seed in seeds:
        runs.append(final(trials, name, seed))
        mean = {
            metric: round(sum(run["scores"][metric] for run in runs) / len(runs), 3) for metric in runs[0]["scores"]
        }
        plan = dataclasses.asdict(trials.plan(trials.made[name]["settings"]))
        kept = {key: value for key, value in plan.items() if key not in ("data", "seed", "device")}
        write_json(
            path, {"name": name, "mean": mean, "runs": runs, "trial": trials.made[name], "plan": kept, **source()}
        )
    print(f"{name}, mean of {len(runs)}: {mean}", flush=True)


def setting_value(text: str) -> Any:
    """A number, True or False, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for nearkin train")
    parser.add_argument("--seconds", type=float, default=200.0, help="of trials; none starts that would take longer")
    parser.add_argument("--seed", type=int, default=0, help="of the trials")
    parser.add_argument("--final", nargs="+", default=[], metavar="TRIAL", help="measure these on the test half")
    parser.add_argument("--seeds", default="0,1,2", help="of the final trainings")
    parser.add_argument("--suite", help="first choose the test view of this suite, as suite_view.py does")
    parser.add_argument("--suite-epochs", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all trainings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recipes")
    given = parser.parse_args()
    given.set = {name: setting_value(text) for name, _, text in (each.partition("=") for each in given.set)}
    given.out.mkdir(parents=True, exist_ok=True)
    with keep_images_open():
        if given.suite:
            out = given.out / f"view_{given.suite}.json"
            suite_view(given.suite, data=given.data, out=out, epochs=given.suite_epochs, device=given.device)
        trials = Trials(given, Reporter(Console() if Console().is_terminal else None))
        for name in given.final or trials.rest():
            try:
                if name not in trials.made:
                    trials.make(name, trials.settings(name))
            except (NearkinError, RuntimeError) as error:  # the others are worth trying
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            if given.final:
                measure_final(trials, name, [int(seed) for seed in given.seeds.split(",")])
    if not given.final:
        for name in sorted(trials.made, key=lambda each: -trials.made[each]["score"]):
            made = trials.made[name]
            print(f"{made['score']:6.2f}  {name:24} {made['scores']}")


if __name__ == "__main__":
    main()
