"""Add epochs to a run, so that it resumes where it ended."""

from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.files import read_json, write_json
from nearkin.training.optimiser import lr_factor
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder


def add_epochs(run: RunFolder, epochs: int, reporter: Reporter) -> None:
    """Let a run train until this number of epochs, all counted; a finished run becomes an unfinished one."""
    config = read_json(run.config)
    plan, new = (make_plan(config["plan"] | more, {}) for more in ({}, {"epochs": epochs}))
    if epochs == plan.epochs:
        return
    instead = f"train on from its network with --from {run.path}"
    if epochs < plan.epochs:
        raise NearkinError(f"{run.path} trains {plan.epochs} epochs already: --epochs must be more than that.")
    if run.parts() or plan.stop_after:
        what = "is several models" if run.parts() else f"stops after {plan.stop_after} epochs (--stop-after)"
        raise NearkinError(f"{run.path} {what}, so no epochs can be added: {instead}.")
    if run.result.exists():
        if not run.checkpoint.exists():
            raise NearkinError(f"{run.path} has no checkpoint any more, so no epochs can be added: {instead}.")
        if run.read_result()["steps"] < plan.epochs * config["resolved"]["steps_per_epoch"]:
            raise NearkinError(f"{run.path} stopped early for lack of progress (--patience): {instead}.")
    before, after = (lr_factor(each, max(plan.epochs - 1, 0)) for each in (plan, new))
    if before != after:
        reporter.note(
            f"The learning rate depends on the number of epochs: that of epoch {plan.epochs} was {before:.3g} of the "
            f"initial one; from the start with {epochs} epochs it would have been {after:.3g}."
        )
    run.result.unlink(missing_ok=True)  # first: a run without a result is always resumed
    write_json(run.config, config | {"plan": config["plan"] | {"epochs": epochs}})
