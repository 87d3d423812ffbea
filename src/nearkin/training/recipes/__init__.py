"""Recipes: named sets of settings with the evidence for them. Each is one TOML file in this folder.

`title` says what it is, `source` where it comes from, `evidence` what was measured to choose it, and `[settings]` are
fields of `Plan`. What the user sets is preferred to a recipe.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.spec import look_up
from nearkin.training.plan import check_names

FOLDER = Path(__file__).parent


class Recipe(NamedTuple):
    """A named set of settings."""

    name: str
    title: str
    source: str
    evidence: str
    settings: dict[str, Any]


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.toml"))}


def recipe_settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe."""
    return dict(look_up(name, recipes(), what="recipe").settings)


def _read(path: Path) -> Recipe:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    check_names(content["settings"])
    return Recipe(path.stem, content["title"], content["source"], content["evidence"], content["settings"])
