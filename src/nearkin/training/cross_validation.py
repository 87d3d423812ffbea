"""Cross-validation over classes: models that each hold out another block of the training classes, measured as one too.

The protocol of Musgrave, Belongie, Lim: A Metric Learning Reality Check (ECCV 2020), as CCP uses it: the classes of the
training half in n contiguous blocks; model i trains on all but block i, whose MAP@R chooses its epoch; all are tested
on the classes of the other half. The folder is a run folder like any other, whose scores are of two kinds:

    "MAP@R"         the mean of the scores of the n models
    "MAP@R 512-d"   the score of their embeddings side by side
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import Summary, summary
from nearkin.files import Json, provenance, read_json, write_json
from nearkin.methods.build import method
from nearkin.training.launch import train
from nearkin.training.measure_run import joint_name, measure_run
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder

METRICS = ("P@1", "P@R", "MAP@R")
REPEATS = "repeats.json"


class Repeats(NamedTuple):
    """What the repeats of a cross-validation came to."""

    runs: list[RunFolder]  # one a repeat, each with a part a fold
    scores: Mapping[str, Summary]  # metric → over the repeats
    steps: Summary  # of one model


@keep_images_open()
def cross_validate(
    *,
    out: str | Path | None = None,
    repeats: int | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Repeats:
    """Train `folds` models (4 where nothing is said), `repeats` times with seeds that follow each other.

    Settings are the fields of `Plan`. The first repeat's folder is `out` itself, the others lie in it. What is finished
    is not made again: with `resume` the settings are those of the folder, and there may be more repeats than before.
    Where nothing is said of `repeats`, it is made once, or as often as the folder was to hold.
    """
    if repeats is not None and repeats < 1:
        raise NearkinError(f"A cross-validation is made once at least, not {repeats} times.")
    if settings.get("fold"):
        raise NearkinError("A cross-validation trains all folds: leave fold out.")
    if resume and out is not None and not RunFolder(out).parts():
        raise NearkinError(f"{out} is no cross-validation: go on with it by nearkin train --resume.")
    reporter = reporter or Reporter()
    given = settings if resume else {"metrics": METRICS, **settings, "folds": settings.get("folds") or 4}
    wanted = repeats or (_asked_before(out) if resume and out is not None else 1)
    if out is not None and (resume or not RunFolder(out).config.exists()):
        write_json(Path(out) / REPEATS, {"repeats": wanted})  # a resumed command has to know
    try:
        runs = [train(out=out, resume=resume, reporter=reporter, **given)]
    except NearkinError:
        if out is not None and not RunFolder(out).config.exists():  # settings that cannot work leave no run behind
            (Path(out) / REPEATS).unlink()
            with contextlib.suppress(OSError):  # it holds something else
                Path(out).rmdir()
        raise
    plan = read_json(runs[0].config)["plan"]
    for number in range(2, wanted + 1):
        reporter.note(f"Repeat {number} of {wanted}")
        folder = RunFolder(runs[0].path / f"repeat-{number}")
        again = {} if folder.config.exists() else {**plan, "seed": plan["seed"] + number - 1}
        runs.append(train(out=folder.path, resume=not again, reporter=reporter, **again))
    results = [read_json(run.result) for run in runs]
    scores = {name: summary([r["scores"][name] for r in results]) for name in results[0]["scores"]}
    done = Repeats(runs, scores, summary([r["steps"] for r in results]))
    shown = {name: {"mean": of.mean, "error": of.error if of.n > 1 else None} for name, of in scores.items()}
    write_json(runs[0].path / REPEATS, {"repeats": wanted, "scores": shown, "steps": done.steps.mean})
    return done


def _asked_before(out: str | Path) -> int:
    """How many repeats a folder was to hold."""
    file = Path(out) / REPEATS
    return int(read_json(file)["repeats"]) if file.exists() else 1


def score_rows(done: Repeats) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table: the models by themselves, and all of them as one."""
    config = read_json(done.runs[0].config)
    dim, folds = config["plan"]["dim"], len(config["parts"])
    metrics = [name for name in done.scores if " " not in name]

    def cell(name: str) -> str:
        found = done.scores[name]
        return f"{found.mean:.2f}" if found.n < 2 else f"{found.mean:.2f} ± {found.error:.2f}"

    alone = [f"mean of {folds} models, {dim}-d", *map(cell, metrics)]
    joint = [f"side by side, {dim * folds}-d", *(cell(joint_name(name, dim * folds)) for name in metrics)]
    return ["", *metrics], [alone, joint]


def train_folds(run: RunFolder, plan: Plan, *, reporter: Reporter) -> RunFolder:
    """Train the models of all folds into the parts of a run folder, each once, and measure them."""
    parts = [RunFolder(run.path / f"fold-{number}") for number in range(1, plan.folds + 1)]
    known = method(plan.method, classes=2, dim=plan.dim, space=plan.space or None)
    write_json(
        run.config,
        {
            "plan": dataclasses.asdict(plan),
            "method": str(known.spec),
            "space": known.ranked_in,
            "parts": [part.path.name for part in parts],
        },
    )
    try:
        for number, part in enumerate(parts, start=1):
            reporter.note(f"Fold {number} of {plan.folds}")
            _train_part(part, dataclasses.replace(plan, fold=number), reporter)
    except NearkinError:
        if not parts[0].config.exists():
            run.config.unlink()  # settings that cannot work leave no run behind
        raise
    results = [read_json(part.result) for part in parts]
    joint = measure_run(
        run.path,
        metrics=tuple(joint_name(metric, plan.dim * plan.folds) for metric in plan.metrics),
        device=plan.device,
        reporter=reporter,
    )
    write_json(run.result, _together(results, joint, plan))
    return run


def _train_part(part: RunFolder, plan: Plan, reporter: Reporter) -> None:
    """Train one fold, go on with it, or leave it where it is finished."""
    settings = dataclasses.asdict(plan)
    if not part.config.exists():
        train(out=part.path, reporter=reporter, **settings)
    elif not part.result.exists():
        write_json(part.config, read_json(part.config) | {"plan": settings})  # data and device may be elsewhere now
        train(out=part.path, resume=True, reporter=reporter)
    part.checkpoint.unlink(missing_ok=True)  # three times the size of the model, and of no more use


def _together(results: Sequence[Json], joint: Mapping[str, float], plan: Plan) -> Json:
    """The result of a run of folds, in the form that every run's has."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    def scores(which: str) -> dict[str, float]:
        return {name: mean([result[which][name] for result in results]) for name in results[0][which]}

    first, speeds = results[0], [r["images_per_second"] for r in results if r["images_per_second"]]
    own = ("scores", "kept_epoch", "held_out", "steps", "seconds")
    return {
        "scores": scores("scores") | dict(joint),
        "before": scores("before"),
        **{name: first[name] for name in ("queries", "left_out", "unreadable", "select", "method")},
        "kept_epoch": mean([result["kept_epoch"] for result in results]),
        **({"held_out": mean([result["held_out"] for result in results])} if "held_out" in first else {}),
        "seed": plan.seed,
        "steps": round(mean([result["steps"] for result in results])),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "images_per_second": round(mean(speeds), 1) if speeds else None,
        "folds": [{name: result[name] for name in own if name in result} for result in results],
        **provenance(),
    }
