"""TensorBoard: every point of a run's curves is in the event file once, also after a kill."""

import sys

import pytest

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.tracking import Tracker, curves

TINY = {"data": "glyphs(classes=32, samples=6)", "batch": 24, "dim": 8, "device": "cpu", "metrics": ("R@1", "MAP@R")}


def read_back(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = reader.EventAccumulator(str(run.path / "tensorboard"))
    folder.Reload()
    return {tag: [(e.step, e.value) for e in folder.Scalars(tag)] for tag in folder.Tags()["scalars"]}


def expected(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """The log in the naive way."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in run.events():
        if event["event"] == "epoch":
            found.setdefault("loss", []).append((event["step"], event["loss"]))
            found.setdefault("lr", []).append((event["step"], event["lr"]))
        if event["event"] == "check":
            found.setdefault("check/R@1", []).append((event["step"], event["score"]))
        if event["event"] == "test":
            for metric, value in event["scores"].items():
                found.setdefault(f"test/{metric}", []).append((event["step"], value))
    return found


def test_every_event_is_written_once_after_an_interruption(tmp_path, monkeypatch):
    training = sys.modules["nearkin.training.loop"].Training
    check = training._check

    def interrupt(self):
        check(self)
        if self.step == 6:  # an epoch was logged that the last checkpoint does not know
            raise KeyboardInterrupt

    settings = {**TINY, "epochs": 3, "select": "validation", "select_by": "R@1", "evaluate_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(training, "_check", interrupt)
        patch.setattr(sys.modules["nearkin.training.loop"], "SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings, tensorboard=True, out=tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert len(expected(run)["loss"]) == 2
    received: dict[str, list[tuple[int, float]]] = {}

    def log(values, step):
        for name, value in values.items():
            received.setdefault(name, []).append((step, value))

    nk.train(out=run.path, resume=True, log=log)
    found, result = read_back(run), read_json(run.result)
    wanted = expected(run)
    assert [len(wanted[name]) for name in ("loss", "check/R@1", "test/R@1")] == [3, 3, 3]
    step = round(result["kept_epoch"] * 3)
    wanted |= {f"kept/{metric}": [(step, value)] for metric, value in result["scores"].items()}
    assert received == wanted
    assert found.keys() == wanted.keys()
    for tag, points in wanted.items():
        assert [s for s, _ in found[tag]] == [s for s, _ in points]
        assert [v for _, v in found[tag]] == pytest.approx([v for _, v in points], rel=1e-6)


def test_tensorboard_off_writes_and_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    run = nk.train(**TINY, epochs=1, out=tmp_path / "run")
    assert not (run.path / "tensorboard").exists()


def test_a_missing_package_is_reported_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(NearkinError, match=r"TensorBoard is not installed: install nearkin\[track\]"):
        nk.train(**TINY, tensorboard=True, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_kind_of_event_has_its_curves():
    assert dict(curves({"event": "epoch", "step": 1, "loss": 0.5, "lr": 0.1}, "R@1")) == {"loss": 0.5, "lr": 0.1}
    assert dict(curves({"event": "check", "step": 1, "score": 3.0}, "R@1")) == {"check/R@1": 3.0}
    assert dict(curves({"event": "kept", "step": 1, "scores": {"R@1": 4.0}}, "R@1")) == {"kept/R@1": 4.0}


def test_a_tracker_without_logs_is_silent(tmp_path):
    silent = Tracker(make_plan(TINY, {}), tmp_path / "tensorboard")
    silent.begin([{"event": "epoch"}])
    silent.add({"event": "epoch"})
    silent.close()
    assert not list(tmp_path.iterdir())


def test_the_folds_of_a_run_are_told_apart(tmp_path):
    received = []
    plan = make_plan({**TINY, "folds": 2, "fold": 2}, {})
    tracker = Tracker(plan, tmp_path, lambda values, step: received.append((values, step)))
    tracker.begin([{"event": "epoch", "step": 3, "loss": 0.5, "lr": 0.1}])
    assert received == [({"fold-2/loss": 0.5, "fold-2/lr": 0.1}, 3)]
