"""The settings of a run in its folder: config.json for nearkin, settings.toml to repeat the run."""

import dataclasses
from typing import Any

from nearkin.files import write_json
from nearkin.networks.backbones import OWN
from nearkin.training.moved_data import data_places
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.settings_file import write_settings


def write_config(run: RunFolder, plan: Plan, *, method: str, space: str, **more: Any) -> None:
    """Write the settings of a run; from then on its folder is a run that can be resumed."""
    about = {"plan": dataclasses.asdict(plan), "method": method, "space": space, **more}
    if places := data_places(run, plan.data):
        about["data_places"] = places
    if plan.backbone.startswith(OWN):
        about["not_in_this_folder"] = (
            f"The network is a module of its user, {plan.backbone.removeprefix(OWN)}; its weights are here, its code "
            "is not: load the run with nearkin.load(run, backbone=module)."
        )
    write_json(run.config, about)
    write_settings(run.settings, plan)


def remove_config(run: RunFolder) -> None:
    """Remove the settings of a run that could not start."""
    run.config.unlink()
    run.settings.unlink(missing_ok=True)
