"""Running suites: skipped, resumed and failed runs, and the budget of time."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from benchmark.tiny_suite import TINY, append_all, written
from image_helpers import save_noise

import nearkin as nk
from nearkin.benchmark import runner as module
from nearkin.benchmark.budget import Budget, seconds_of
from nearkin.benchmark.results import query_file, read_queries, read_results
from nearkin.benchmark.runner import bench, suite_results
from nearkin.benchmark.tables import suite_tables
from nearkin.cli import main
from nearkin.console import Reporter, markdown
from nearkin.errors import NearkinError
from nearkin.evaluation.metrics import by_class
from nearkin.files import read_json, write_json
from nearkin.training.images import measure
from nearkin.training.measure_run import embed_test, measure_run
from nearkin.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A suite that was run to its end: its file, its folder, its results."""
    folder = tmp_path_factory.mktemp("bench")
    suite = written(folder)
    return suite, folder / "out", bench(suite, out=folder / "out", settings={"device": "cpu"})


def test_a_suite_runs_every_row_with_every_seed_as_train_does(done, tmp_path):
    _, out, result = done
    assert not result.stopped
    assert not result.failed
    assert len(result.runs) == 4
    cell = next(c for c in result.planned.runs if (c.row, c.seed) == ("C2", 1))
    record = read_results(out / "results.jsonl")[cell.id]
    alone = nk.train(
        **{**cell.settings, "data": "glyphs(classes=48, samples=6)"}, out=tmp_path / "alone", metrics=("R@1", "MAP@R")
    )
    expected = read_json(alone.result)
    assert {m: record["scores"][m] for m in ("R@1", "MAP@R")} == expected["scores"]
    assert record["method"].startswith("contrastive(form='c2'")
    assert {"commit", "hardware", "versions", "seconds", "images_per_second", "seed", "select", "date"} <= set(record)
    assert record["wall"] > 0
    assert record["settings"] == json.loads(json.dumps(cell.description))
    assert str(out) not in json.dumps(record)


def test_query_values_are_kept_and_average_to_the_scores(done):
    _, out, result = done
    for key, record in result.runs.items():
        queries = read_queries(query_file(out, key))
        assert len(queries.labels) == 24 * 6
        for metric in ("R@1", "MAP@R"):
            assert float(queries.values[metric].mean()) == pytest.approx(record["scores"][metric], abs=1e-3)
        assert len(by_class(queries.values["R@1"], queries.labels)[0]) == 24


def test_finished_runs_are_skipped_and_shared_with_other_suites(done, tmp_path, monkeypatch):
    suite, out, _ = done
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    again = bench(suite, out=out, settings={"device": "cpu"})
    assert len(again.runs) == 4
    other = TINY.replace('name = "C2"', 'name = "the same under another name"').replace("seeds = 2", "seeds = 1")
    shared = bench(written(tmp_path, other, "other"), out=out)
    assert {c.id for c in shared.planned.runs} <= set(again.runs)
    folders = [p.name for p in (out / "runs").iterdir()]
    assert sorted(folders) == sorted(again.runs)
    assert not any(RunFolder(out / "runs" / name).checkpoint.exists() for name in folders)


def test_a_metric_that_was_not_measured_is_measured_without_training(done, tmp_path, monkeypatch):
    _, out, _ = done
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    more = written(tmp_path, TINY.replace('"MAP@R"]', '"P@3"]').replace("seeds = 2", "seeds = 1"), "more")
    assert not any("P@3" in r["scores"] for r in suite_results(more, out=out).runs.values())
    found = bench(more, out=out, rows=["PA"])
    record = found.runs[found.planned.runs[0].id]
    assert 0 <= record["scores"]["P@3"] <= 100
    assert record["wall"] > 0
    assert len(read_results(out / "results.jsonl")) == 4


def test_a_larger_test_view_is_measured_without_training(done, tmp_path, monkeypatch):
    _, out, first = done
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    name = "MAP@R at 36 of 41"
    more = written(tmp_path, TINY.replace('"MAP@R"]', f'"{name}"]').replace("seeds = 2", "seeds = 1"), "larger")
    assert name not in markdown(suite_tables(suite_results(more, out=out))), "nobody has measured it"
    found = bench(more, out=out, rows=["PA"])
    key = found.planned.runs[0].id
    folder = out / "runs" / key
    model = nk.load(folder, device="cpu")
    model.show(test_size=36, test_crop=36 / 41)
    embedded = embed_test(folder, device="cpu", model=model)
    assert embedded.model.short_side == 41
    assert found.runs[key]["scores"][name] == measure(embedded, ["MAP@R"])["MAP@R"]
    assert found.runs[key]["scores"]["MAP@R"] == first.runs[key]["scores"]["MAP@R"] != found.runs[key]["scores"][name]
    assert name in markdown(suite_tables(found))
    assert measure_run(folder, metrics=(name, "MAP@R"), device="cpu")[name] == found.runs[key]["scores"][name]


def test_results_copied_without_their_folders_count(done, tmp_path, monkeypatch):
    suite, out, _ = done
    append_all(tmp_path / "here" / "results.jsonl", read_results(out / "results.jsonl").values())
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    assert len(bench(suite, out=tmp_path / "here").runs) == 4


