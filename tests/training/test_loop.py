"""Training end to end on a few glyphs: scores, selection, resume after a kill, errors."""

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from made import make_images
from rich.console import Console

import nearkin as nk
from nearkin.console import Reporter
from nearkin.files import read_json, read_tensors
from nearkin.space import Space
from nearkin.training.images import measure
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.measure_run import embed_test
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder

TINY = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cpu"}


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return read_tensors(run.model)[0]


def same(a: RunFolder, b: RunFolder) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_a_run_folder_is_complete(tmp_path):
    run = nk.train(**TINY, out=tmp_path / "run", evaluate_every=2)
    config, result = read_json(run.config), read_json(run.result)
    assert config["plan"]["method"] == "proxy_anchor"
    assert config["method"].startswith("proxy_anchor(alpha=32.0, delta=0.1")
    assert set(result["scores"]) == set(config["plan"]["metrics"]) == set(result["before"])
    assert result["queries"] == 24 * 6
    assert result["select"] == "last"
    assert result["kept_epoch"] == 3
    assert {"seed", "versions", "commit", "hardware", "seconds", "images_per_second"} <= set(result)
    kinds = [event["event"] for event in run.events()]
    assert kinds == ["test", "epoch", "epoch", "test", "epoch"]


def test_training_beats_the_untrained_network_on_unseen_classes(tmp_path):
    settings = {**TINY, "data": "glyphs(classes=120, samples=10)", "epochs": 8, "batch": 60}
    result = read_json(nk.train(**settings, out=tmp_path / "run").result)
    assert result["scores"]["R@1"] > result["before"]["R@1"] + 10


def test_a_loaded_model_embeds_as_the_run_measured(tmp_path):
    run = nk.train(**TINY, out=tmp_path / "run")
    model = nk.load(run.path, device="cpu")
    test = nk.load_dataset(TINY["data"]).test
    x = model.embed(test.sources)
    assert x.shape == (len(test), 16)
    assert nk.evaluate(x, test.labels, metrics=("R@1",))["R@1"] == read_json(run.result)["scores"]["R@1"]


def test_the_embedded_test_set_is_handed_over(tmp_path):
    tested = []
    run = nk.train(**TINY, method="n_pair", out=tmp_path / "run", after_test=tested.append)
    (embedded,) = tested
    assert measure(embedded, ("R@1",))["R@1"] == read_json(run.result)["scores"]["R@1"]
    again = embed_test(run.path, device="cpu")
    torch.testing.assert_close(embedded.model.space.project(embedded.x), again.x)
    nk.train(out=run.path, resume=True, after_test=tested.append)
    assert len(tested) == 1, "a finished run is not measured again"


def test_damaged_images_are_named_left_out_and_counted(tmp_path):
    images = make_images(tmp_path / "photos", classes=8, each=4)
    damaged = [images[0], images[-1]]  # one of the classes that train, one of those that test
    for path in damaged:
        path.write_bytes(path.read_bytes()[:100])
    settings = {**TINY, "data": f"folder:{tmp_path / 'photos'}", "epochs": 1, "batch": 6}
    reporter = Reporter(Console(file=io.StringIO()))
    run = nk.train(**settings, out=tmp_path / "run", reporter=reporter)
    said = reporter.console.file.getvalue()
    said = " ".join(said.split())
    for path, what in zip(damaged, ("training", "test"), strict=True):
        assert f"1 {what} image cannot be read, so left out: {path} (it is truncated)." in said
    result, config = read_json(run.result), read_json(run.config)
    assert [str(path) in sentence for path, sentence in zip(damaged, result["unreadable"], strict=True)] == [True, True]
    assert config["resolved"]["training_images"] == 4 * 4 - 1
    assert reporter.left_out == dict.fromkeys(map(str, damaged), "it is truncated")
    assert result["queries"] + result["left_out"] == 4 * 4 - 1


