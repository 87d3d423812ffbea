"""Cross-validation over classes: splits, scores of single and joined models, resume, suites."""

import json
import os
import signal
import sys

import pytest
import torch
from made import make_images

import nearkin as nk
from nearkin.benchmark.results import query_file, read_queries
from nearkin.benchmark.runner import bench
from nearkin.data.image_files import list_images
from nearkin.evaluation import evaluate
from nearkin.files import read_json, read_tensors, write_json
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.search.query import model_of, search_images
from nearkin.training.cross_validation import cross_validate, score_rows
from nearkin.training.images import training_images
from nearkin.training.measure_run import measure_run
from nearkin.training.model import fingerprint, load_untrained
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder

DATA = "glyphs(classes=48, samples=6)"
TINY = {"data": DATA, "epochs": 2, "batch": 12, "dim": 8, "device": "cpu", "method": "contrastive(negative=1)"}
NAMES = ("P@1", "P@R", "MAP@R", "P@1 24-d", "P@R 24-d", "MAP@R 24-d")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("cv") / "run"
    return cross_validate(**TINY, folds=3, space="ball", check_every=5, out=out)


def test_each_fold_trains_on_all_blocks_but_one(done):
    classes = nk.load_dataset(DATA).train.names
    (run,) = done.runs
    for number, part in enumerate(run.parts()):
        held = classes[8 * number : 8 * number + 8]
        assert tuple(read_tensors(part.model)[1]["names"]) == tuple(name for name in classes if name not in held)
        result = read_json(part.result)
        checks = [event for event in part.events() if event["event"] == "check"]
        assert len(checks) == 4
        best = max(checks, key=lambda event: event["score"])
        assert result["select"] == "validation"
        assert result["held_out"] == best["score"]
        assert read_tensors(part.model)[1]["step"] == best["step"], "the best epoch is restored"
    assert len(run.parts()) == 3


def test_scores_are_those_of_single_and_joined_models(done):
    (run,) = done.runs
    result = read_json(run.result)
    assert tuple(result["scores"]) == NAMES
    test = nk.load_dataset(DATA).test
    x = [nk.load(part.path, device="cpu").embed(test.sources) for part in run.parts()]
    alone = [evaluate(v, test.labels, metrics=NAMES[:3], space="ball") for v in x]
    joint = evaluate(torch.cat(x, 1), test.labels, metrics=NAMES[:3], space="ball")
    for name in NAMES[:3]:
        assert result["scores"][name] == pytest.approx(sum(s[name] for s in alone) / 3)
        assert result["scores"][f"{name} 24-d"] == pytest.approx(joint[name])
    assert result["scores"]["MAP@R"] != result["scores"]["MAP@R 24-d"]
    assert result["steps"] == 16
    assert [fold["scores"]["MAP@R"] for fold in result["folds"]] == pytest.approx([s["MAP@R"] for s in alone])
    assert result["queries"] == len(test)


def test_all_folds_load_as_one_model(done):
    (run,) = done.runs
    model = nk.load(run.path, device="cpu")
    test = nk.load_dataset(DATA).test
    x = model.embed(test.sources)
    parts = [nk.load(part.path, device="cpu").embed(test.sources) for part in run.parts()]
    assert x.shape == (len(test), 24) == (len(test), model.embedder.dim)
    assert model.plan.dim == 24
    assert model.embedder.space == "ball"
    assert model.names == nk.load_dataset(DATA).train.names
    assert x.norm(dim=1).max() < 1 + 1e-5
    both = torch.cat(parts, 1)
    torch.testing.assert_close(x, both / both.norm(dim=1, keepdim=True).clamp_min(1))
    assert torch.equal(x, nk.load(run.path, device="cpu").embed(test.sources))
    assert fingerprint(run.path) not in {fingerprint(part.path) for part in run.parts()}


