"""Recipes are data: settings that a user asks for by name, and that every explicit setting overrides."""

import dataclasses

import pytest
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.files import read_json
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import backbone_settings
from nearkin.training.plan import Plan, make_plan
from nearkin.training.recipes import FOLDER, TIMES_OF, recipes

TINY = {"data": "glyphs(classes=12, samples=4)", "batch": 8, "dim": 4, "epochs": 0, "device": "cpu"}


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_has_evidence_and_settings_that_a_plan_takes(name):
    recipe = recipes()[name]
    assert recipe.title
    assert recipe.source
    assert recipe.evidence
    assert recipe.times.keys() <= TIMES_OF.keys()
    for backbone in ("conv4", "lite0"):
        plan = make_plan({"recipe": name, "device": "cpu"}, {"backbone": backbone, **backbone_settings(backbone)})
        wanted = {key: value for key, value in recipe.settings.items() if key != "augment" or "{" not in value}
        assert {key: getattr(plan, key) for key in wanted} == wanted
    assert (FOLDER / f"{name}.toml").exists()


def test_the_paper_is_what_a_plan_without_settings_is():
    settings, plan = dict(recipes()["paper"].settings), dataclasses.asdict(Plan())
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


def test_multiples_follow_the_network_and_what_the_user_sets(tmp_path, monkeypatch):
    text = """
title = "t"
source = "s"
evidence = "e"
[settings]
schedule = "constant"
average = 1.0
augment = "erase({})"
[times]
size = 1.3
test_size = 1.15
lr = 2.0
head_lr = 10.0
average_from = 0.5
"""
    (tmp_path / "made.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr("nearkin.training.recipes.FOLDER", tmp_path)

    def found(backbone, **more):
        defaults = {"backbone": backbone, **backbone_settings(backbone)}
        plan = make_plan({"recipe": "made", "device": "cpu", **more}, defaults)
        assert plan.augment == f"erase({defaults.get('augment', 'resized_crop')})"
        return plan.size, plan.test_size, plan.lr, plan.head_lr, plan.average_from

    assert found("lite0") == (288, 320, 2e-4, pytest.approx(2e-3), 30)
    assert found("conv4") == (40, 48, 6e-3, pytest.approx(6e-2), 20)
    assert found("lite0", size=224, lr=0.1, epochs=10) == (224, 256, 0.1, pytest.approx(1.0), 5)
    assert found("lite0", test_size=300, head_lr=0.3)[1::2] == (300, 0.3)
    assert found("lite0", test_view="auto")[1] == 0
    again = dataclasses.asdict(make_plan({"recipe": "made", "device": "cpu"}, {}))
    assert dataclasses.asdict(make_plan(again, {})) == again


def test_recipes_are_listed_with_their_evidence():
    said = " ".join(CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "250"}).output.split())
    assert "paper" in said
    assert "nothing in it was selected here" in said
