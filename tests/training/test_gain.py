"""The estimate before training, and what a run says about whether training helped."""

import io

import pytest
import torch
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.files import read_json, read_tensors
from nearkin.training.estimate import ImageSeconds, estimate_words, remaining_seconds, time_steps
from nearkin.training.gain import Gain, read_gain
from nearkin.training.launch import build_training
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder

TINY = {"data": "glyphs(classes=24, samples=6)", "epochs": 2, "batch": 24, "dim": 16, "device": "cpu", "warmup": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training with somebody who reads its notes, and in silence; and the notes."""
    folder = tmp_path_factory.mktemp("gain")
    reporter = Reporter(Console(file=io.StringIO(), width=500))
    watched = nk.train(**TINY, out=folder / "watched", reporter=reporter)
    return watched, nk.train(**TINY, out=folder / "silent"), reporter.console.file.getvalue()


def test_the_estimate_is_said_before_training_and_changes_nothing(runs):
    watched, silent, said = runs
    assert "Training to 2 epochs takes about" in said
    assert said.index("takes about") < said.index("epoch 1/2")
    first, second = (read_tensors(run.checkpoint)[0] for run in (watched, silent))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_timing_leaves_state_flags_and_random_numbers_alone(tmp_path):
    plan = make_plan({**TINY, "drop_path": 0.0}, {})
    training, _ = build_training(RunFolder(tmp_path / "run"), plan, reporter=Reporter())
    embedder = training.model.embedder
    embedder.train()
    embedder.head.requires_grad_(False)
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    flags = [p.requires_grad for p in embedder.parameters()]
    drawn = torch.get_rng_state(), training.rng.get_state()
    each = time_steps(training.model, training.train.store, training.augment)
    assert 0 < each.training < 1
    assert 0 < each.warming_up < 1
    assert all(torch.equal(value, before[name]) for name, value in embedder.state_dict().items())
    assert [p.requires_grad for p in embedder.parameters()] == flags
    assert all(module.training for module in embedder.modules())
    assert all(p.grad is None for p in embedder.parameters())
    assert all(torch.equal(a, b) for a, b in zip(drawn, (torch.get_rng_state(), training.rng.get_state()), strict=True))


def test_the_estimate_counts_what_is_left():
    plan, each = make_plan({"batch": 10, "warmup": 2, "device": "cpu"}, {}), ImageSeconds(0.1, 0.5)
    left = [remaining_seconds(each, plan, epochs=5, done=done, per_epoch=4) for done in (0, 4, 8, 19, 20)]
    assert left == [8 * 1 + 12 * 5, 4 * 1 + 12 * 5, 12 * 5, 5, 0]
    assert "5 epochs takes about 68 s: 20 steps" in estimate_words(68, epochs=5, steps=20)


def test_the_gain_is_that_of_the_scores_and_its_interval_holds_it(runs):
    run, _, _ = runs
    result = read_json(run.result)
    gain = read_gain(result)
    assert gain.metric == "MAP@R"
    assert gain.classes == 12
    assert (gain.before, gain.after) == pytest.approx((result["before"]["MAP@R"], result["scores"]["MAP@R"]))
    assert gain.low < gain.after - gain.before < gain.high


def test_the_values_before_training_are_those_of_the_untrained_network(runs):
    run, _, _ = runs
    values, about = read_tensors(run.before)
    assert about["metric"] == "MAP@R"
    assert float(values["values"].nanmean()) == pytest.approx(read_json(run.result)["before"]["MAP@R"])


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (3.0, 9.0, "(95 % interval over 12 classes: +3.0 to +9.0). Training helped."),
        (-3.0, 9.0, "These 12 classes do not show that training helped."),
        (-9.0, -3.0, "made the embeddings worse"),
        (None, None, "One class has no interval"),
    ],
)
def test_the_closing_line_follows_the_interval(low, high, words):
    line = str(Gain("MAP@R", 12, 10.0, 16.0, low, high))
    assert line.startswith("MAP@R before training 10.0, after 16.0: +6.0")
    assert words in line


@pytest.mark.parametrize("notebook", [False, True])
def test_a_run_prints_itself(runs, monkeypatch, notebook):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels set it
    run, _, _ = runs
    shown = repr(run)
    assert f"Run {run.path}: proxy_anchor on glyphs" in shown
    assert "before training" in shown
    assert "\x1b" not in shown
    assert str(read_gain(read_json(run.result))) in shown
    assert repr(RunFolder("nowhere")) == "Run nowhere, not finished"
