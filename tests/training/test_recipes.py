"""Recipes are data: settings that a user asks for by name, and that every explicit setting overrides."""

import dataclasses

import pytest
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.files import read_json
from nearkin.methods.catalogue import method
from nearkin.training.plan import Plan, make_plan
from nearkin.training.recipes import FOLDER, recipe_settings, recipes

TINY = {"data": "glyphs(classes=12, samples=4)", "batch": 8, "dim": 4, "epochs": 0, "device": "cpu"}


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_has_evidence_and_settings_that_a_plan_takes(name):
    recipe = recipes()[name]
    assert recipe.title
    assert recipe.source
    assert recipe.evidence
    make_plan({**recipe.settings, "device": "cpu"}, {})
    assert (FOLDER / f"{name}.toml").exists()


def test_the_paper_is_what_a_plan_without_settings_is():
    settings, plan = recipe_settings("paper"), dataclasses.asdict(Plan())
    specs = [str(method(spec, classes=2, dim=2).spec) for spec in (settings.pop("method"), plan["method"])]
    assert specs[0] == specs[1]
    assert settings.pop("images_per_class") == method("proxy_anchor", classes=2, dim=2).images_per_class
    assert settings == {name: plan[name] for name in settings}


def test_flags_win_over_a_recipe_and_without_one_nothing_changes(tmp_path):
    flags = ["--batch", "8", "--dim", "4", "--epochs", "0", "--device", "cpu", "--data", TINY["data"]]
    for name, more in (("plain", []), ("recipe", ["--recipe", "paper", "--lr", "0.5"])):
        done = CliRunner().invoke(app, ["train", *flags, *more, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    plain, recipe = (read_json(tmp_path / name / "config.json")["plan"] for name in ("plain", "recipe"))
    assert (plain["augment"], plain["lr"], plain["schedule"]) == ("affine", 3e-3, "cosine")  # those of conv4
    assert (recipe["augment"], recipe["lr"], recipe["schedule"]) == ("resized_crop", 0.5, "step")
    assert (recipe["batch"], recipe["dim"], recipe["epochs"]) == (8, 4, 0)


def test_a_wrong_recipe_is_refused_and_a_resumed_run_takes_none(tmp_path):
    with pytest.raises(nk.NearkinError, match="Did you mean 'paper'"):
        nk.train(**TINY, recipe="papers", out=tmp_path / "run")
    with pytest.raises(nk.NearkinError, match="leave out recipe"):
        nk.train(resume=True, recipe="paper", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recipes_are_listed_with_their_evidence():
    said = " ".join(CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "250"}).output.split())
    assert "paper" in said
    assert "nothing in it was selected here" in said
