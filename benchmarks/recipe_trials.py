"""Try settings on held-out training classes, and measure the best ones once on the test half.

A trial changes the recipe `paper`, trains a third of its epochs without a quarter of the training classes, and scores
that quarter in the view of the training and in the best one: what `--test-view auto` does before a training. Changes
that gain on their own are then added to the best one, one after the other, as long as they gain, and the best of all is
trained at the further sizes. The test half is not read. Short trainings are kinder to what learns fast than to what
prevents overfitting.

    python benchmarks/recipe_trials.py --data cub:PATH --suite cub_lite0 --seconds 250
    python benchmarks/recipe_trials.py --data cub:PATH --seconds 250 --final best "paper at 224" --final-seconds 300

Trials run in the order of `TRIALS` at the first of `--sizes`, and with further `--splits` those that gain run again
with another quarter of the classes held out: a trial that was made with more splits is preferred to one with fewer.
`--final` trains on all classes for all epochs, one seed of every trial after the other, and measures the test half in
the view of the training and in the one that was best over the splits of the trial; `best` is the best trial of each
size. Run again, the command makes what is missing. Results are written after every training, to `results/recipes/`
beside this script.
"""

import argparse
import ast
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
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
from nearkin.files import Json, provenance, read_json, write_json
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
    "mean": {"schedule": "constant", "average": 1.0, "average_from": 30},
    "layer norm": {"layer_norm": True},
    "cosine": {"schedule": "cosine"},
    "softmax": {
        "method": "norm_softmax(temperature=0.05, smoothing=0.1)", "layer_norm": True, "images_per_class": 0
    },
    "head rate x10": {"head_lr": 1e-3},
    "jitter": {"augment": "jitter(resized_crop)"},
    "gem": {"pool": "gem"},
    "drop path": {"drop_path": 0.1},
    "rate x2, mean": {"schedule": "constant", "lr": 2e-4, "average": 1.0, "average_from": 30},
    "erase": {"augment": "erase(resized_crop)"},
    "slow proxies": {"method": "proxy_anchor(alpha=32.0, delta=0.1, speed=30)"},
    "crops from 0.16": {"augment": "resized_crop(scale=(0.16, 1))"},
    "mpa": {"method": "mpa_ap"},
    "rate x2, cosine": {"schedule": "cosine", "lr": 2e-4},
    "ramp, cosine": {"schedule": "cosine", "ramp": 3},
    "soft softmax": {
        "method": "norm_softmax(temperature=0.1, smoothing=0.1)", "layer_norm": True, "images_per_class": 0
    },
    "jitter, erase": {"augment": "erase(jitter(resized_crop))"},
}  # fmt: skip
"""Changes of the recipe `paper`, the most promising first."""

GAIN = 0.3
"""How much a change has to gain on its own to be tried together with others."""

SPLITS = 4
"""The training classes are cut into this many blocks, each of which can be held out."""

LONGER = 4
"""How many times as long as a trial a final training takes: three times the epochs, a third more images."""

METRICS = ("R@1", "MAP@R")


class Clock:
    """Does work for which there is time, judging by the last work of the same cost."""

    def __init__(self, seconds: float, unit: float = 0.0) -> None:
        self.ends, self.unit = time.monotonic() + seconds, unit

    def run(self, work: Callable[[], None], *, name: str, cost: float = 1.0) -> None:
        """Do some work if it fits."""
        began = time.monotonic()
        if began + cost * self.unit > self.ends:
            print(f"{name}: no time", flush=True)
            return
        try:
            work()
        except (NearkinError, RuntimeError) as error:  # the others are worth trying
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            self.unit = (time.monotonic() - began) / cost


