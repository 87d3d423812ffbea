"""Try settings on held-out training classes, and measure the best ones once on the test half.

A trial changes the recipe `paper`, trains a third of its epochs without a quarter of the training classes, and scores
that quarter in the view of the training and in the best one: what `--test-view auto` does before a training. The test
half is not read. Short trainings are kinder to what learns fast than to what prevents overfitting.

    python benchmarks/recipe_trials.py --data cub:PATH --suite cub_lite0 --seconds 250
    python benchmarks/recipe_trials.py --data cub:PATH --seconds 250 --final best "paper at 224" --final-seconds 300

One training differs from the next by luck alone, by about as much as a setting gains. So the trials after that of
`paper` are mixtures of many changes, which change of each of `FACTORS` being drawn such that every training says
something about all of them. The effect of each change is estimated from all trials together, by least squares. Then
what gains is put together and trained on every split at the first of `--sizes`, for which time is kept back, and the
best of all at the others.

`--final` trains on all classes for all epochs, one seed of every trial after the other, and measures the test half in
the view of the training and in the one that was best over the splits of the trial; `best` is the best trial of each
size. Run again, the command makes what is missing. Results are written after every training, to `results/recipes/`
beside this script. Then `--recipe strong` writes the best trial, or that of `--trial`, as a recipe with its evidence.
"""

import argparse
import ast
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from held_out import train_held_out
from rich.console import Console
from suite_view import suite_view
from timing import source
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.data.pixels.views import short_side_for
from nearkin.errors import NearkinError
from nearkin.files import Json, provenance, read_json, write_json, write_text
from nearkin.networks.backbones import backbone_row, backbone_settings
from nearkin.training.chosen_view import SquareView, view_settings
from nearkin.training.images import embed_images, measure, open_images, plan_dataset
from nearkin.training.launch import train_model
from nearkin.training.model import load
from nearkin.training.plan import Plan, make_plan
from nearkin.training.recipes import FOLDER, TIMES_OF, recipes
from nearkin.training.run_folder import RunFolder

SIDE = 448
"""Short side at which images are kept, for all sizes of the network, so that they are read once."""

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "schedule": {
        "cosine": {"schedule": "cosine"},
        "mean": {"schedule": "constant", "average": 1.0, "average_from": 30},
    },
    "loss": {
        "softmax": {"method": "norm_softmax(temperature=0.05, smoothing=0.1)", "images_per_class": 0},
        "soft softmax": {"method": "norm_softmax(temperature=0.1, smoothing=0.1)", "images_per_class": 0},
    },
    "norm": {"layer norm": {"layer_norm": True}},
    "head": {"head rate x10": {"head_lr": 1e-3}},
    "rate": {"rate x2": {"lr": 2e-4}},
    "pool": {"gem": {"pool": "gem"}},
    "crops": {"crops from 0.3": {"augment": "resized_crop(scale=(0.3, 1))"}},
    "change": {"jitter": {"augment": "jitter({})"}, "erase": {"augment": "erase({})"}},
}
"""Changes of the recipe `paper`, of which a trial makes at most one of each kind. `{}` is the augmentation so far."""

CHANGES = [change for changes in FACTORS.values() for change in changes]

MIXTURES = 24
"""The most trials that mix changes."""

CANDIDATES = 500
"""Mixtures that are drawn, of which the one is trained that says most."""

GAIN = 0.1
"""How much a change has to gain by estimate to be kept."""

SPREAD = 0.5
"""How much is expected of the effects of changes, relative to luck: estimates from few trials stay near 0."""

SPLITS = 4
"""The training classes are cut into this many blocks, each of which can be held out."""

LONGER = 4
"""How many times as long as a trial a final training takes: three times the epochs, a third more images."""

METRICS = ("R@1", "MAP@R")


