"""Recipes: named sets of settings with the evidence for them. Each is one TOML file in this folder.

`title` says what it is, `source` where it comes from, `evidence` what was measured to choose it. `[settings]` are
fields of `Plan`. `[times]` are fields, too, as multiples of what the run has otherwise, so that a recipe found with one
network fits another: `size` of that of the network, `test_size` of `size`, rates of `lr`, and numbers of epochs of
`epochs`. `{}` in `augment` stands for the augmentation of the network. What the user sets is preferred to a recipe, and
a recipe to the defaults of the network.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.data.pixels.views import round_side
from nearkin.networks.backbones import backbone_row
from nearkin.spec import look_up

FOLDER = Path(__file__).parent

TIMES_OF = {
    "size": "size",
    "test_size": "size",
    "lr": "lr",
    "head_lr": "lr",
    "average_from": "epochs",
    "ramp": "epochs",
    "decay_every": "epochs",
}
"""What may stand below `[times]`, and of which setting it is a multiple."""


class Recipe(NamedTuple):
    """A named set of settings."""

    name: str
    title: str
    source: str
    evidence: str
    settings: dict[str, Any]
    times: dict[str, float]


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.toml"))}


def recipe_settings(name: str, *, given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe for a run with the settings `given`; `usual` are those it has without either."""
    recipe = look_up(name, recipes(), what="recipe")
    found = dict(recipe.settings)
    if "augment" in found:
        found["augment"] = found["augment"].format(usual["augment"])
    for setting, of in TIMES_OF.items():  # in this order: test_size is a multiple of the size found here
        if setting in recipe.times and setting not in given:
            known = {**usual, **found, **given}
            found[setting] = _multiple(setting, recipe.times[setting], known[of], known["backbone"])
    chosen_later = ("test_size", "test_crop") if given.get("test_view") == "auto" else ()
    return {name: value for name, value in found.items() if name not in chosen_later}


def _multiple(setting: str, factor: float, value: Any, backbone: str) -> Any:
    if TIMES_OF[setting] == "size":
        return round_side(value or backbone_row(backbone).size, factor)
    return round(factor * value) if TIMES_OF[setting] == "epochs" else factor * value


def _read(path: Path) -> Recipe:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return Recipe(name=path.stem, **{"settings": {}, "times": {}, **content})