class Trials:
    """The trials of one file: those that were made, and making more. Each is named "CHANGE at SIZE"."""

    def __init__(self, given: argparse.Namespace, reporter: Reporter) -> None:
        self.given, self.reporter = given, reporter
        self.path = given.out / "trials.json"
        self.common = {"recipe": "paper", "set": given.set, "data": given.data.split(":")[0], "seed": given.seed}
        known = read_json(self.path) if self.path.exists() else {"trials": {}, **self.common}
        if other := [name for name, value in self.common.items() if known[name] != value]:
            raise NearkinError(f"{self.path} holds trials with another {' and '.join(other)}: choose another --out.")
        self.made: dict[str, Json] = known["trials"]
        self.clock = Clock(given.seconds)
        self.data = plan_dataset(self.plan({}, given.sizes[0]))

    def plan(self, settings: Mapping[str, Any], size: int, **more: Any) -> Plan:
        """The plan of some changes, with the epochs of the recipe."""
        given = self.given
        base = {"backbone": "lite0", "metrics": METRICS, "device": given.device, "data": given.data, "size": size}
        chosen = {**recipe_settings("paper"), **base, **settings, **more, **given.set}
        plan = make_plan(chosen, backbone_settings(chosen["backbone"]))
        return dataclasses.replace(plan, stored=SIDE / size)

    def make_all(self) -> None:
        """Make the trials that fit into the time: single changes, those that gain together, the best at other sizes."""
        size, *larger = self.given.sizes
        first, *more = self.given.splits
        for change, settings in TRIALS.items():
            self.make(change, settings, size, split=first)
        for split in more:
            for change in ["paper", *self.gaining(size)]:
                self.make(change, TRIALS[change], size, split=split)
        self.add_up(size)
        for side in larger:
            if best := self.best(size):
                self.make_splits(best.rpartition(" at ")[0], self.made[best]["settings"], side)
        for side in larger:
            self.make("paper", {}, side, split=first)

    def add_up(self, size: int) -> None:
        """Add changes that gain on their own to the best of them, one after the other, and keep those that gain more.

        Of changes of the same setting only the best is tried.
        """
        name, settings = "", dict[str, Any]()
        for change in self.gaining(size):
            if settings.keys() & TRIALS[change].keys():
                continue
            both, merged = f"{name} and {change}" if name else change, settings | TRIALS[change]
            self.make_splits(both, merged, size)
            gains = self.gains()
            if not name or gains.get(f"{both} at {size}", -math.inf) > gains[f"{name} at {size}"]:
                name, settings = both, merged

    def make_splits(self, change: str, settings: dict[str, Any], size: int) -> None:
        """Make one trial with all splits."""
        for split in self.given.splits:
            self.make(change, settings, size, split=split)

    def make(self, change: str, settings: dict[str, Any], size: int, *, split: int) -> None:
        """Make one trial, unless it was made or there is no time, and write all that were made."""
        name = f"{change} at {size}"
        made = self.made.get(name, {})
        if made.get("settings") != settings:
            made = {"settings": settings, "size": size, "splits": {}}
        if str(split) in made["splits"]:
            return

        def train() -> None:
            began = time.monotonic()
            found = train_held_out(
                self.plan(settings, size, seed=self.given.seed),
                self.data,
                by="MAP@R",
                metrics=METRICS,
                shorter=True,
                block=(split - 1, SPLITS),
                reporter=self.reporter,
            )
            found["score"] = round(sum(found["scores"][f"{each} at {found['best']}"] for each in METRICS) / 2, 3)
            found |= {"seconds": round(time.monotonic() - began, 1), "commit": provenance()["commit"]}
            made["splits"][str(split)] = found
            self.made[name] = made
            self.write()
            print(f"{name}, split {split}: {found['score']:.2f} in {found['seconds']} s; {found['scores']}", flush=True)

        self.clock.run(train, name=name, cost=(size / self.given.sizes[0]) ** 2)

    def write(self) -> None:
        """Write the file of all trials."""
        write_json(self.path, {**self.common, "gains": self.gains(), "trials": self.made, **source()})

    def gains(self) -> dict[str, float]:
        """By how much each trial is above the recipe at the first size, on average over its splits; best first.

        The best of many scores of one split is partly luck, so trials with more splits come first.
        """
        paper = self.made.get(f"paper at {self.given.sizes[0]}", {"splits": {}})["splits"]
        found = {}
        for name, made in self.made.items():
            if shared := [split for split in made["splits"] if split in paper]:
                gain = sum(made["splits"][split]["score"] - paper[split]["score"] for split in shared) / len(shared)
                found[name] = len(shared), round(gain, 3)
        return {name: gain for name, (_, gain) in sorted(found.items(), key=lambda each: each[1], reverse=True)}

    def best(self, size: int) -> str | None:
        """The name of the best trial of a size."""
        return next((name for name in self.gains() if self.made[name]["size"] == size), None)

    def gaining(self, size: int) -> list[str]:
        """The single changes that gain enough, best first."""
        gains = self.gains()
        return [
            change for name in gains if (change := name.removesuffix(f" at {size}")) in TRIALS and gains[name] >= GAIN
        ]


def best_view(trial: Json) -> Json:
    """The test view of a trial that was best on average over its splits, as each records the one it chose."""
    tried = [
        {(size, side): score for size, side, score in split["view"]["scores"]} for split in trial["splits"].values()
    ]
    views = [view for view in tried[0] if all(view in other for other in tried)]
    size, side = max(views, key=lambda view: sum(scores[view] for scores in tried))
    return {"size": size, "short_side": side}