def test_a_strict_reporter_refuses_damaged_images_before_training(tmp_path):
    images = make_images(tmp_path / "photos", classes=4, each=4)
    images[-1].write_bytes(images[-1].read_bytes()[:100])
    settings = {**TINY, "data": f"folder:{tmp_path / 'photos'}", "backbone": "conv4", "batch": 6}
    with pytest.raises(nk.NearkinError, match=r"strict forbids, the first: .*truncated"):
        nk.train(**settings, out=tmp_path / "run", strict=True)
    assert not (tmp_path / "run").exists()


def test_training_by_inner_products_is_measured_by_cosine(tmp_path, monkeypatch):
    trained_on = []
    kind = type(nk.method("n_pair", classes=2, dim=2))
    monkeypatch.setattr(kind, "after_step", lambda _, step: trained_on.append(step.x.detach().norm(dim=1)))
    run = nk.train(**TINY, method="n_pair", out=tmp_path / "run")
    model = nk.load(run.path, device="cpu")
    test = nk.load_dataset(TINY["data"]).test
    x = model.embed(test.sources)
    assert model.embedder.space == read_json(run.config)["space"] == "cosine"
    assert torch.cat(trained_on).std() > 1e-3  # nothing was normalised
    torch.testing.assert_close(x.norm(dim=1), torch.ones(len(x)))  # and now everything is
    measured = read_json(run.result)["scores"]["MAP@R"]
    assert measured == pytest.approx(nk.evaluate(x, test.labels)["MAP@R"], abs=1e-3)


def seen_at_start(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[dict[str, torch.Tensor], float]:
    """The state of the network when its method is bound, and the mean norm of the first embeddings."""
    kind, bound, norms = type(nk.method(str(settings["method"]), classes=2, dim=2)), {}, []
    with monkeypatch.context() as patch:
        patch.setattr(kind, "bind", lambda _, model: bound.update(copy.deepcopy(model.state_dict())))
        patch.setattr(kind, "after_step", lambda _, step: norms.append(step.x.detach().norm(dim=1).mean().item()))
        nk.train(**{**TINY, "epochs": 1, "augment": "none", **settings})
    return bound, norms[0]


def test_every_space_without_a_fixed_norm_has_an_initial_norm():
    assert all((space.initial_norm is None) == (space.norm_floor is not None) for space in Space)


@pytest.mark.parametrize(
    ("method", "norm"), [("lifted", Space.EUCLIDEAN.initial_norm), ("n_pair", Space.INNER.initial_norm)]
)
@pytest.mark.parametrize("pool", ["max", "avg+max"])
def test_unnormalised_embeddings_start_with_the_initial_norm_for_every_pooling(
    tmp_path, monkeypatch, method, norm, pool
):
    bound, first_norm = seen_at_start(monkeypatch, method=method, pool=pool, out=tmp_path / "rescaled")
    assert first_norm == pytest.approx(norm, rel=0.1)
    means = [t for name, t in bound.items() if name.endswith("running_mean")]
    assert means
    assert not any(t.any() for t in means)  # measuring the norm left no trace
    unscaled, first_norm = seen_at_start(
        monkeypatch, method=method, pool=pool, short_start=False, out=tmp_path / "unscaled"
    )
    assert first_norm != pytest.approx(norm, rel=0.3)
    scale = bound["head.linear.weight"] / unscaled["head.linear.weight"]  # before the method copied it
    torch.testing.assert_close(scale, scale.mean().expand_as(scale))
    assert scale.mean().item() != pytest.approx(1, rel=0.2)


def test_the_head_is_not_rescaled_on_the_sphere(tmp_path, monkeypatch):
    bound = [
        seen_at_start(monkeypatch, method="contrastive", short_start=rescaled, out=tmp_path / str(rescaled))[0]
        for rescaled in (True, False)
    ]
    assert all(torch.equal(bound[0][name], bound[1][name]) for name in bound[0])


def interrupted_at(
    number: int, monkeypatch: pytest.MonkeyPatch, *, by: int = signal.SIGINT, **settings: object
) -> RunFolder:
    """A run that a signal interrupts in step `number` (from 0): the step ends, then all is saved."""
    training = sys.modules["nearkin.training.loop"].Training
    step = training._one_step

    def interrupt(self, *batch):
        if self.step == number:
            os.kill(os.getpid(), by)
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings)
    run = RunFolder(settings["out"])
    assert read_tensors(run.checkpoint)[1]["step"] == number + 1
    return run