def test_a_killed_suite_resumes(tmp_path):
    suite = written(tmp_path, TINY.replace("epochs = 1", "epochs = 8").replace("seeds = 2", "seeds = 1"))
    out = tmp_path / "out"
    program = (
        "import importlib, sys; importlib.import_module('nearkin.training.loop').SAVE_SECONDS = 0;"
        "from nearkin.benchmark.runner import bench;"
        "bench(sys.argv[1], out=sys.argv[2], rows=['PA'], settings={'device': 'cpu'})"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(suite), str(out)], env={**os.environ})
    deadline = time.monotonic() + 120
    while not list(out.glob("runs/*/checkpoint.safetensors")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "results.jsonl").exists()
    began = [e for e in RunFolder(next(out.glob("runs/*"))).events() if e["event"] == "epoch"]
    moved = bench(suite, out=out, rows=["PA"], settings={"device": "cpu"})
    (record,) = moved.runs.values()
    whole = bench(suite, out=tmp_path / "whole", rows=["PA"], settings={"device": "cpu"})
    assert record["scores"] == next(iter(whole.runs.values()))["scores"]
    assert record["wall"] is None, "a resumed run has no valid wall time"
    assert len(began) < 8


def test_a_finished_run_missing_from_the_results_is_only_appended(done, tmp_path, monkeypatch):
    suite, _, first = done
    out = tmp_path / "out"
    bench(suite, out=out, rows=["PA"], seeds=1, settings={"device": "cpu"})
    (out / "results.jsonl").unlink()
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    found = bench(suite, out=out, rows=["PA"], seeds=1)
    key = found.planned.runs[0].id
    assert found.runs[key]["scores"] == first.runs[key]["scores"] | found.runs[key]["scores"]


def test_runs_on_other_images_are_not_added(tmp_path):
    photos = [save_noise(tmp_path / "mine" / f"{n % 4}" / f"{n}.png", 16, 16, seed=n) for n in range(16)]
    text = TINY.replace("[data.glyphs]\nread", "[data.folder]\n#").replace("paper.glyphs", "paper.folder")
    suite = written(tmp_path, text.replace("epochs = 1", "epochs = 0\nsize = 16\naugment = 'none'"))
    settings = {"device": "cpu", "batch": 4}
    common = {"data": [f"folder:{tmp_path / 'mine'}"], "rows": ["PA"], "settings": settings, "queries": False}
    (record,) = bench(suite, out=tmp_path / "out", seeds=1, **common).runs.values()
    assert record["images"]["images"] == 16
    assert record["images"]["bytes"] == sum(photo.stat().st_size for photo in photos)
    assert record["images"]["kept"] == 2.0
    save_noise(photos[3], 16, 17)
    assert len(bench(suite, out=tmp_path / "out", seeds=1, **common).runs) == 1  # nothing to add
    with pytest.raises(NearkinError, match=r"results.jsonl has runs that were made with other images of folder"):
        bench(suite, out=tmp_path / "out", seeds=2, **common)


def test_a_failed_run_is_named_and_the_others_are_run(tmp_path):
    bad = TINY.replace('method = "contrastive(form=c2)"', 'method = "proxy_anchor"\nsettings = { batch = 5000 }')
    found = bench(written(tmp_path, bad), out=tmp_path / "out", seeds=1, queries=False, settings={"device": "cpu"})
    assert len(found.runs) == 1
    assert "A batch of 5000" in found.failed[found.planned.runs[1].id]
    assert not (tmp_path / "out" / "queries").exists()
    with pytest.raises(NearkinError, match=r"Every run of tiny failed.*A batch of 5000"):
        bench(written(tmp_path, bad), out=tmp_path / "other", rows=["C2"], seeds=1, settings={"device": "cpu"})


def test_paths_of_the_data(tmp_path):
    away = written(
        tmp_path, TINY.replace("[data.glyphs]\nread = ", "[data.cub]\n#").replace("paper.glyphs", "paper.cub")
    )
    with pytest.raises(NearkinError, match=r"No path to the data of tiny.*cub:PATH"):
        bench(away, out=tmp_path / "out")
    with pytest.raises(NearkinError, match=r"no data set 'cup'.*'cub'"):
        bench(away, out=tmp_path / "out", data=["cup:/somewhere"])
    with pytest.raises(NearkinError, match="write NAME:PATH"):
        bench(away, out=tmp_path / "out", data=["cub"])
    with pytest.raises(NearkinError, match=r"Every run of tiny failed.*nowhere"):
        bench(away, out=tmp_path / "out", data={"cub": tmp_path / "nowhere"})


def test_a_budget_is_parsed():
    assert [seconds_of(b) for b in ("25m", "90s", "1h30m", "2h", "45", 7.5)] == [1500, 90, 5400, 7200, 45, 7.5]
    for wrong in ("", "soon", "5d", "m", "-3m"):
        with pytest.raises(NearkinError, match="Cannot read the budget"):
            seconds_of(wrong)
    assert Budget(None).allows(1e12)
    assert Budget(10.0).allows(5)
    assert not Budget(10.0).allows(15)
    assert not Budget(0.0).allows(0)