def test_all_folds_search_as_one_model(done, tmp_path):
    """Hits are the nearest by the embeddings side by side, as points of the ball."""
    (run,) = done.runs
    make_images(tmp_path / "images", classes=4, each=3)
    found = list_images([tmp_path / "images"])
    index_images(run.path, found, tmp_path / "index", device="cpu")
    with open_index(tmp_path / "index") as index:
        assert index.dim == 24
        answers, bad = search_images(index, model_of(index, device="cpu"), found, k=3)
    paths = [image.path for image in found]
    both = torch.cat([nk.load(part.path, device="cpu").embed(paths) for part in run.parts()], 1)
    points = both / both.norm(dim=1, keepdim=True).clamp_min(1)
    near = torch.cdist(points, points).fill_diagonal_(torch.inf).argsort(dim=1)[:, :3]
    assert bad == []
    assert [[hit.id for hit in answer.hits] for answer in answers] == [[paths[j] for j in row] for row in near.tolist()]


def test_measuring_again_gives_the_same_scores(done):
    (run,) = done.runs
    result = read_json(run.result)
    scores = measure_run(run.path, device="cpu")
    assert tuple(scores) == NAMES
    assert scores == pytest.approx(result["scores"])
    assert scores.queries == result["queries"]
    more = measure_run(run.path, metrics=("R@4 24-d", "R@4"), device="cpu")
    assert more["R@4 24-d"] != more["R@4"]
    with pytest.raises(nk.NearkinError, match=r"no 'R@4 512-d': its models together have R@4 24-d"):
        measure_run(run.path, metrics=("R@4 512-d",), device="cpu")


def test_a_table_of_single_and_joined_models(done):
    header, rows = score_rows(done)
    assert header == ["", "P@1", "P@R", "MAP@R"]
    assert [row[0] for row in rows] == ["mean of 3 models, 8-d", "side by side, 24-d"]
    assert rows[1][3] == f"{read_json(done.runs[0].result)['scores']['MAP@R 24-d']:.2f}"


def test_folds_start_from_different_weights_unless_they_share_a_seed(done, tmp_path):
    def heads(run):
        return [load_untrained(part.path, device="cpu").embedder.head.linear.weight for part in run.parts()]

    (run,) = done.runs
    a, b, c = heads(run)
    assert not any(torch.equal(x, y) for x, y in ((a, b), (a, c), (b, c)))
    a, b, c = heads(cross_validate(**{**TINY, "epochs": 1}, folds=3, own_seeds=False, out=tmp_path / "alike").runs[0])
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_one_fold_alone_equals_that_of_the_cross_validation(done, tmp_path):
    (run,) = done.runs
    one = nk.train(**TINY, folds=3, fold=2, space="ball", check_every=5, metrics=NAMES[:3], out=tmp_path / "one")
    assert read_json(one.result)["scores"] == read_json(run.parts()[1].result)["scores"]


