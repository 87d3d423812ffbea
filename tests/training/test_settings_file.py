"""Settings as TOML: a run is repeated from the file in its folder."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

import nearkin as nk
from nearkin.files import read_json, read_tensors
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.settings_file import read_settings, write_settings

TINY = {"data": "glyphs(classes=12, samples=4)", "backbone": "conv4", "batch": 8, "dim": 4, "epochs": 1}


def test_a_run_is_repeated_from_its_settings(tmp_path):
    first = nk.train(out=tmp_path / "a", **TINY, lr=2e-3, metrics=("R@1", "MAP@R"), device="cpu")
    again = nk.train(out=tmp_path / "b", config=first.settings, device="cpu")
    a, b = (read_tensors(run.model)[0] for run in (first, again))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert read_json(first.config)["plan"] == read_json(again.config)["plan"]
    other = nk.train(out=tmp_path / "c", config=first.settings, epochs=0, device="cpu")
    assert read_json(other.config)["plan"]["epochs"] == 0, "what is given comes first"


def test_every_setting_survives_the_file(tmp_path):
    folder = 'a "quoted" \\ päth'
    changed = {"data": f"folder:{folder}", "lr": 1e-5, "metrics": ("R@1",), "bias": False, "snapshots": "0,1"}
    plan = make_plan({**changed, "seed": 3, "device": "cpu"}, {})
    write_settings(tmp_path / "settings.toml", plan)
    settings = tomllib.loads((tmp_path / "settings.toml").read_text())
    names = {field.name for field in dataclasses.fields(plan)}
    assert names - set(settings) == {"device", "precision"}, "these are found again where the file is used"
    read = read_settings(tmp_path / "settings.toml")
    there = dataclasses.replace(plan, data=f"folder:{Path(folder).absolute()}")
    assert make_plan({**read, "device": "cpu"}, {}) == there


def test_paths_start_from_the_folder_of_the_file(tmp_path):
    (tmp_path / "w.pth").touch()
    (tmp_path / "a.toml").write_text('data = "csv:tables/a.csv"\nweights = "w.pth"\nmethod = "vcpa"\nepochs = 3\n')
    assert read_settings(tmp_path / "a.toml") == {
        "data": f"csv:{tmp_path / 'tables/a.csv'}",
        "weights": str(tmp_path / "w.pth"),
        "method": "vcpa",
        "epochs": 3,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs = ", "Cannot read .*a.toml"),
        ("epoch = 3", "a.toml: There is no setting 'epoch'. Did you mean 'epochs'?"),
        ("epochs = 'three'", "epochs must be a whole number"),
        ("[train]\nepochs = 3", "no setting 'train'"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, words):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(nk.NearkinError, match=words):
        nk.train(out=tmp_path / "run", config=tmp_path / "a.toml")
    assert not (tmp_path / "run").exists()


def test_a_missing_file_and_a_resumed_run_are_refused(tmp_path):
    with pytest.raises(nk.NearkinError, match="There is no file"):
        nk.train(config=tmp_path / "a.toml")
    with pytest.raises(nk.NearkinError, match="leave out config"):
        nk.train(config=tmp_path / "a.toml", resume=True, out=tmp_path)


def test_a_path_that_is_not_utf_8_is_left_out(tmp_path):
    write_settings(tmp_path / "settings.toml", make_plan({"data": "folder:a\udcff", "device": "cpu"}, {}))
    assert "data" not in tomllib.loads((tmp_path / "settings.toml").read_text())


def test_settings_left_by_a_run_are_not_overwritten(tmp_path):
    RunFolder(tmp_path).settings.write_text("epochs = 3\n")
    with pytest.raises(nk.NearkinError, match="files of another run"):
        nk.train(out=tmp_path, **TINY)
