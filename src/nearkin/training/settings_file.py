"""The settings of a run as a TOML file: written into every run folder, read with --config."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from nearkin.data.datasets import at_path, path_of
from nearkin.errors import NearkinError
from nearkin.files import atomic_file
from nearkin.training.plan import Plan, check_names, make_plan


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read settings of a plan from a TOML file, for `train`; relative paths in it start from its folder."""
    path = Path(path)
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NearkinError(f"There is no file {path}: --config takes a TOML file of settings.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NearkinError(f"Cannot read {path} ({error}): write one name = value per line, in TOML.") from None
    try:
        check_names(settings)
    except NearkinError as error:
        raise NearkinError(f"{path}: {error}") from None
    if isinstance(metrics := settings.get("metrics"), list):
        settings["metrics"] = tuple(metrics)
    if isinstance(data := settings.get("data"), str) and (place := path_of(data)) is not None:
        settings["data"] = at_path(data, path.parent / place)
    for name in ("weights", "start"):
        if isinstance(value := settings.get(name), str) and (path.parent / value).exists() and value:
            settings[name] = str(path.parent / value)
    return settings


def write_settings(path: Path, plan: Plan) -> None:
    """Write all settings of a plan, with absolute paths, so that the file repeats the run from anywhere."""
    lines = ["# All settings of a run. To repeat it: nearkin train --config THIS_FILE --out NEW_FOLDER"]
    automatic = make_plan({"device": plan.device}, {}).precision
    of_this_machine = ["device", *(["precision"] if plan.precision == automatic else [])]  # chosen where it is used
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name == "data" and (place := path_of(value)) is not None:
            value = at_path(value, place.absolute())
        if field.name in of_this_machine:
            continue
        line = f"{field.name} = {_toml(value)}"
        try:
            line.encode()
        except UnicodeEncodeError:
            line = f"# {field.name} is not UTF-8 and cannot stand here: give it as a flag."
        lines.append(line)
    with atomic_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    """Return a value as TOML: JSON is TOML for numbers, words and lists, but for the character 127."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