def test_folds_share_the_images_of_a_fraction():
    train = nk.load_dataset(DATA).train
    plans = [make_plan({**TINY, "folds": 3, "fold": n, "fraction": 0.5}, {}) for n in (1, 2, 3)]
    parts = [training_images(plan, nk.load_dataset(DATA)) for plan in plans]
    kept = [sum(len(images) for images in part) for part in parts]
    assert kept == [len(train) // 2] * 3
    first, second = (
        torch.cat([images.sources for images in part]).flatten(1).sum(1).sort().values for part in parts[:2]
    )
    assert torch.equal(first, second)


def test_a_resumed_cross_validation_remembers_the_number_of_repeats(tmp_path):
    small = {**TINY, "epochs": 1, "folds": 2}
    two = cross_validate(**small, repeats=2, out=tmp_path / "cv")
    two.runs[1].result.unlink()
    again = cross_validate(resume=True, out=tmp_path / "cv")
    assert [run.path for run in again.runs] == [run.path for run in two.runs]
    assert read_json(tmp_path / "cv" / "repeats.json")["repeats"] == 2


def test_settings_that_cannot_work_leave_no_folder(tmp_path):
    with pytest.raises(nk.NearkinError, match="does not divide"):
        cross_validate(**{**TINY, "batch": 25}, images_per_class=2, out=tmp_path / "cv")
    assert not (tmp_path / "cv").exists()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(nk.NearkinError, match="does not divide"):
        cross_validate(**{**TINY, "batch": 25}, images_per_class=2, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_untrained_models_are_measured_too(tmp_path):
    (run,) = cross_validate(**{**TINY, "epochs": 0}, folds=2, out=tmp_path / "cv").runs
    result = read_json(run.result)
    assert "held_out" not in result
    assert result["scores"]["MAP@R"] == result["before"]["MAP@R"]


def test_repeats_are_other_seeds_and_may_be_added(done, monkeypatch):
    (run,) = done.runs
    first = read_json(run.result)
    before = {part.path.name: part.model.stat().st_mtime_ns for part in run.parts()}
    three = cross_validate(out=run.path, resume=True, repeats=3)
    assert [read_json(r.result)["seed"] for r in three.runs] == [0, 1, 2]
    assert [read_json(part.config)["plan"]["seed"] for part in three.runs[2].parts()] == [2, 2, 2]
    values = [read_json(r.result)["scores"]["MAP@R 24-d"] for r in three.runs]
    assert len(set(values)) == 3
    found = three.scores["MAP@R 24-d"]
    mean = sum(values) / 3
    error = (sum((v - mean) ** 2 for v in values) / 2 / 3) ** 0.5
    assert (found.n, found.mean, found.error) == (3, pytest.approx(mean), pytest.approx(error))
    assert json.loads((run.path / "repeats.json").read_text())["scores"]["MAP@R 24-d"]["error"] == pytest.approx(error)
    assert score_rows(three)[1][1][3] == f"{mean:.2f} ± {error:.2f}"
    assert read_json(run.result) == first
    assert {part.path.name: part.model.stat().st_mtime_ns for part in run.parts()} == before
    monkeypatch.setattr(
        sys.modules["nearkin.training.launch"], "train_model", lambda *_, **__: pytest.fail("trained again")
    )
    assert cross_validate(out=run.path, resume=True, repeats=3).scores == three.scores


def test_a_run_interrupted_in_a_fold_resumes_there_bit_for_bit(tmp_path, monkeypatch):
    settings = {**TINY, "folds": 2}
    whole = nk.train(**settings, out=tmp_path / "whole")
    training = sys.modules["nearkin.training.loop"].Training
    step = training._one_step

    def interrupt(self, *batch):
        if self.plan.fold == 2 and self.step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings, out=tmp_path / "cut")
    cut = RunFolder(tmp_path / "cut")
    first, second = cut.parts()
    assert first.result.exists()
    assert second.checkpoint.exists()
    assert not cut.result.exists()
    config = read_json(cut.config)
    write_json(cut.config, config | {"plan": config["plan"] | {"data": DATA.replace(" ", "")}})  # the data were moved
    begun = first.model.stat().st_mtime_ns
    resumed = nk.train(out=cut.path, resume=True)
    assert first.model.stat().st_mtime_ns == begun
    for a, b in zip(whole.parts(), resumed.parts(), strict=True):
        tensors, others = read_tensors(a.model)[0], read_tensors(b.model)[0]
        assert all(torch.equal(tensors[key], others[key]) for key in tensors)
        assert not b.checkpoint.exists()
    assert read_json(second.config)["plan"]["data"] == DATA.replace(" ", "")
    assert read_json(whole.result)["scores"] == read_json(resumed.result)["scores"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"folds": 1}, "at least 2 folds"),
        ({"folds": 4, "fold": 5}, "fold must be one of them"),
        ({"fold": 1}, "fold must be one of them"),
        ({"folds": 4, "select": "test"}, "leave out select=test"),
        ({"folds": 30}, "both sides need at least 2"),
        ({"folds": 4, "batch": 13}, "does not divide"),
    ],
)
def test_impossible_folds_are_refused_and_leave_no_run(tmp_path, settings, sentence):
    with pytest.raises(nk.NearkinError, match=sentence):
        nk.train(**{**TINY, **settings}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_wrong_arguments_of_a_cross_validation_are_refused(tmp_path, done):
    with pytest.raises(nk.NearkinError, match="not a cross-validation"):
        cross_validate(out=done.runs[0].parts()[0].path, resume=True)
    with pytest.raises(nk.NearkinError, match="repeats must be at least 1"):
        cross_validate(**TINY, out=tmp_path / "run", repeats=0)
    with pytest.raises(nk.NearkinError, match="leave out fold"):
        cross_validate(**TINY, out=tmp_path / "run", fold=2)


def test_one_fold_alone(tmp_path):
    run = nk.train(**{**TINY, "epochs": 1}, folds=4, fold=2, out=tmp_path / "run")
    classes = nk.load_dataset(DATA).train.names
    assert tuple(read_tensors(run.model)[1]["names"]) == (*classes[:6], *classes[12:])
    assert run.parts() == []


SUITE = """
title = "Folds"
source = "made up"
backbone = "conv4"
[settings]
dim = 8
epochs = 1
batch = 12
folds = 2
[data.glyphs]
read = "glyphs(classes=48, samples=6)"
metrics = ["MAP@R", "MAP@R 16-d"]
[[row]]
name = "C2"
method = "contrastive(negative=1)"
paper.glyphs = { "MAP@R 16-d" = 12.3 }
[[row]]
name = "CCP"
method = "ccp(contrastive(negative=1), per_class=2, pool=3)"
"""


def test_a_suite_of_folds(tmp_path, monkeypatch):
    """Both kinds of scores in results, table and query values; a metric more is measured without training."""
    from nearkin.benchmark.tables import suite_tables

    suite, out = tmp_path / "folds.toml", tmp_path / "out"
    suite.write_text(SUITE)
    results = bench(suite, out=out, settings={"device": "cpu"})
    assert not results.failed
    for key, record in results.runs.items():
        queries = read_queries(query_file(out, key))
        for metric in ("MAP@R", "MAP@R 16-d"):
            assert float(queries.values[metric].mean()) == pytest.approx(record["scores"][metric], abs=1e-3)
        assert record["settings"]["folds"] == 2
    (table,) = suite_tables(results)
    row = dict(zip(table.header, table.cells[0], strict=True))
    scores = results.runs[results.planned.runs[0].id]["scores"]
    assert row["MAP@R 16-d ours"] == f"{scores['MAP@R 16-d']:.2f}"
    assert row["MAP@R 16-d paper"] == "12.3"
    monkeypatch.setattr(
        sys.modules["nearkin.training.launch"], "train_model", lambda *_, **__: pytest.fail("trained again")
    )
    suite.write_text(SUITE.replace('"MAP@R 16-d"]', '"P@3 16-d"]'))
    more = bench(suite, out=out, rows=["C2"], settings={"device": "cpu"})
    assert 0 < more.runs[more.planned.runs[0].id]["scores"]["P@3 16-d"] < 100


def test_the_cv_command(tmp_path):
    import subprocess

    def nearkin(*arguments):
        command = [sys.executable, "-m", "nearkin", *arguments]
        environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    out = str(tmp_path / "run")
    given = ["--data", DATA, "--method", "contrastive(negative=1)", "--epochs", "1", "--batch", "12", "--dim", "8"]
    shown = nearkin("cv", *given, "--folds", "2", "--device", "cpu", "--out", out)
    assert shown.returncode == 0, shown.stderr
    assert "mean of 2 models, 8-d" in shown.stdout
    assert "side by side, 16-d" in shown.stdout
    assert "Fold 2 of 2" in shown.stderr
    again = nearkin("cv", *given, "--out", out)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
