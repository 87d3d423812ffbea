"""Evaluate, then ship: train again on all classes, with the settings of a run that was evaluated."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.files import read_json
from nearkin.methods.catalogue import method
from nearkin.training.chosen_view import view_settings
from nearkin.training.expected import expected_of
from nearkin.training.launch import train_run
from nearkin.training.moved_data import find_data
from nearkin.training.optimiser import plateau_epochs
from nearkin.training.plan import Plan, make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_opening import open_run
from nearkin.training.tracking import Log


def ship(
    run: str | Path,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
    log: Log | None = None,
) -> RunFolder:
    """Train on all classes with the settings of an evaluated run, for as many epochs as it kept.

    The new run, by default in a folder beside the old one, records the scores of the old one as the expected ones; its
    own cannot be measured. To resume it if it was interrupted, use `train(out=…, resume=True)`.
    """
    ranks.join()
    source, reporter = RunFolder(run), (reporter if ranks.is_first() else None) or Reporter()
    expected = expected_of(source)
    settings = shipped_settings(source, data=data) | {"device": device}
    out = out or source.path.with_name(f"{source.path.resolve().name}-shipped")
    with open_run(out, resume=False, settings=settings, reporter=reporter) as (shipped, plan, dataset):
        if plan.needs_held_out:
            reporter.note(
                f"{plan.method} needs the score of held-out classes while it trains, so {plan.held_out:.0%} of the "
                "classes are held out again, and the best epoch on them is kept."
            )
        train_run(shipped, plan, dataset, resume=False, reporter=reporter, log=log, expected=expected)
    return shipped


def shipped_settings(source: RunFolder, *, data: str | None = None) -> dict[str, Any]:
    """Return the settings with which a run is trained again on all classes."""
    first = (source.parts() or [source])[0]
    config, result = read_json(source.config), read_json(source.result)
    fields = {field.name for field in dataclasses.fields(Plan)} - {"device", "precision"}
    settings = {name: value for name, value in config["plan"].items() if name in fields}
    settings |= {"metrics": tuple(settings["metrics"]), "data": data or find_data(source), "test": "none"}
    settings |= {"folds": 0, "fold": 0, "snapshots": "", "evaluate_every": 0}
    if chosen := result.get("test_view"):
        settings |= view_settings(chosen)
    if method(settings["method"], classes=2, dim=2, space=settings["space"] or None).needs_score:
        return settings | {"select": "validation"}
    settings |= {"select": "last", "patience": 0, "stop_after": math.ceil(result["kept_epoch"])}
    if settings["schedule"] == "plateau":  # without held-out classes the same steps are taken at the same epochs
        settings |= {"schedule": "step", "decay_at": ",".join(map(str, _plateaus(first)))}
    return settings


def _plateaus(run: RunFolder) -> list[int]:
    config = read_json(run.config)
    scores = [event["score"] for event in run.events() if event["event"] == "check"]
    steps = {name: config["resolved"][name] for name in ("steps_per_epoch", "check_every")}
    return plateau_epochs(make_plan(config["plan"], {}), scores, **steps)