def test_sigterm_saves_as_ctrl_c_does(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    interrupted_at(2, monkeypatch, by=signal.SIGTERM, **{**TINY, "out": tmp_path / "run"})
    assert signal.getsignal(signal.SIGTERM) is before


def without_times(run: RunFolder) -> list[dict[str, object]]:
    return [{k: v for k, v in event.items() if k != "seconds"} for event in run.events()]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "proxy_anchor"},
        {"method": "xbm(contrastive(form=c1), size=64, start=3)"},
        {"method": "soft_triple(per_class=3)"},
        {"method": "proxy_updates(steps=2)", "decay_every": 1},
        # Checks within the epoch: those after its beginning must not change its learning rate on resume.
        {"schedule": "plateau", "check_every": 1, "decay_every": 1, "decay": 0.1, "lr": 0.02},
    ],
)
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, monkeypatch, settings):
    whole = nk.train(**{**TINY, **settings}, out=tmp_path / "whole")
    cut = interrupted_at(6, monkeypatch, **{**TINY, **settings}, out=tmp_path / "cut")
    resumed = nk.train(out=cut.path, resume=True)
    assert same(whole, resumed)
    assert read_json(whole.result)["scores"] == read_json(resumed.result)["scores"]
    assert without_times(whole) == without_times(resumed)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, delay):
    settings = {**TINY, "epochs": 6, "select": "validation"}
    whole = nk.train(**settings, out=tmp_path / "whole")
    program = (
        "import json, sys; import nearkin as nk; sys.modules['nearkin.training.loop'].SAVE_SECONDS = 0.0; "
        "nk.train(**json.loads(sys.argv[1]), out=sys.argv[2])"
    )
    arguments = [sys.executable, "-c", program, json.dumps(settings), str(tmp_path / "cut")]
    process = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})
    cut = RunFolder(tmp_path / "cut")
    deadline = time.monotonic() + 120
    while not cut.checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.wait()
    assert not cut.result.exists(), "the process was too fast to be killed: give it more to do"
    resumed = nk.train(out=cut.path, resume=True)
    assert same(whole, resumed)
    assert read_json(whole.result)["held_out"] == read_json(resumed.result)["held_out"]


def test_held_out_classes_select_the_epoch_and_patience_stops(tmp_path):
    run = nk.train(**{**TINY, "epochs": 12, "lr": 0.05}, select="validation", patience=2, out=tmp_path / "run")
    result = read_json(run.result)
    checks = [e["score"] for e in run.events() if e["event"] == "check"]
    assert result["held_out"] == max(checks)
    assert result["kept_epoch"] == checks.index(max(checks)) + 1
    assert len(checks) == min(12, checks.index(max(checks)) + 1 + 2)
    assert all(e["on"] == "held-out classes" for e in run.events() if e["event"] == "check")


def test_the_test_set_selects_only_on_request_and_the_result_says_so(tmp_path):
    run = nk.train(**TINY, select="test", out=tmp_path / "run")
    result = read_json(run.result)
    assert result["select"] == "test"
    assert result["scores"]["MAP@R"] == pytest.approx(result["test_chosen"])


def test_a_loss_of_nan_stops_with_its_step(tmp_path):
    with pytest.raises(nk.NearkinError, match=r"loss was (nan|inf) at step \d+.*nothing is saved yet"):
        nk.train(**{**TINY, "lr": 1e30, "clip_value": 0.0}, out=tmp_path / "run")


