"""TODO."""

import dataclasses
from pathlib import Path
from typing import Any

from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.files import read_json, write_json
from nearkin.networks.backbones import natural_plan
from nearkin.training.loop import Training
from nearkin.training.plan import Plan, make_plan
from nearkin.training.run_folder import RunFolder


def train(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    **settings: Any,
) -> RunFolder:
    """Train a model into a run folder and measure it on unseen classes. Settings are the fields of `Plan`.

    Within `keep_images_open()` trainings on the same images read them once.
    """
    run, plan = _open_run(out, resume, settings)
    if run.result.exists():
        return run
    if plan.folds and not plan.fold:
        from nearkin.training.cross_validation import train_folds  # here, since it is built on this module

        return train_folds(run, plan, reporter=reporter or Reporter())
    training = Training(plan, run, reporter or Reporter())
    training._batches()  # refuses impossible batches before anything is written
    write_json(
        run.config,
        {
            "plan": dataclasses.asdict(plan),
            "method": str(training.method.spec),
            "space": training.method.ranked_in,
            "resolved": training.resolved(),
        },
    )
    training.restore()
    training.go()
    return run


def _open_run(out: str | Path | None, resume: bool, settings: dict[str, Any]) -> tuple[RunFolder, Plan]:
    if resume:
        if out is None:
            raise NearkinError("Say which run to resume: --resume --out runs/NAME.")
        if settings:
            raise NearkinError(f"A resumed run has its own settings; leave out {', '.join(sorted(settings))}.")
        run = RunFolder(out)
        return run, make_plan(read_json(run.config)["plan"], {})
    plan = make_plan(settings, natural_plan(settings.get("backbone", Plan.backbone)))
    run = RunFolder(out or _free_folder(plan))
    if run.config.exists():
        raise NearkinError(f"{run.path} holds a run already: choose another --out, or go on with it by --resume.")
    return run, plan


def _free_folder(plan: Plan) -> Path:
    name = f"{plan.data.split(':')[0].split('(')[0]}-{plan.method.split('(')[0]}-{plan.backbone}-{plan.seed}"
    number = 1
    while (path := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
