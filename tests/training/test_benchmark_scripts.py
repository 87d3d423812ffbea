"""The scripts below benchmarks/ that choose a recipe and measure its parts, each on a few small images."""

import argparse
import json
import sys
import time

import pytest
import recipe_trials
import stored_pixels
import train_speed
from made import make_images

from nearkin.console import Reporter
from nearkin.errors import NearkinError


@pytest.fixture
def trials(tmp_path):
    """Trials of small letters' network, which have not begun."""
    make_images(tmp_path / "images", classes=16, each=4)
    chosen = {"backbone": "conv4", "dim": 4, "batch": 8}
    given = argparse.Namespace(
        data=f"folder:{tmp_path / 'images'}", device="cpu", seconds=600.0, seed=0, sizes=[32], splits=[4, 2]
    )
    given.set, given.out = chosen, tmp_path
    return recipe_trials.Trials(given, Reporter())


def test_a_mixture_that_failed_is_not_tried_again_and_again(trials, monkeypatch):
    asked = []

    def fail(plan, *_, block, **__):
        asked.append((block, plan))
        raise NearkinError("The loss was nan at step 3: lower the learning rate.")

    monkeypatch.setattr(recipe_trials, "train_held_out", fail)
    drawn = []
    for seed in range(6):
        mixture, size, split = trials.next_mixture(32, seed=seed)
        trials.make(mixture, size, split)
        drawn.append((set(mixture), split))
    assert len(asked) == 6
    assert not trials.made
    assert {split for _, split in drawn} == {4, 2}
    first, *others = (mixture for mixture, _ in drawn)
    assert min(len(first & mixture) / len(first) for mixture in others) < 0.5  # they try other changes


def test_trials_are_made_even_if_the_view_of_the_suite_is_not(trials, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise NearkinError("A batch of 180 images cannot be drawn from 48.")

    options = [
        "--data",
        trials.given.data,
        "--suite",
        "cub_lite0",
        "--seconds",
        "0",
        "--device",
        "cpu",
        "--sizes",
        "32",
    ]
    for name, value in trials.given.set.items():
        options += ["--set", f"{name}={value}"]
    found = {"splits": {"4": {"score": 1.0, "scores": {"R@1 at 32 of 37": 1.0}}, "2": {"score": 3.0, "scores": {}}}}
    trials.made["paper at 32"] = {"changes": [], "settings": {}, "size": 32, **found}
    trials.write()
    monkeypatch.setattr(recipe_trials, "suite_view", fail)
    monkeypatch.setattr(sys, "argv", ["recipe_trials.py", *options, "--out", str(tmp_path)])
    recipe_trials.main()
    said = capsys.readouterr().out
    assert "the view of cub_lite0: NearkinError: A batch of 180" in said
    assert "+0.00  paper at 32" in said


def test_stored_pixels_times_steps_as_a_run_makes_them(tmp_path, monkeypatch):
    options = ["--device", "cpu", "--backbone", "conv4", "--batch", "8", "--images", "40", "--rounds", "1", "--out"]
    monkeypatch.setattr(sys, "argv", ["stored_pixels.py", *options, str(tmp_path / "found.json")])
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    stored_pixels.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kept"] == [[37, False], [64, False]]
    assert found["figures"].keys() == {"training crops", "test views", "training step"}
    assert all(speed > 0 for figure in found["figures"].values() for speed in figure.values())


def test_the_cold_time_tells_what_of_it_went_by_before_the_script_began(tmp_path, monkeypatch):
    make_images(tmp_path / "images", classes=8, each=4)
    options = ["--parts", "whole", "--epochs", "1", "--device", "cpu", "--backbone", "conv4"]
    options += ["--data", f"folder:{tmp_path / 'images'}", "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["train_speed.py", *options])
    monkeypatch.setattr(train_speed, "process_start", lambda: time.time() - 50)
    train_speed.main()
    cold, warm = (json.loads((tmp_path / "found.json").read_text())[name] for name in ("cold", "warm"))
    assert 50 <= cold["imports"] < cold["seconds"]
    assert warm["seconds"] < 50
    assert "R@1" in warm["scores"]