def test_a_loss_of_nan_names_the_last_checkpoint(tmp_path, monkeypatch):
    module = sys.modules["nearkin.training.loop"]
    step = module.Training._one_step
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(
        module.Training, "_one_step", lambda self, *batch: step(self, *batch) * (torch.nan if self.step == 8 else 1)
    )
    kept = RunFolder(tmp_path / "run").checkpoint
    with pytest.raises(
        nk.NearkinError, match=rf"loss was nan at step 9: .*the last checkpoint is {re.escape(str(kept))}"
    ):
        nk.train(**TINY, out=tmp_path / "run")
    assert read_tensors(kept)[1]["step"] == 8


def test_weights_that_are_not_finite_never_replace_a_checkpoint(tmp_path, monkeypatch):
    module = sys.modules["nearkin.training.loop"]
    step = module.Training._one_step

    def poisoned(self, *batch):
        loss = step(self, *batch)
        if self.step == 8:
            with torch.no_grad():
                self.model.embedder.head.linear.weight[0, 0] = torch.nan
        return loss

    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(module.Training, "_one_step", poisoned)
    with pytest.raises(nk.NearkinError, match="not finite after step 9"):
        nk.train(**TINY, out=tmp_path / "run")
    assert read_tensors(RunFolder(tmp_path / "run").checkpoint)[1]["step"] == 8


