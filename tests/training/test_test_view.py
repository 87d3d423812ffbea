"""How test images are shown: given or chosen on held-out classes, kept in the model and followed everywhere."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made import make_images
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.console import Reporter
from nearkin.data.image_files import list_images
from nearkin.files import read_json, read_tensors, write_json
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.training import test_view as module
from nearkin.training.export import describe, network_inputs
from nearkin.training.measure_run import measure_run
from nearkin.training.ship import shipped_settings

TINY = {"backbone": "conv4", "batch": 8, "dim": 8, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures, a run tested as it was trained, and one tested at a larger size."""
    top = tmp_path_factory.mktemp("views")
    paths = make_images(top / "images", classes=4, each=5)
    data = f"folder:{top / 'images'}"
    plain = nk.train(**TINY, data=data, out=top / "plain")
    larger = nk.train(**TINY, data=data, test_size=48, test_crop=0.9, out=top / "larger")
    return paths, plain, larger


def test_training_is_the_same_and_test_images_are_shown_larger(place):
    paths, plain, larger = place
    a, b = nk.load(plain.path), nk.load(larger.path)
    states = a.embedder.state_dict(), b.embedder.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert (a.test_size, a.short_side, a.size) == (32, 37, 32)
    assert (b.test_size, b.short_side, b.size) == (48, 53, 32)
    assert network_inputs(b, paths[:2]).shape == (2, 1, 48, 48)
    assert not torch.allclose(a.embed(paths), b.embed(paths), atol=1e-3)


def test_the_model_and_not_the_settings_beside_it_decide(place):
    paths, _, larger = place
    known, config = nk.load(larger.path).embed(paths), read_json(larger.config)
    write_json(larger.config, config | {"plan": config["plan"] | {"test_size": 0, "test_crop": 0.0}})
    again = nk.load(larger.path).embed(paths)
    write_json(larger.config, config)
    assert torch.equal(again, known)


def test_eval_index_and_export_follow_the_model(place, tmp_path):
    paths, _, larger = place
    assert measure_run(larger.path, device="cpu") == pytest.approx(read_json(larger.result)["scores"])
    index_images(larger.path, list_images([Path(paths[0]).parent]), tmp_path / "index")
    with open_index(tmp_path / "index") as index:
        ids = list(index.items().ids)
        np.testing.assert_allclose(index.embeddings(ids), nk.load(larger.path).embed(ids).numpy(), atol=1e-6)
    about = describe(nk.load(larger.path))
    assert about["input"]["shape"] == ["batch", 1, 48, 48]
    assert (about["size"], about["short_side"], about["stored_side"]) == (48, 53, 64)
    json.dumps(about)


def test_the_result_says_it(place):
    _, plain, larger = place
    said = {}
    for run in (plain, larger):
        said[run] = CliRunner().invoke(app, ["train", "--resume", "--out", str(run.path)]).output
    assert "trained at 32 px, tested at 48 px" in " ".join(said[larger].split())
    assert "tested at" not in said[plain]