class Final:
    """The settings of a trial, trained on all classes and measured on the test half, with several seeds."""

    def __init__(self, trials: Trials, name: str) -> None:
        self.trials, self.name, made = trials, name, trials.made[name]
        self.settings, self.size = made["settings"], made["size"]
        self.view = best_view(made)
        alike = [each["splits"].values() for each in trials.made.values() if each["size"] == self.size]
        self.clock = Clock(0.0, LONGER * min(split["seconds"] for splits in alike for split in splits))
        plan = dataclasses.asdict(trials.plan(self.settings, self.size, **view_settings(self.view)))
        self.plan = {key: value for key, value in plan.items() if key not in ("data", "seed", "device", "metrics")}
        self.path = trials.given.out / f"final {name}.json".replace(" ", "_").replace(",", "")
        about = read_json(self.path) if self.path.exists() else {}
        known = self.plan | about.get("plan", {})  # settings that were added since had their default
        self.runs: list[Json] = about["runs"] if about and known == self.plan else []

    def train(self, seed: int, ends: float) -> None:
        """Measure one more seed, unless it was measured or there is no time before `ends`."""
        if not any(run["seed"] == seed for run in self.runs):
            self.clock.ends = ends
            self.clock.run(lambda: self.add(seed), name=f"{self.name}, seed {seed}")

    def add(self, seed: int) -> None:
        """Measure one more seed and write all of them."""
        self.runs.append({"seed": seed, **self.measure(seed)})
        metrics = self.runs[0]["scores"]
        mean = {each: round(sum(run["scores"][each] for run in self.runs) / len(self.runs), 3) for each in metrics}
        trial = self.trials.made[self.name]
        about = {"name": self.name, "mean": mean, "runs": self.runs, "trial": trial, "plan": self.plan}
        write_json(self.path, {**about, **source()})
        print(f"{self.name}, seed {seed}: {self.runs[-1]}; mean of {len(self.runs)}: {mean}", flush=True)

    def measure(self, seed: int) -> Json:
        """Train on all classes, and measure the test half in both views."""
        reporter, data = self.trials.reporter, self.trials.data
        plan = self.trials.plan(self.settings, self.size, seed=seed, **view_settings(self.view))
        with TemporaryDirectory() as folder:
            run = RunFolder(folder)
            train_model(run, plan, data=data, resume=False, reporter=reporter)
            model, result = load(run, device=plan.device), run.read_result()
        chosen = SquareView(model.test_size, model.short_side)
        scores = {f"{metric} at {chosen.size} of {chosen.short_side}": v for metric, v in result["scores"].items()}
        model.show(test_size=0, test_crop=0.0)
        usual = SquareView(model.test_size, model.short_side)
        if usual != chosen:
            opened = open_images(model, data.test, "test", reporter=reporter)
            measured = measure(embed_images(model, opened, reporter=reporter), METRICS)
            scores |= {f"{metric} at {usual.size} of {usual.short_side}": value for metric, value in measured.items()}
        rounded = {metric: round(value, 3) for metric, value in scores.items()}
        return {"scores": rounded, "seconds": result["seconds"], "images_per_second": result["images_per_second"]}


def measure_finals(trials: Trials, names: Iterable[str], seeds: list[int], seconds: float) -> None:
    """Measure trials on the test half, the first seed of all of them first, as far as the time reaches."""
    chosen = [trials.best(size) for size in trials.given.sizes] if "best" in names else []
    wanted = dict.fromkeys([*chosen, *(name for name in names if name != "best")])
    for name in wanted:
        if name is not None and name not in trials.made:
            print(f"{name}: no such trial; there are {', '.join(trials.made)}", flush=True)
    finals = [Final(trials, name) for name in wanted if name in trials.made]
    ends = time.monotonic() + seconds
    for seed in seeds:
        for final in finals:
            final.train(seed, ends)


def setting_value(text: str) -> Any:
    """A number, True or False, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def whole_numbers(text: str) -> list[int]:
    """The numbers of an argument such as 0,1,2."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for nearkin train")
    parser.add_argument("--seconds", type=float, default=250.0, help="of trials; none starts that would take longer")
    parser.add_argument("--seed", type=int, default=0, help="of the trials")
    parser.add_argument("--sizes", type=whole_numbers, default=[224, 288], help="the first is that of single changes")
    parser.add_argument("--splits", type=whole_numbers, default=[4], help="blocks of classes to hold out, 1 to 4")
    parser.add_argument("--final", nargs="+", default=[], metavar="TRIAL", help="measure these on the test half")
    parser.add_argument("--final-seconds", type=float, default=300.0, help="of final trainings")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1, 2], help="of the final trainings")
    parser.add_argument("--suite", help="first choose the test view of this suite, as suite_view.py does")
    parser.add_argument("--suite-epochs", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all trainings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recipes")
    given = parser.parse_args()
    given.set = {name: setting_value(text) for name, _, text in (each.partition("=") for each in given.set)}
    given.out.mkdir(parents=True, exist_ok=True)
    with keep_images_open(3 * len(given.splits)):
        if given.suite and not (out := given.out / f"view_{given.suite}.json").exists():
            suite_view(given.suite, data=given.data, out=out, epochs=given.suite_epochs, device=given.device)
        trials = Trials(given, Reporter(Console() if Console().is_terminal else None))
        trials.make_all()
        for name, gain in trials.gains().items():
            print(f"{gain:+6.2f}  {name:24} {next(iter(trials.made[name]['splits'].values()))['scores']}")
        measure_finals(trials, given.final, given.seeds, given.final_seconds)


if __name__ == "__main__":
    main()
