"""Runs that move: with their data as a whole, alone, or without them."""

import pytest
from made import make_images

import nearkin as nk
from nearkin.files import read_json, write_json
from nearkin.search.calibrate import calibrate
from nearkin.training.checkpoint import plan_of
from nearkin.training.measure_run import measure_run
from nearkin.training.moved_data import find_data
from nearkin.training.run_folder import RunFolder

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "epochs": 0, "device": "cpu"}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with photographs and a run on them, trained from within, as a user would."""
    tree = tmp_path / "tree"
    make_images(tree / "photos", classes=4, each=4)
    monkeypatch.chdir(tree)
    nk.train(data="folder:photos", out="runs/a", **TINY)
    monkeypatch.chdir(tmp_path)
    return tree


def test_a_run_is_measured_from_another_folder(tree):
    result = read_json(tree / "runs/a/result.json")
    assert measure_run(tree / "runs/a", device="cpu") == result["scores"]
    assert read_json(tree / "runs/a/config.json")["plan"]["data"] == "folder:photos"


def test_a_tree_that_moves_as_a_whole_is_found(tree, tmp_path):
    result = read_json(tree / "runs/a/result.json")
    tree.rename(tmp_path / "elsewhere")
    run = RunFolder(tmp_path / "elsewhere/runs/a")
    assert find_data(run) == f"folder:{tmp_path / 'elsewhere/photos'}"
    assert measure_run(run.path, device="cpu") == result["scores"]
    assert plan_of(run, device="cpu").data == find_data(run)


def test_a_run_that_moves_alone_finds_its_data(tree, tmp_path):
    (tree / "runs/a").rename(tmp_path / "a")
    assert find_data(RunFolder(tmp_path / "a")) == f"folder:{tree / 'photos'}"


@pytest.mark.parametrize("use", [measure_run, calibrate])
def test_data_that_moved_are_named_by_the_flag(tree, use):
    (tree / "photos").rename(tree / "pictures")
    with pytest.raises(nk.NearkinError, match=r"no longer at .*photos.*: give their new location with --data folder:"):
        use(tree / "runs/a")
    moved = f"folder:{tree / 'pictures'}"
    assert measure_run(tree / "runs/a", data=moved, device="cpu")["R@1"] > 0


def test_an_interrupted_run_resumes_with_data_that_moved(tree):
    run = RunFolder(tree / "runs/a")
    run.result.unlink()
    (tree / "photos").rename(tree / "pictures")
    with pytest.raises(nk.NearkinError, match="--data folder:PATH"):
        nk.train(resume=True, out=run.path)
    nk.train(resume=True, out=run.path, data=f"folder:{tree / 'pictures'}")
    assert run.result.exists()
    assert find_data(run) == f"folder:{tree / 'pictures'}"


def test_older_runs_and_data_without_a_path_are_taken_as_written(tree, monkeypatch):
    run = RunFolder(tree / "runs/a")
    config = read_json(run.config)
    del config["data_places"]
    write_json(run.config, config)
    with pytest.raises(nk.NearkinError, match="no longer at photos"):
        find_data(run)
    monkeypatch.chdir(tree)
    assert find_data(run) == "folder:photos"
    write_json(run.config, config | {"plan": config["plan"] | {"data": "glyphs(classes=4)"}})
    assert find_data(run) == "glyphs(classes=4)"