class Clock:
    """Does work for which there is time, judging by the last work of the same cost."""

    def __init__(self, seconds: float, unit: float = 0.0) -> None:
        self.ends, self.unit = time.monotonic() + seconds, unit

    def has(self, cost: float) -> bool:
        """Whether work of this cost fits."""
        return time.monotonic() + cost * self.unit <= self.ends

    def run(self, work: Callable[[], None], *, name: str, cost: float = 1.0) -> bool:
        """Do some work if it fits; return whether it was done."""
        if not self.has(cost):
            print(f"{name}: no time", flush=True)
            return False
        began = time.monotonic()
        try:
            work()
        except (NearkinError, RuntimeError) as error:  # the others are worth trying
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return False
        self.unit = (time.monotonic() - began) / cost
        return True


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
        self.failed: list[tuple[Sequence[str], str]] = []  # changes and split
        self.clock = Clock(given.seconds)
        self.data = plan_dataset(self.plan({}, given.sizes[0]))

    def plan(self, settings: Mapping[str, Any], size: int, **more: Any) -> Plan:
        """The plan of some changes, with the epochs of the recipe."""
        given = self.given
        base = {"backbone": "lite0", "metrics": METRICS, "device": given.device, "data": given.data, "size": size}
        chosen = {**recipes()["paper"].settings, **base, **settings, **more, **given.set}
        plan = make_plan(chosen, backbone_settings(chosen["backbone"]))
        return dataclasses.replace(plan, stored=SIDE / size)

    def make_all(self) -> None:
        """Make the trials that fit into the time: the recipe, mixtures, what gains together, the best at other sizes.

        Time is kept back for all that follows the mixtures.
        """
        size, *larger = self.given.sizes
        self.make_splits((), size)
        at_the_end = len(self.given.splits) * sum((side / size) ** 2 for side in larger)
        for number in range(len(self.mixtures(size)), MIXTURES):
            if not self.clock.has(1 + 2 * len(self.given.splits) + at_the_end):
                break
            self.make(*self.next_mixture(size, seed=number))
        for _ in range(3):  # what was chosen is measured too, which may change the choice
            chosen = self.chosen(size)
            if trial_name(chosen, size) in self.complete(size):
                break
            if self.clock.has(len(self.given.splits) + at_the_end):
                self.make_splits(chosen, size)
        for side in larger:
            if best := self.best(size):
                self.make_splits(self.made[best]["changes"], side)

    def mixtures(self, size: int) -> list[tuple[Sequence[str], str, float]]:
        """The changes, the split and the score of every trial of a size, without those of the recipe itself."""
        return [trial for trial in self.scores(size) if trial[0]]

    def scores(self, size: int) -> list[tuple[Sequence[str], str, float]]:
        """The changes, the split and the score of every trial of a size."""
        alike = [made for made in self.made.values() if made["size"] == size]
        return [(made["changes"], at, each["score"]) for made in alike for at, each in made["splits"].items()]

    def row(self, changes: Sequence[str], split: str) -> Tensor:
        """What the score of a trial depends on: its split, and each change, 0 or 1."""
        return torch.tensor([float(split == str(each)) for each in self.given.splits] + [c in changes for c in CHANGES])

    def precision(self, size: int, more: Sequence[tuple[Sequence[str], str]] = ()) -> Tensor:
        """How well split and changes are known [F, F]: the inverse of the covariance of the effects.

        `more` are trials to count beside those that have a score.
        """
        rows = [self.row(changes, split) for changes, split, *_ in (*self.scores(size), *more)]
        before = torch.tensor([1e-3] * len(self.given.splits) + [SPREAD] * len(CHANGES))
        return before.diag() + sum(row.outer(row) for row in rows)

    def next_mixture(self, size: int, *, seed: int) -> tuple[tuple[str, ...], int, int]:
        """Draw mixtures, and return the one whose score would be known worst, its size and its split.

        Mixtures that failed count as known, so that others are tried.
        """
        rng = random.Random(seed)
        used = [split for _, split, *_ in (*self.scores(size), *self.failed)]
        split = min(self.given.splits, key=lambda each: used.count(str(each)))
        drawn = [[rng.choice(["", *changes]) for changes in FACTORS.values()] for _ in range(CANDIDATES)]
        covariance = self.precision(size, self.failed).inverse()
        rows = torch.stack([self.row(changes, str(split)) for changes in drawn])
        worst = int(((rows @ covariance) * rows).sum(1).argmax())
        return tuple(change for change in drawn[worst] if change), size, split

    def effects(self, size: int) -> dict[str, tuple[float, float]]:
        """By how much each change raises the score, and the standard error of that, best first."""
        trials, precision = self.scores(size), self.precision(size)
        x = torch.stack([self.row(changes, split) for changes, split, _ in trials])
        y = torch.tensor([score for *_, score in trials])
        found = torch.linalg.solve(precision, x.T @ y)
        free = max(len(y) - len(found), 1)
        luck = float((y - x @ found).square().sum() / free) ** 0.5
        errors = luck * precision.inverse().diagonal().sqrt()
        pairs = zip(found.tolist(), errors.tolist(), strict=True)
        named = zip(CHANGES, list(pairs)[len(self.given.splits) :], strict=True)
        return {
            name: (round(gain, 3), round(error, 3)) for name, (gain, error) in sorted(named, key=lambda n: -n[1][0])
        }

    def chosen(self, size: int) -> tuple[str, ...]:
        """The best change of each kind, if it gains by estimate."""
        gain = {name: effect for name, (effect, _) in self.effects(size).items()}
        best = [max(changes, key=lambda change: gain[change]) for changes in FACTORS.values()]
        return tuple(change for change in best if gain[change] >= GAIN)

    def make_splits(self, changes: Sequence[str], size: int) -> None:
        """Make one trial with all splits."""
        for split in self.given.splits:
            self.make(changes, size, split)

    def make(self, changes: Sequence[str], size: int, split: int) -> None:
        """Make one trial, unless it was made or there is no time, and write all that were made."""
        name, settings = trial_name(changes, size), merged(changes)
        made = self.made.get(name, {})
        if made.get("settings") != settings:
            made = {"changes": list(changes), "settings": settings, "size": size, "splits": {}}
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

        if not self.clock.run(train, name=name, cost=(size / self.given.sizes[0]) ** 2):
            self.failed.append((changes, str(split)))

    def write(self) -> None:
        """Write the file of all trials."""
        effects = self.effects(self.given.sizes[0]) if self.mixtures(self.given.sizes[0]) else {}
        about = {**self.common, "effects": effects, "gains": self.gains()}
        write_json(self.path, {**about, "trials": self.made, **source()})

    def complete(self, size: int) -> dict[str, float]:
        """The mean score of the trials of a size that were made with all splits."""
        wanted = {str(split) for split in self.given.splits}
        return {
            name: sum(made["splits"][split]["score"] for split in wanted) / len(wanted)
            for name, made in self.made.items()
            if made["size"] == size and wanted <= made["splits"].keys()
        }

    def gains(self) -> dict[str, float]:
        """By how much the trials that were made with all splits are above the recipe at the first size; best first."""
        first, *larger = self.given.sizes
        base = self.complete(first).get(trial_name((), first), math.nan)
        found = {name: score - base for size in (first, *larger) for name, score in self.complete(size).items()}
        return {name: round(gain, 3) for name, gain in sorted(found.items(), key=lambda each: each[1], reverse=True)}

    def best(self, size: int) -> str | None:
        """The name of the best trial of a size, among those that were made with all splits."""
        scores = self.complete(size)
        return max(scores, key=lambda name: scores[name], default=None)


