"""Every Python block of docs/runs.md runs, with stand-ins for the loggers, which are no dependencies."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import nearkin as nk

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SMALL = {"data": "glyphs(classes=12, samples=4)", "dim": 4, "batch": 8, "device": "cpu"}


class FakeMlflow(SimpleNamespace):
    """The functions of mlflow that the page uses, as strict about names as it is."""

    def __init__(self) -> None:
        self.params: dict[str, object] = {}
        self.points: list[tuple[str, float, int]] = []
        self.active = False

    @contextmanager
    def start_run(self):
        self.active = True
        yield self
        self.active = False

    def log_params(self, params):
        assert self.active
        self.params |= params

    def log_metrics(self, metrics, step):
        assert self.active
        assert all(re.fullmatch(r"[/\w.\- :]*", name) for name in metrics)
        self.points += [(name, float(value), int(step)) for name, value in metrics.items()]


class FakeWandb(FakeMlflow):
    """The same of wandb, whose points carry their step as a value."""

    @contextmanager
    def init(self, project, config):
        self.params, self.active = dict(config), bool(project)
        yield self
        self.active = False

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, data):
        step = data.pop("step")
        assert self.active
        self.points += [(name, float(value), int(step)) for name, value in data.items()]


def block(word: str) -> str:
    (found,) = [text for text in BLOCKS if f"import {word}\n" in text]
    return found


@pytest.mark.parametrize(("package", "fake", "at"), [("mlflow", FakeMlflow, "_at_"), ("wandb", FakeWandb, "@")])
def test_a_logger_receives_settings_and_curves(tmp_path, monkeypatch, package, fake, at):
    stand_in, runs = fake(), []
    train = nk.train

    def small(**settings):
        runs.append(train(**{**settings, **SMALL, "epochs": 2}, out=tmp_path / "run"))

    monkeypatch.setitem(sys.modules, package, stand_in)
    monkeypatch.setattr(nk, "train", small)
    exec(compile(block(package), str(PAGE), "exec"), {})
    assert stand_in.params["method"] == "proxy_anchor"
    (run,) = runs
    losses = [(event["loss"], event["step"]) for event in run.events() if event["event"] == "epoch"]
    assert [(value, step) for name, value, step in stand_in.points if name == "loss"] == losses
    assert {f"test/MAP{at}R", f"kept/MAP{at}R", "lr"} < {name for name, _, _ in stand_in.points}
    assert not stand_in.active


def test_a_model_is_changed_by_hand_and_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nk.train(**{**SMALL, "epochs": 0}, out="runs/photos")
    exec(compile(block("torch"), str(PAGE), "exec"), {})
    assert not nk.load("runs/photos-changed").embed(nk.load_dataset(SMALL["data"]).test.sources)[:, -1].any()