def test_a_size_that_the_network_cannot_take_is_refused(place, tmp_path):
    paths, _, _ = place
    data = f"folder:{Path(paths[0]).parent.parent}"
    with pytest.raises(nk.NearkinError, match="cannot take test images of 8 × 8 pixels"):
        nk.train(**TINY, data=data, test_size=8, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Chosen on held-out classes.

AUTO = {**TINY, "batch": 16, "epochs": 4, "lr": 3e-3, "seed": 1, "test_view": "auto"}


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """Noisy and shifted patches of 32 classes, of which 16 train."""
    folder, rng = tmp_path_factory.mktemp("birds") / "images", np.random.default_rng(0)
    for c in range(32):
        patches = np.kron(rng.integers(60, 196, size=(6, 8, 3)), np.ones((10, 10, 1)))
        (folder / f"{c:02}").mkdir(parents=True)
        for n in range(3):
            noisy = np.clip(patches + rng.integers(-60, 60, size=patches.shape), 0, 255).astype(np.uint8)
            Image.fromarray(np.roll(noisy, rng.integers(-9, 10, 2), (0, 1))).save(folder / f"{c:02}" / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def chosen(birds):
    """A run that chose its view by a shorter training, and what it said."""
    said = io.StringIO()
    run = nk.train(**AUTO, data=f"folder:{birds}", out=birds.parent / "auto", reporter=Reporter(Console(file=said)))
    return run, " ".join(said.getvalue().split())


def same_weights(a, b):
    one, other = (read_tensors(run.model)[0] for run in (a, b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_time(record):
    return {name: value for name, value in record.items() if name != "seconds"}


def test_a_shorter_training_without_some_classes_chooses_and_all_classes_train(chosen, birds, tmp_path):
    run, said = chosen
    config, result = read_json(run.config), read_json(run.result)
    record = config["resolved"]["test_view"]
    assert "by 2 epochs without 4 of 16 classes: about 38% of the training that follows" in said
    assert record["classes"] == 4
    assert record["scores"][0][:2] == [32, 37]
    best = max(record["scores"], key=lambda tried: tried[2])
    assert [record["size"], record["short_side"], best[2]] == best
    assert record["size"] > 32, "these images are told apart better if they are shown larger"
    assert config["resolved"]["training_classes"] == 16
    assert result["test_view"] == record
    assert not (run.path / "test-view").exists()
    assert (nk.load(run.path).test_size, nk.load(run.path).short_side) == (record["size"], record["short_side"])
    again = nk.train(config=run.settings, out=tmp_path / "again")  # with the view as a setting: no other training
    assert same_weights(run, again)
    assert read_json(again.result)["scores"] == result["scores"]
    assert read_json(again.result)["before"] == result["before"]


def test_the_run_its_card_and_its_result_say_it(chosen):
    run, said = chosen
    record = read_json(run.config)["resolved"]["test_view"]
    words = f"{record['size']} px of {record['short_side']}, chosen on 4 held-out training classes (MAP@R"
    assert words in said
    assert words in run.card.read_text()
    shown = CliRunner().invoke(app, ["train", "--resume", "--out", str(run.path)], env={"COLUMNS": "300"}).output
    assert words in " ".join(shown.split())


def test_the_test_classes_are_never_looked_at(chosen, birds, tmp_path):
    data = nk.load_dataset(f"folder:{birds}")
    for path in (path for part in (data.train, data.test) for path in part.sources):
        copy = tmp_path / "images" / path.relative_to(birds)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        if path in data.test.sources:
            Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 80, 3), np.uint8)).save(copy)
    other = nk.train(**AUTO, data=f"folder:{tmp_path / 'images'}", out=tmp_path / "run")
    records = [without_time(read_json(run.result)["test_view"]) for run in (chosen[0], other)]
    assert records[0] == records[1]
    assert read_json(other.result)["scores"] != read_json(chosen[0].result)["scores"]


def test_a_choice_that_was_interrupted_is_continued(chosen, birds, tmp_path, monkeypatch):
    loop = sys.modules["nearkin.training.loop"]
    step, done = loop.Training._one_step, SimpleNamespace(steps=0, stop_at=(3, 8, 14))

    def stop(self, *batch):
        if done.steps in done.stop_at:
            done.stop_at = done.stop_at[1:]
            raise KeyboardInterrupt
        done.steps += 1
        return step(self, *batch)

    monkeypatch.setattr(loop, "SAVE_SECONDS", 0)
    monkeypatch.setattr(loop.Training, "_one_step", stop)
    own = {**AUTO, "data": f"folder:{birds}"}
    for in_choice in (True, False, False):  # 2 epochs of 2 steps choose
        with pytest.raises(KeyboardInterrupt):
            nk.train(**own, out=tmp_path / "run")
        own = {"resume": True}
        assert (tmp_path / "run" / "test-view").exists() == in_choice
    run, whole = nk.train(resume=True, out=tmp_path / "run"), read_json(chosen[0].result)
    assert done.steps == 4 + whole["steps"], "no step was repeated"
    assert same_weights(run, chosen[0])
    assert without_time(read_json(run.result)["test_view"]) == without_time(whole["test_view"])
    assert read_json(run.result)["scores"] == whole["scores"]


@pytest.fixture(scope="module")
def held(birds):
    """A run with held-out classes that chose its view by its own model, and the same run without a choice."""
    common = {**TINY, "batch": 12, "seed": 3, "select": "validation", "data": f"folder:{birds}"}
    return [nk.train(**common, test_view=view, out=birds.parent / f"held-{view}") for view in ("auto", "given")]


def test_held_out_classes_of_the_run_choose_by_its_own_model(held):
    auto, plain = held
    assert same_weights(auto, plain)
    record, result = read_json(auto.config)["resolved"]["test_view"], read_json(auto.result)
    assert record["scores"][0][2] == pytest.approx(result["held_out"], abs=1e-3)
    assert result["test_view"] == record
    assert result["scores"] == pytest.approx(measure_run(auto.path, device="cpu"))
    assert shipped_settings(auto)["test_size"] == record["size"]
    assert shipped_settings(auto)["test_view"] == "given"
    (auto.path / "result.json").unlink()  # killed before the last file was written
    nk.train(resume=True, out=auto.path)
    assert {**read_json(auto.result), "date": ""} == {**result, "date": ""}


def test_the_network_before_training_is_measured_in_the_view_that_was_chosen(held, birds, tmp_path):
    auto, _ = held
    record = read_json(auto.result)["test_view"]
    assert record["size"] > 32
    size, crop = record["size"], record["size"] / record["short_side"]
    given = nk.train(
        **TINY | {"epochs": 0, "seed": 3},
        data=f"folder:{birds}",
        select="validation",
        test_size=size,
        test_crop=crop,
        out=tmp_path / "o",
    )
    assert read_json(auto.result)["before"] == read_json(given.result)["before"]


def said_by(**settings):
    said = io.StringIO()
    run = nk.train(**settings, reporter=Reporter(Console(file=said)))
    assert nk.load(run.path).test_size == 32
    assert "test_view" not in read_json(run.result)
    return " ".join(said.getvalue().split())


def test_without_enough_classes_or_sizes_test_images_are_shown_as_in_training(place, birds, tmp_path, monkeypatch):
    few = f"folder:{Path(place[0][0]).parent.parent}"
    short = AUTO | {"batch": 8, "epochs": 0}
    assert "25% of 2 classes are too few to choose a view" in said_by(**short, data=few, out=tmp_path / "few")
    monkeypatch.setattr(module, "_takes", lambda _trunk, _size: False)
    said = said_by(**short, data=f"folder:{birds}", out=tmp_path / "fixed")
    assert "shown as in training: the network takes one size only" in said


def test_views_are_larger_up_to_what_the_images_show():
    def views(size, side):
        store = SimpleNamespace(size=torch.tensor([[side, 2 * side], [3 * side, side], [side, side]]))
        return [tuple(view) for view in module.candidate_views(size, store, nk_trunk)]

    nk_trunk = torch.nn.Identity()
    nk_trunk.channels, nk_trunk.weight = 3, torch.nn.Parameter(torch.zeros(1))
    all_sizes = [(224, 256), (224, 224), (256, 288), (256, 256), (288, 320), (288, 288), (320, 352), (320, 320)]
    assert views(224, 256) == all_sizes
    assert views(224, 200) == [view for view in all_sizes if view[1] <= 333]
    assert views(224, 100) == [(224, 256)]
    assert (384, 425) in views(288, 256)
    assert [size for size, _ in views(288, 2000)[::2]] == [288, 320, 384, 416]
    assert [size for size, _ in views(32, 2000)[::2]] == [32, 36, 40, 44]


@pytest.mark.parametrize("more", [{"test_size": 48}, {"test_crop": 0.9}, {"folds": 2}])
def test_settings_that_leave_nothing_to_choose_are_refused(more, tmp_path):
    with pytest.raises(nk.NearkinError, match="test_view"):
        nk.train(**AUTO, **more, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