def trial_name(changes: Sequence[str], size: int) -> str:
    """Return the name of a trial."""
    return f"{', '.join(changes) or 'paper'} at {size}"


def merged(changes: Sequence[str], *, augment: str = "resized_crop") -> dict[str, Any]:
    """Return the settings of some changes; one of the augmentation may have that of another, or `augment`, inside."""
    found = dict[str, Any]()
    for settings in (FACTORS[kind][change] for kind in FACTORS for change in FACTORS[kind] if change in changes):
        if "augment" in settings:
            settings = {"augment": settings["augment"].format(found.get("augment", augment))}
        found |= settings
    return found


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
    """Measure trials on the test half as far as the time reaches: the best ones of all sizes with all seeds first."""
    ends = time.monotonic() + seconds
    for name in names:
        wanted = [trials.best(size) for size in trials.given.sizes] if name == "best" else [name]
        for missing in [each for each in wanted if each is not None and each not in trials.made]:
            print(f"{missing}: no such trial; there are {', '.join(trials.made)}", flush=True)
        finals = [Final(trials, each) for each in wanted if each in trials.made]
        for seed in seeds:
            for final in finals:
                final.train(seed, ends)


def write_recipe(trials: Trials, name: str, recipe: str) -> None:
    """Write the settings of a trial as a recipe: what differs from the network's defaults, and what was measured."""
    made, paper = trials.made[name], {**dataclasses.asdict(Plan()), **recipes()["paper"].settings}
    network = backbone_row(trials.plan({}, made["size"]).backbone).size
    view = best_view(made)
    known = {"size": network, "lr": paper["lr"], "epochs": paper["epochs"]}
    times = {key: value / known[TIMES_OF[key]] for key, value in made["settings"].items() if key in TIMES_OF}
    times |= {"size": made["size"] / network} if made["size"] != network else {}
    times |= {"test_size": view["size"] / made["size"]} if view["size"] != made["size"] else {}
    changed = merged(made["changes"], augment="{}")  # the network's own augmentation
    settings = {key: value for key, value in changed.items() if key not in TIMES_OF}
    if view["short_side"] != short_side_for(view["size"]):
        settings["test_crop"] = round(view["size"] / view["short_side"], 4)
    lines = [
        f"title = {json.dumps(', '.join(made['changes']) or 'the published plan')}",
        f"source = {json.dumps('chosen on held-out training classes by benchmarks/recipe_trials.py')}",
        f"evidence = {json.dumps(evidence(trials, name))}",
        "",
        "[settings]",
        *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
        "",
        "[times]",
        *(f"{key} = {round(value, 4)}" for key, value in times.items()),
    ]
    path = FOLDER / f"{recipe}.toml"
    write_text(path, "\n".join(lines) + "\n")
    print(f"{name} is now {path}")