def test_settings_that_cannot_work_leave_no_run_behind(tmp_path):
    with pytest.raises(nk.NearkinError, match="does not divide"):
        nk.train(**{**TINY, "batch": 25}, method="contrastive", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_held_out_classes_select_even_if_check_every_exceeds_the_run(tmp_path):
    run = nk.train(**TINY, select="validation", check_every=1000, out=tmp_path / "run")
    assert [e["step"] for e in run.events() if e["event"] == "check"] == [read_json(run.result)["steps"]]


def test_a_resumed_optimiser_has_the_layout_of_its_parameters(tmp_path):
    run = nk.train(**TINY, out=tmp_path / "run")
    training, _ = build_training(run, make_plan(read_json(run.config)["plan"], {}), reporter=Reporter())
    training.restore()
    moments = [(p, m["exp_avg"]) for p, m in training.optimiser.state.items()]
    assert moments
    assert all(m.stride() == p.stride() for p, m in moments)


def test_a_finished_run_is_not_overwritten(tmp_path):
    nk.train(**TINY, out=tmp_path / "run")
    with pytest.raises(nk.NearkinError, match="already holds a run"):
        nk.train(**TINY, out=tmp_path / "run")


def test_resume_needs_a_run_and_no_settings(tmp_path):
    with pytest.raises(nk.NearkinError, match="which run"):
        nk.train(resume=True)
    with pytest.raises(nk.NearkinError, match="a run folder"):
        nk.train(resume=True, out=tmp_path)
    with pytest.raises(nk.NearkinError, match="leave out lr"):
        nk.train(resume=True, out=tmp_path, lr=0.1)


def test_warm_up_moves_the_head_and_not_the_trunk(tmp_path):
    torch.manual_seed(0)
    run = nk.train(**{**TINY, "epochs": 1, "batch_norm": "freeze"}, warmup=1, out=tmp_path / "run")
    plan = {**TINY, "epochs": 1}
    after = weights(run)
    other = weights(
        nk.train(**{**plan, "seed": 0, "lr": 1e-12, "batch_norm": "freeze"}, warmup=1, out=tmp_path / "still")
    )
    trunk = [k for k in after if k.startswith("trunk.")]
    assert trunk
    assert all(torch.equal(after[k], other[k]) for k in trunk)
    assert any(not torch.allclose(after[k], other[k]) for k in after if not k.startswith("trunk."))


def new_training(tmp_path: Path, **settings: object) -> Training:
    """A training before its first step."""
    plan = make_plan({**TINY, **settings}, {})
    reporter = Reporter(Console(file=io.StringIO()))
    return build_training(RunFolder(tmp_path / "run"), plan, reporter=reporter)[0]


def test_trunk_head_and_proxies_have_their_own_learning_rates(tmp_path):
    training = new_training(tmp_path, lr=1e-4, head_lr=5e-4)
    embedder, groups = training.model.embedder, training.optimiser.param_groups
    assert [group["lr"] for group in groups] == [1e-4, 5e-4, pytest.approx(1e-2)]
    expected = [embedder.trunk.parameters(), embedder.head.parameters(), training.method.parameters()]
    for group, parameters in zip(groups, expected, strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in parameters}


def test_proxies_that_a_method_moves_follow_the_schedule(tmp_path):
    training = new_training(tmp_path, method="vcpa(newton=False, steps=1)", lr=2e-3, decay_every=1, warmup=0)
    rates = []
    for epoch in range(3):
        training.step = epoch * training.per_epoch
        training._begin_epoch()
        rates.append(training.method.adam.rate)
    assert rates == pytest.approx([0.2, 0.1, 0.05])


def test_representatives_are_shown_plainly_on_request(tmp_path):
    method = "profs(contrastive, hard_classes=False, plain_representatives={})"
    plain, other = (
        new_training(tmp_path / str(on), method=method.format(on), images_per_class=3) for on in (True, False)
    )
    for training in (plain, other):
        index, pixels = next(training.batches())
        shown, same = training._views(index, pixels), training.model.view(pixels)
        alike = (shown == same).flatten(1).all(1)
        assert alike.tolist() == [training is plain and row % 3 == 0 for row in range(len(index))]


@pytest.mark.parametrize("limit", [{"clip_value": 0.5}, {"clip_norm": 0.5, "clip_value": 0.0}])
def test_gradients_are_clipped(tmp_path, limit):
    training = new_training(tmp_path, **limit)
    parameters = [p for group in training.optimiser.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    training._clip()
    if limit.get("clip_norm"):
        assert torch.nn.utils.get_total_norm([p.grad for p in parameters]).item() == pytest.approx(0.5, rel=1e-3)
    else:
        assert all((p.grad == 0.5).all() for p in parameters)


def test_training_needs_no_optional_package(tmp_path):
    extras = "faiss fastapi uvicorn simplejpeg pillow_heif pyarrow pandas psycopg pgvector qdrant_client lance onnx"
    extras += " onnxruntime tensorboard"
    program = (
        "from importlib.machinery import PathFinder\n"
        "real = PathFinder.find_spec\n"
        f"absent = {extras.split()!r}\n"
        "def found(name, *more): return None if name.partition('.')[0] in absent else real(name, *more)\n"
        "PathFinder.find_spec = found\n"
        "import nearkin as nk\n"
        f"nk.train(**{TINY!r}, out={str(tmp_path / 'run')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "run").result.exists()


@pytest.mark.parametrize(
    "settings", [{"optimiser": "sgd", "lr": 0.01}, {"clip_norm": 1.0}, {"schedule": "plateau"}, {"check_every": 2}]
)
def test_other_settings_run(tmp_path, settings):
    result = read_json(nk.train(**{**TINY, "epochs": 2, **settings}, out=tmp_path / "run").result)
    classes = 18 if settings.get("schedule") == "plateau" else 24  # a quarter is held out for a plateau to look at
    assert result["steps"] == 2 * (classes * 6 // 24)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run = nk.train(**TINY, out=tmp_path / "run")
    Path(run.result).unlink()
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:1000])
    with pytest.raises(nk.NearkinError, match="damaged"):
        nk.train(out=run.path, resume=True)


def test_checkpoints_take_at_most_a_twentieth_of_the_time():
    module = sys.modules["nearkin.training.loop"]
    assert module.pause_after(0.1) == module.SAVE_SECONDS
    for seconds in (1.0, 3.0, 40.0):
        assert seconds / module.pause_after(seconds) <= 0.05