def test_a_run_that_would_not_finish_in_time_is_not_started(done, tmp_path):
    suite, _, first = done
    records = list(first.runs.values())
    slow = [{**r, "wall": 1000.0} for r in records if r["seed"] == 0]
    append_all(tmp_path / "out" / "results.jsonl", slow)
    found = bench(suite, out=tmp_path / "out", budget="15m", settings={"device": "cpu"})
    assert found.stopped == "the budget is too short for another run; 2 are left"
    assert len(found.runs) == 2
    assert not (tmp_path / "out" / "runs").exists()
    compiling = [{**r, "wall": wall} for r, wall in zip(slow, (1000.0, 1.0), strict=True)]  # the first of a sitting
    append_all(tmp_path / "first" / "results.jsonl", compiling)
    assert not bench(suite, out=tmp_path / "first", rows=["PA"], budget="15m", settings={"device": "cpu"}).stopped
    elsewhere = [{**r, "hardware": "an abacus"} for r in slow]
    append_all(tmp_path / "else" / "results.jsonl", elsewhere)
    assert not bench(suite, out=tmp_path / "else", rows=["PA"], budget="15m", settings={"device": "cpu"}).stopped


def test_with_a_budget_quick_rows_are_run_first(tmp_path, monkeypatch):
    xbm = '[[row]]\nname = "XBM"\nmethod = "xbm(contrastive, size=50)"\n[[row]]\nname = "C2"'
    suite = written(tmp_path, TINY.replace('[[row]]\nname = "C2"', xbm))
    begun = []

    def note_only(self, job):
        begun.append((job.run.row, job.run.seed))
        self.results[job.run.id] = {}

    monkeypatch.setattr(module.Runner, "run", note_only)
    bench(suite, out=tmp_path / "all")
    assert begun == [(row, seed) for seed in (0, 1) for row in ("PA", "XBM", "C2")]
    begun.clear()
    planned = bench(suite, out=tmp_path / "out", budget="1h").planned
    assert begun == [(row, seed) for seed in (0, 1) for row in ("PA", "C2", "XBM")]
    here = {"hardware": module.provenance()["hardware"], "scores": {"R@1": 1, "MAP@R": 1}}
    walls = {"PA": 30.0, "C2": 20.0, "XBM": 10.0}
    known = [
        {"id": run.id, "seed": 0, "wall": walls[run.row], "settings": run.description, **here}
        for run in planned.runs
        if run.seed == 0
    ]
    append_all(tmp_path / "timed" / "results.jsonl", known)
    begun.clear()
    bench(suite, out=tmp_path / "timed", budget="1h")
    assert begun == [("XBM", 1), ("C2", 1), ("PA", 1)]


def test_a_run_interrupted_by_the_budget_is_resumed(tmp_path):
    suite = written(tmp_path, TINY.replace("epochs = 1", "epochs = 100000"))
    out = tmp_path / "out"
    usual = signal.getsignal(signal.SIGINT)
    first = bench(suite, out=out, budget="4s", settings={"device": "cpu"})
    assert first.stopped == "the budget is spent; 4 runs are left, the first of them started"
    assert not first.runs
    folder = RunFolder(out / "runs" / first.planned.runs[0].id)
    assert folder.checkpoint.exists()
    epochs = [e for e in folder.events() if e["event"] == "epoch"]
    config = read_json(folder.config)  # as if it had been begun on another machine
    write_json(folder.config, {**config, "plan": {**config["plan"], "data": "folder:/elsewhere", "device": "cuda:7"}})
    bench(suite, out=out, budget="3s", settings={"device": "cpu"})
    assert len([e for e in folder.events() if e["event"] == "epoch"]) > len(epochs) > 0
    assert [p.name for p in (out / "runs").iterdir()] == [first.planned.runs[0].id]
    assert signal.getsignal(signal.SIGINT) is usual


def test_ctrl_c_is_not_mistaken_for_the_budget(tmp_path, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(written(tmp_path), out=tmp_path / "out", budget="1h")


def test_progress_is_reported(tmp_path, capsys):
    from rich.console import Console

    bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1, reporter=Reporter(Console()))
    assert "[1/1] glyphs: PA, seed 0" in capsys.readouterr().out


def test_the_exit_code_tells_that_a_run_failed(tmp_path, monkeypatch):
    bad = TINY.replace('method = "contrastive(form=c2)"', 'method = "proxy_anchor"\nsettings = { batch = 5000 }')
    words = ["nearkin", "bench", str(written(tmp_path, bad)), "--out", str(tmp_path / "out"), "--seeds", "1"]
    codes = []
    for rows in (["--rows", "PA"], []):
        monkeypatch.setattr(sys, "argv", [*words, *rows, "--set", "device=cpu"])
        with pytest.raises(SystemExit) as stopped:
            main()
        codes.append(stopped.value.code)
    assert codes == [0, 1]


def test_two_processes_in_one_folder_are_refused(tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NearkinError, match="Another process is writing to"):
            bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1)
    assert bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1).runs
