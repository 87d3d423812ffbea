"""The folder of a run that begins or resumes: made or found, checked, locked while one works in it."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.data.images import Dataset
from nearkin.errors import NearkinError
from nearkin.files import LOCK, read_json, write_lock
from nearkin.training.defaults import fit_plan
from nearkin.training.images import plan_dataset
from nearkin.training.more_epochs import add_epochs
from nearkin.training.moved_data import find_data
from nearkin.training.plan import Plan, make_plan, resolve_device
from nearkin.training.run_folder import RunFolder
from nearkin.training.start import with_start


class Interrupted(KeyboardInterrupt):
    """An interrupt during a run, with the run's folder; None if nothing was written yet."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder


MAY_CHANGE = {"data", "device", "epochs"}
"""Settings that a run may resume with: its data or its device have moved, or it is to train longer."""


@contextmanager
def open_run(
    out: str | Path | None, *, resume: bool, settings: Mapping[str, Any], reporter: Reporter
) -> Iterator[tuple[RunFolder, Plan, Dataset | None]]:
    """Make or find the folder of a run, and hold its lock while one works in it.

    A folder in which nothing could be started is removed again. An interrupt is raised as `Interrupted`. A new run's
    data set is returned, since its defaults depend on it.
    """
    folders: list[RunFolder] = []
    try:
        with contextlib.ExitStack() as opened:
            data: Dataset | None = None

            def open_folder() -> tuple[Path, Plan]:
                nonlocal data
                folder = _open_folder(out, resume=resume, settings=settings, reporter=reporter)
                run, plan, data = opened.enter_context(folder)
                return run.path, plan

            path, plan = ranks.on_first(open_folder)  # the others load the data themselves
            folders.append(RunFolder(path))
            yield folders[0], with_own_device(plan), data
            ranks.barrier()  # the folder is complete
    except KeyboardInterrupt as interrupt:
        started = [run.path for run in folders if run.config.exists()]
        raise Interrupted(started[0] if started else None) from interrupt


@contextmanager
def _open_folder(
    out: str | Path | None, *, resume: bool, settings: Mapping[str, Any], reporter: Reporter
) -> Iterator[tuple[RunFolder, Plan, Dataset | None]]:
    if resume:
        if out is None:
            raise NearkinError("Say which run to resume: --resume --out runs/NAME.")
        if fixed := sorted(settings.keys() - MAY_CHANGE):
            raise NearkinError(f"A resumed run has its own settings; leave out {', '.join(fixed)}.")
        run = RunFolder(out)
        if read_json(run.config, needs={"plan": dict}).get("saved"):
            raise NearkinError(f"{run.path} was written by Model.save: there is no training to resume; use --from.")
        with write_lock(run.path):
            if "epochs" in settings:
                add_epochs(run, settings["epochs"], reporter)
            yield run, _resumed_plan(run, settings), None
        return
    settings = with_start(settings)
    # Refuse wrong settings before the data are read; which snapshots there can be depends on the backbone's epochs.
    asked = make_plan({name: value for name, value in settings.items() if name != "snapshots"}, {})
    data = plan_dataset(asked)
    plan, notes = fit_plan(settings, data)
    for sentence in notes:
        reporter.note(sentence)
    run = RunFolder(out if out is not None else _make_folder(plan))
    made = out is None or not run.path.exists()
    run.path.mkdir(parents=True, exist_ok=True)
    with write_lock(run.path):
        _check_empty(run)
        try:
            yield run, plan, data
        finally:
            if not run.config.exists():
                (run.path / LOCK).unlink()
                if made:
                    run.path.rmdir()


def with_own_device(plan: Plan) -> Plan:
    """The plan of rank 0 with the device of this one."""
    return plan if ranks.is_first() else dataclasses.replace(plan, device=str(resolve_device(plan.device)))


def _resumed_plan(run: RunFolder, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of a run that resumes, perhaps with other epochs, or where its data or its device are now."""
    plan = make_plan({**read_json(run.config)["plan"], **settings}, {})
    if "data" not in settings and not run.result.exists():
        plan = dataclasses.replace(plan, data=find_data(run))
    return plan


def _check_empty(run: RunFolder) -> None:
    if run.config.exists():
        raise NearkinError(f"{run.path} already holds a run: choose another --out, or continue it with --resume.")
    if found := run.leftovers():
        raise NearkinError(
            f"{run.path} holds files of another run ({', '.join(found)}) without its config.json: "
            "remove them, or choose another --out."
        )


def _make_folder(plan: Plan) -> Path:
    """Make a new folder below runs/; of two processes that start together, each gets its own."""
    backbone = plan.backbone.replace(":", "-")
    name = f"{plan.data.split(':')[0].split('(')[0]}-{plan.method.split('(')[0]}-{backbone}-{plan.seed}"
    for number in itertools.count(1):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path
