"""Evaluate, then ship: the same settings on all classes, with the evaluated run's scores as the expected ones."""

import io
import sys

import pytest
import torch
from made import make_images
from rich.console import Console

import nearkin as nk
from nearkin.cli import main
from nearkin.console import Reporter
from nearkin.files import read_json, read_tensors, write_json
from nearkin.report.comparison import run_facts
from nearkin.report.measured_runs import open_runs
from nearkin.training.cross_validation import cross_validate
from nearkin.training.run_folder import RunFolder
from nearkin.training.ship import ship, shipped_settings

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "device": "cpu", "metrics": ("R@1", "MAP@R")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ship")
    make_images(folder / "photos", classes=8, each=4)
    return folder


@pytest.fixture(scope="module")
def evaluated(place):
    """A run that keeps an epoch before the last, after its learning rate was lowered at plateaus."""
    settings = {"select": "validation", "held_out": 0.5, "schedule": "plateau", "decay_every": 1, "check_every": 1}
    return nk.train(data=f"folder:{place / 'photos'}", out=place / "run", epochs=4, lr=0.02, **settings, **TINY)


@pytest.fixture(scope="module")
def shipped(evaluated):
    return ship(evaluated.path, device="cpu")


def rates(run: RunFolder) -> list[float]:
    return [event["lr"] for event in run.events() if event["event"] == "epoch"]


def test_all_classes_train_with_the_same_settings_and_learning_rates(evaluated, shipped):
    before, after = (read_json(run.config) for run in (evaluated, shipped))
    assert shipped.path.name == "run-shipped"
    assert (before["resolved"]["training_classes"], after["resolved"]["training_classes"]) == (2, 8)
    changed = {name for name, value in after["plan"].items() if before["plan"][name] != value}
    assert changed <= {"test", "select", "schedule", "decay_at", "stop_after"}
    kept = read_json(evaluated.result)["kept_epoch"]
    assert kept < 4, "otherwise this tests nothing"
    assert len(set(rates(evaluated))) > 1, "otherwise this tests nothing"
    assert rates(shipped) == rates(evaluated)[: -int(-kept // 1)]
    assert len(nk.load(shipped.path).names) == 8


def test_the_scores_are_recorded_as_expected_and_not_as_its_own(evaluated, shipped):
    own, other = read_json(shipped.result), read_json(evaluated.result)
    assert own["scores"] == {}
    assert own["expected"]["scores"] == other["scores"]
    assert own["expected"]["run"] == "run"
    assert own["expected"]["training_classes"] == 2
    with pytest.raises(nk.NearkinError, match="no scores of its own"):
        ship(shipped.path)


def test_a_report_names_the_expected_scores(shipped, place):
    make_images(place / "others", classes=4, each=4, seed=7)
    (measured,) = open_runs([shipped.path], data=f"folder:{place / 'others'}", device="cpu")
    facts = dict(run_facts(measured))
    assert "not measured on this model" in facts["expected scores"]
    assert facts["queries"] == "8"


def test_an_interrupted_ship_resumes_bit_for_bit(evaluated, shipped, place):
    training = sys.modules["nearkin.training.loop"].Training
    step, done = training._one_step, []

    def one_step(self, *batch):
        done.append(1)
        if len(done) > 3:
            raise KeyboardInterrupt
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_one_step", one_step)
        patch.setattr(sys.modules["nearkin.training.loop"], "SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            ship(evaluated.path, out=place / "cut", device="cpu")
    resumed = nk.train(out=place / "cut", resume=True)
    a, b = (read_tensors(run.model)[0] for run in (shipped, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert read_json(resumed.result)["expected"] == read_json(shipped.result)["expected"]


def test_the_command_prints_whose_scores_they_are(evaluated, place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nearkin", "ship", str(evaluated.path), "--out", str(place / "by-command")])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "Expected, not measured on this model, which trained on all classes: the scores of the run run" in printed
    assert f"expected, of run  {read_json(evaluated.result)['scores']['R@1']:.1f}" in printed
    assert "no score could be measured" in printed


def test_a_cross_validation_ships_one_model(place):
    runs = cross_validate(data=f"folder:{place / 'photos'}", out=place / "cv", folds=2, epochs=1, **TINY).runs
    one = ship(runs[0].path, device="cpu")
    expected = read_json(one.result)["expected"]
    assert set(expected["scores"]) == {"R@1", "MAP@R"}, "without the scores of the joint models"
    assert (expected["training_classes"], read_json(one.config)["resolved"]["training_classes"]) == (2, 8)
    assert nk.load(one.path).embedder.dim == 4


def test_a_method_that_needs_held_out_classes_keeps_some(evaluated, tmp_path):
    run = RunFolder(tmp_path)
    config = read_json(evaluated.config)
    write_json(run.config, config | {"plan": config["plan"] | {"method": "ccp(contrastive)"}})
    write_json(run.result, read_json(evaluated.result))
    settings = shipped_settings(run)
    assert (settings["test"], settings["select"], settings["schedule"]) == ("none", "validation", "plateau")
    assert settings["stop_after"] == 0


def test_only_finished_runs_ship(evaluated, tmp_path):
    write_json(RunFolder(tmp_path).config, read_json(evaluated.config))
    with pytest.raises(nk.NearkinError, match="is not finished"):
        ship(tmp_path)


def test_a_chosen_test_epoch_is_named(evaluated, tmp_path):
    run = RunFolder(tmp_path)
    write_json(run.config, read_json(evaluated.config))
    write_json(run.result, read_json(evaluated.result) | {"select": "test"})
    said = io.StringIO()
    one = ship(run.path, out=tmp_path / "all", device="cpu", reporter=Reporter(Console(file=said)))
    assert read_json(one.result)["expected"]["select"] == "test"
