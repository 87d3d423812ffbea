"""Repeated cross-validation: the models of all folds, trained with several seeds, and the mean of their scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import Summary, summary
from nearkin.files import read_json, write_json
from nearkin.training.launch import train, train_run
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric
from nearkin.training.run_opening import open_run

METRICS = ("P@1", "P@R", "MAP@R")
REPEATS = "repeats.json"


class Repeats(NamedTuple):
    """The results of a repeated cross-validation."""

    runs: list[RunFolder]  # one per repeat, each with one part per fold
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
    """Train `folds` models (default 4), `repeats` times with consecutive seeds.

    Settings are the fields of `Plan`. The first repeat is in `out` itself, the others in folders below it. With
    `resume` the settings are those of the folder, finished models are kept, and `repeats` may be larger than before.
    `repeats` defaults to 1, or to the number the folder was started with.
    """
    if repeats is not None and repeats < 1:
        raise NearkinError(f"repeats must be at least 1, not {repeats}.")
    if settings.get("fold"):
        raise NearkinError("A cross-validation trains all folds: leave out fold.")
    if resume and out is not None and not RunFolder(out).parts():
        raise NearkinError(f"{out} is not a cross-validation: resume it with nearkin train --resume.")
    ranks.join()
    reporter = (reporter if ranks.is_first() else None) or Reporter()
    chosen = settings if resume else {"metrics": METRICS, **settings, "folds": settings.get("folds") or 4}
    wanted = repeats or (_started_repeats(out) if resume and out is not None else 1)
    with open_run(out, resume=resume, settings=chosen, reporter=reporter) as (run, plan, data):
        if ranks.is_first():
            write_json(run.path / REPEATS, {"repeats": wanted})  # needed to resume
        try:
            train_run(run, plan, data, resume=resume, reporter=reporter)
        except NearkinError:
            if ranks.is_first() and not run.config.exists():  # settings that cannot work leave no run behind
                (run.path / REPEATS).unlink()
            raise
        runs = [run, *(_repeat(run, number, reporter) for number in range(2, wanted + 1))]
        ranks.barrier()  # others read the files
        results = [each.read_result() for each in runs]
        scores = {name: summary([r["scores"][name] for r in results]) for name in results[0]["scores"]}
        done = Repeats(runs, scores, summary([r["steps"] for r in results]))
        shown = {name: {"mean": of.mean, "error": of.error if of.n > 1 else None} for name, of in scores.items()}
        if ranks.is_first():
            write_json(run.path / REPEATS, {"repeats": wanted, "scores": shown, "steps": done.steps.mean})
    return done


def _repeat(run: RunFolder, number: int, reporter: Reporter) -> RunFolder:
    """Train a repeat with a seed of its own, or resume it."""
    reporter.note(f"Repeat {number}")
    folder = RunFolder(run.path / f"repeat-{number}")
    plan = read_json(run.config)["plan"]
    settings = {} if folder.config.exists() else {**plan, "seed": plan["seed"] + number - 1}
    return train(out=folder.path, resume=not settings, reporter=reporter, **settings)


def _started_repeats(out: str | Path) -> int:
    """Return the number of repeats a folder was started with."""
    file = Path(out) / REPEATS
    return int(read_json(file, needs={"repeats": int})["repeats"]) if file.exists() else 1


def score_rows(done: Repeats) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of a table: the models alone, and joined."""
    config = read_json(done.runs[0].config)
    dim, folds = config["plan"]["dim"], len(config["parts"])
    metrics = [name for name in done.scores if RunMetric.parse(name).plain]

    def cell(name: str) -> str:
        found = done.scores[name]
        return f"{found.mean:.2f}" if found.n < 2 else f"{found.mean:.2f} ± {found.error:.2f}"

    alone = [f"mean of {folds} models, {dim}-d", *map(cell, metrics)]
    joint = [f"side by side, {dim * folds}-d", *(cell(str(RunMetric(name, dim * folds))) for name in metrics)]
    return ["", *metrics], [alone, joint]