def evidence(trials: Trials, name: str) -> str:
    """Say in words what was measured of a trial, on held-out classes and on the test half."""
    gain, size = trials.gains()[name], trials.given.sizes[0]
    data, splits = trials.common["data"], len(trials.given.splits)
    told = [
        f"{data}: held-out training classes, {splits} splits: {gain:+.2f} by the mean of R@1 and MAP@R above the "
        f"published plan at {size} px, each in its best view, in a third of the epochs"
    ]
    for each in dict.fromkeys([name, trial_name((), size)]):
        final = Final(trials, each)
        if final.runs:
            mean = {m: sum(run["scores"][m] for run in final.runs) / len(final.runs) for m in final.runs[0]["scores"]}
            scores = ", ".join(f"{metric} {value:.2f}" for metric, value in mean.items())
            told.append(f"test half, {each}: {scores} (mean of {len(final.runs)} seeds)")
    return "; ".join(told)


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of texts such as lr=0.1: numbers, True or False, else text."""
    return {name: _value(text) for name, _, text in (each.partition("=") for each in texts)}


def _value(text: str) -> Any:
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
    parser.add_argument("--sizes", type=whole_numbers, default=[224, 288], help="the first is that of mixtures")
    parser.add_argument("--splits", type=whole_numbers, default=[4, 2], help="blocks of classes to hold out, 1 to 4")
    parser.add_argument("--final", nargs="+", default=[], metavar="TRIAL", help="measure these on the test half")
    parser.add_argument("--final-seconds", type=float, default=300.0, help="of final trainings")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1, 2], help="of the final trainings")
    parser.add_argument("--suite", help="first choose the test view of this suite, as suite_view.py does")
    parser.add_argument("--suite-epochs", type=int, default=0)
    parser.add_argument("--recipe", help="write a recipe of this name")
    parser.add_argument("--trial", help="that this recipe has the settings of (default: the best)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all trainings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recipes")
    given = parser.parse_args()
    given.set = settings_of(given.set)
    given.out.mkdir(parents=True, exist_ok=True)
    with keep_images_open(3 * len(given.splits)):
        if given.suite and not (out := given.out / f"view_{given.suite}.json").exists():
            how = {"data": given.data, "out": out, "epochs": given.suite_epochs, "device": given.device}
            Clock(math.inf).run(lambda: suite_view(given.suite, **how), name=f"the view of {given.suite}")
        trials = Trials(given, Reporter(Console() if Console().is_terminal else None))
        trials.make_all()
        for name, (gain, error) in trials.effects(given.sizes[0]).items():
            print(f"{gain:+6.2f} ± {error:.2f}  {name}")
        for name, gain in trials.gains().items():
            print(f"{gain:+6.2f}  {name:24} {next(iter(trials.made[name]['splits'].values()))['scores']}")
        measure_finals(trials, given.final, given.seeds, given.final_seconds)
        if given.recipe:
            write_recipe(trials, given.trial or next(iter(trials.gains())), given.recipe)


if __name__ == "__main__":
    main()
