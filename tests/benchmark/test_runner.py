"""Suites, their runs and results: what is checked, shared, gone on with, stopped in time, carried and merged."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import nearkin as nk
from nearkin.benchmark import runner as module
from nearkin.benchmark.planned_runs import describe, expand, run_id
from nearkin.benchmark.results import append_result, merge, query_file, read_queries, read_results
from nearkin.benchmark.runner import Clock, bench, board, seconds_of
from nearkin.benchmark.suite import FOLDER, load_suite, suite_names
from nearkin.cli import app, main
from nearkin.cli.benchmark import parse_seeds
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.evaluation.metrics import by_class
from nearkin.files import read_json, write_json
from nearkin.training.run_folder import RunFolder
from tools import docs

TINY = """
title = "Tiny"
source = "made up"
backbone = "conv4"
seeds = 2
baseline = "PA"
spread = "standard error"
[settings]
dim = 16
epochs = 1
batch = 24
[data.glyphs]
read = "glyphs(classes=48, samples=6)"
metrics = ["R@1", "MAP@R"]
[[row]]
name = "PA"
method = "proxy_anchor"
paper.glyphs = { "R@1" = [50.0, 0.1] }
[[row]]
name = "C2"
method = "contrastive(form=c2)"
[[row]]
name = "Oracle"
paper.glyphs = { "R@1" = 99.9, "R@1 512-d" = 99.95 }
[[row]]
name = "Later"
method = "xbm(not_there_yet(k=3), size=8)"
"""


def written(folder, text=TINY, name="tiny"):
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A suite that was run to its end: its file, its folder, its board."""
    folder = tmp_path_factory.mktemp("bench")
    suite = written(folder)
    return suite, folder / "out", bench(suite, out=folder / "out", settings={"device": "cpu"})


# Suites.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('title = "Tiny"', 'titel = "Tiny"'), "no 'titel'.*'title'"),
        (('source = "made up"\n', ""), "source is missing"),
        (("seeds = 2", 'seeds = "two"'), "seeds is a whole number"),
        (("seeds = 2", "seeds = 0"), "at least 1"),
        (("epochs = 1", "epoch = 1"), "row 'PA', data glyphs: There is no setting 'epoch'.*'epochs'"),
        (("epochs = 1", 'epochs = "one"'), "epochs is a whole number"),
        (("epochs = 1", "epochs = 1\nseed = 3"), "seed is not a setting"),
        (('"MAP@R"]', '"MAP@r"]'), "no metric 'MAP@r'.*'MAP@R'"),
        (("form=c2", "form=c9"), "row 'C2'.*form is one of c1, c2"),
        (("form=c2", "shape=c2"), "row 'C2'.*no option 'shape'"),
        (('"contrastive(form=c2)"', '"contrastive(form=c2"'), "Cannot read"),
        (('name = "C2"', 'name = "PA"'), "two rows are called 'PA'"),
        (('name = "C2"', 'nane = "C2"'), "no 'nane'.*'name'"),
        (('baseline = "PA"', 'baseline = "PB"'), "baseline 'PB' is no row.*'PA'"),
        (('name = "C2"', 'name = "C2"\nbaseline = "PB"'), "baseline 'PB' is no row.*'PA'"),
        (('paper.glyphs = { "R@1" = 99.9', 'paper.glyph = { "R@1" = 99.9'), "paper.glyph is for no data set.*'glyphs'"),
        (("[50.0, 0.1]", '"fifty"'), "R@1 is a percentage"),
        (('spread = "standard error"\n', ""), "numbers have a spread"),
        (("[data.glyphs]", "[data.glyphs"), "cannot be read"),
        (("[data.glyphs]", "[figure]\nx = 'n'\nmetric = 'R@1'\n[data.glyphs]"), "no row has x"),
        (('name = "C2"', 'name = "C2"\nx = 3'), r"row 'C2' has x or series and the suite no \[figure\]"),
        (('name = "C2"', 'name = "C2"\nx = "3"'), "x is a number"),
    ],
)
def test_a_wrong_suite_is_one_sentence(tmp_path, change, sentence):
    assert change[0] in TINY
    with pytest.raises(NearkinError, match=sentence):
        expand(load_suite(written(tmp_path, TINY.replace(*change))))


CURVE = TINY.replace("[data.glyphs]", '[figure]\nx = "margin"\nmetric = "R@1"\nscale = "log"\n[data.glyphs]').replace(
    'name = "C2"', 'name = "C2"\nx = 0.5\nseries = "C"'
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('metric = "R@1"', 'metric = "R@2"'), "figure data.glyphs has no 'R@2'"),
        (('metric = "R@1"\n', ""), "metric is missing"),
        (('x = "margin"\n', ""), "figure x is missing"),
        (('"log"', '"square"'), "scale is one of log, linear"),
        (("x = 0.5", "x = 0"), "row 'C2' cannot stand at x = 0"),
        (("x = 0.5", "x = inf"), "row 'C2' cannot stand at x = inf"),
        (("x = 0.5\n", ""), "row 'C2' has a series but no x"),
        (
            ('name = "Oracle"', 'name = "Oracle"\nx = 0.5\nseries = "C"'),
            "rows 'C2' and 'Oracle' stand at the same x",
        ),
    ],
)
def test_a_wrong_figure_is_one_sentence(tmp_path, change, sentence):
    assert change[0] in CURVE
    with pytest.raises(NearkinError, match=sentence):
        load_suite(written(tmp_path, CURVE.replace(*change)))


def test_a_figure_is_read(tmp_path):
    suite = load_suite(written(tmp_path, CURVE))
    assert suite.figure == ("margin", "R@1", "log")
    assert [(row.x, row.series) for row in suite.rows.values()] == [(None, ""), (0.5, "C"), (None, ""), (None, "")]
    assert load_suite(written(tmp_path, CURVE.replace('scale = "log"\n', ""))).figure.scale == "linear"
    assert load_suite(written(tmp_path)).figure is None


BASE = """
backbone = "conv4"
seeds = 3
[settings]
dim = 16
epochs = 1
[define]
C2 = "contrastive(form=c2)"
loss.glyphs = "proxy_anchor"
[data.glyphs]
read = "glyphs(classes=48, samples=6)"
metrics = ["R@1"]
settings = { batch = 24 }
[data.unused]
metrics = ["R@1"]
"""
SWEEP = """
base = "base.toml"
title = "Sweep"
source = "made up"
seeds = 2
[figure]
x = "alpha"
metric = "R@1"
[settings]
epochs = 2
[data.glyphs]
[[row]]
name = "plain"
method = "{C2}"
[[row]]
each.alpha = ["4", "1e1"]
each.batch = [12, 24]
name = "alpha {alpha}, batch {batch}"
series = "batch {batch}"
x = "{alpha}"
method = "{loss}(alpha={alpha})"
settings = { batch = "{batch}" }
"""


def test_a_suite_completes_itself_from_its_base_and_repeats_rows(tmp_path):
    written(tmp_path, BASE, "base")
    suite = load_suite(written(tmp_path, SWEEP, "sweep"))
    assert (suite.backbone, suite.seeds, list(suite.parts)) == ("conv4", 2, ["glyphs"])
    assert suite.settings == {"backbone": "conv4", "dim": 16, "epochs": 2}
    assert suite.parts["glyphs"].settings == {"batch": 24}
    assert suite.rows["plain"].methods == {"glyphs": "contrastive(form=c2)"}
    names = ["alpha 4, batch 12", "alpha 4, batch 24", "alpha 1e1, batch 12", "alpha 1e1, batch 24"]
    assert list(suite.rows) == ["plain", *names]
    last = suite.rows[names[-1]]
    assert (last.methods, last.settings) == ({"glyphs": "proxy_anchor(alpha=1e1)"}, {"batch": 24})
    assert (last.x, last.series) == (10.0, "batch 24")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("{C2}", "{C3}"), r"row 'plain' nothing defines \{C3\}"),
        (('each.alpha = ["4", "1e1"]', "each.alpha = 4"), "each is a table of lists"),
        (('"base.toml"', '"nowhere.toml"'), "nowhere.toml cannot be read"),
    ],
)
def test_a_wrong_base_or_repetition_is_one_sentence(tmp_path, change, sentence):
    written(tmp_path, BASE, "base")
    with pytest.raises(NearkinError, match=sentence):
        load_suite(written(tmp_path, SWEEP.replace(*change), "sweep"))


def test_an_unknown_suite_names_the_nearest():
    with pytest.raises(NearkinError, match=r"no suite 'vcpa_table'.*Did you mean 'vcpa_table"):
        load_suite("vcpa_table")


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_of_the_package_can_be_spelt_out(name):
    """Settings are fields of Plan, known methods build with their options; a method to come is listed as missing."""
    suite = load_suite(name)
    sheet = expand(suite)
    runnable = {row.name for row in suite.rows.values() if row.methods}
    assert runnable
    assert {cell.row for cell in sheet.cells} == runnable - set(sheet.missing)
    assert not set(sheet.missing.values()) & {*nk.LOSSES, *nk.STRATEGIES}
    assert all(row.methods or row.paper for row in suite.rows.values())
    assert len(sheet.cells) == len({(c.row, c.data, c.seed) for c in sheet.cells})


def test_the_package_has_a_suite_for_every_table():
    wanted = {f"vcpa_table{n}" for n in range(1, 5)} | {f"vcpa_fig{n}" for n in range(3, 9)}
    wanted |= {"vcpa_glyphs", "vcpa_why", "vcpa_lite0", "claims_glyphs"}
    wanted |= {f"proxy_isa_table{n}" for n in range(1, 5)} | {f"ccp_table{n}" for n in range(2, 5)}
    wanted |= {f"mpa_table{n}" for n in range(4, 9)} | {"smoke", "cub_lite0"}
    wanted |= {f"profs_{name}" for name in ("table1", "fig1", "glyphs", "lite0")}
    wanted |= {f"proxy_isa_{name}" for name in ("fig9", "fig10a", "fig10b", "fig11", "lite0")}
    wanted |= {f"ccp_fig{n}" for n in range(4, 9)} | {"ccp_lite0"}
    assert set(suite_names()) == wanted
    project = FOLDER.parents[3] / "pyproject.toml"
    if project.exists():
        assert "suites/*.toml" in project.read_text()


# Typed from the papers by hand, not from the files: (suite, row, data set, metric, value, spread).
PUBLISHED = [
    ("vcpa_table1", "VCPA", "cub", "R@1", 69.9, None),
    ("vcpa_table1", "VCPA", "inshop", "R@40", 99.1, None),
    ("vcpa_table1", "PA", "sop", "R@1000", 98.7, None),
    ("vcpa_table1", "HDC", "cars", "R@8", 93.8, None),
    ("vcpa_table1", "DR-MS", "inshop", "R@1", 91.7, None),
    ("vcpa_table1", "RLL-H", "sop", "R@100", 95.4, None),
    ("vcpa_table2", "PA", "cub", "R@1", 68.04, 0.08),
    ("vcpa_table2", "VCPA", "cars", "R@1", 86.58, 0.09),
    ("vcpa_table3", "PA, 448 px", "cub", "R@1", 77.3, None),
    ("vcpa_table3", "VCPA, 324 px", "cub", "R@1", 74.9, None),
    ("vcpa_table4", "VCPA", "cub", "R@8", 92.15, 0.04),
    ("vcpa_table4", "PA", "cars", "R@2", 91.71, 0.18),
    ("vcpa_fig3", "VCPA, 10 %", "cub", "R@1", 58.6, None),
    ("vcpa_fig3", "RandHead", "cars", "R@1", 43.3, None),
    ("vcpa_fig3", "IncepFeat", "cub", "R@1", 54.7, None),
    ("proxy_isa_table1", "Proxy-ISA", "inshop", "R@1", 92.3, None),
    ("proxy_isa_table1", "Proxy-Anchor", "cub", "R@1", 66.6, None),
    ("proxy_isa_table2", "Proxy-ISA", "cars", "MAP@R", 29.3, 0.2),
    ("proxy_isa_table2", "CosFace", "cub", "MAP@R", 26.7, 0.2),
    ("proxy_isa_table3", "1/E both", "cars", "R@1", 71.4, None),
    ("proxy_isa_table3", "sigma and 1/E", "cars", "MAP@R", 29.3, None),
    ("proxy_isa_table4", "Proxy-ISA", "sop", "R@1", 79.3, None),
    ("ccp_table2", "C2-CCP-L", "cub", "MAP@R", 22.67, None),
    ("ccp_table2", "C2-CCP-L", "cub", "MAP@R 512-d", 28.02, None),
    ("ccp_table2", "C1", "sop", "P@1", 64.96, None),
    ("ccp_table2", "C2-XBM-L", "inshop", "P@R", 59.78, None),
    ("ccp_table2", "MS-CCP-L", "cars", "P@R 512-d", 38.97, None),
    ("ccp_lite0", "MS", "cub", "MAP@R", 19.64, None),
    ("ccp_lite0", "SoftTriple", "cub", "P@R 512-d", 36.98, None),
    ("ccp_table2", "MS-CCP-L", "inshop", "MAP@R 512-d", 63.59, None),
    ("ccp_table2", "ProxyAnchor", "cars", "P@1 512-d", 85.29, None),
    ("ccp_table3", "C2-CCP-L", "sop", "R@1", 80.01, None),
    ("ccp_table3", "Margin-S2SD", "cars", "R@1", 87.3, None),
    ("ccp_table4", "MS-CCP-L", "cars", "R@1", 89.02, None),
    ("ccp_table4", "C1-XBM", "inshop", "R@1", 91.3, None),
    ("mpa_table4", "MPA", "cub", "nDCG@8", 61.3, None),
    ("mpa_table4", "ProxyAnchor (retrained)", "cub", "MAP@R", 26.7, None),
    ("mpa_table5", "MPA-AP", "cars", "R@1", 87.1, None),
    ("mpa_table6", "SoftTriple (retrained)", "sop", "nDCG@100", 70.7, None),
    ("mpa_table7", "K = 12", "cub", "R@1", 69.3, None),
    ("mpa_table8", "K = 16", "cars", "nDCG@8", 78.0, None),
    ("profs_table1", "M-PROFS-HNCM", "sop", "R@1", 76.3, None),
    ("profs_table1", "N-PROFS", "cub", "R@8", 87.7, None),
    ("profs_table1", "C-PROFS", "cars", "F1", 39.0, None),
    ("profs_table1", "Proxy-NCA", "cub", "NMI", 64.2, None),
    ("profs_lite0", "L-PROFS-HNCM", "cub", "R@4", 76.7, None),
    ("profs_lite0", "Triplet-Semi", "cub", "F1", 27.8, None),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "row", "data", "metric", "value", "spread"), PUBLISHED)
def test_published_numbers_are_the_papers(suite, row, data, metric, value, spread):
    assert load_suite(suite).rows[row].paper[data][metric] == (value, spread)


def test_numbers_that_no_text_prints_are_not_there():
    for name in ("vcpa_fig4", "vcpa_fig5", "vcpa_fig6", "vcpa_fig7", "vcpa_fig8"):
        assert not any(row.paper for row in load_suite(name).rows.values())
    printed = {row.name for row in load_suite("vcpa_fig3").rows.values() if row.paper}
    assert printed == {"IncepFeat", "RandHead", "PA, 10 %", "VCPA, 10 %"}
    assert "inshop" not in load_suite("vcpa_table1").rows["Margin"].paper


@pytest.mark.parametrize("name", ["smoke", "cub_lite0"])
def test_every_method_has_a_row(name):
    sheet = expand(load_suite(name))
    assert {c.description["method"].split("(")[0] for c in sheet.cells} == {*nk.LOSSES, *nk.STRATEGIES}


# Ids.


def test_an_id_is_what_decides_the_outcome():
    base = {"backbone": "conv4", "method": "proxy_anchor", "seed": 0, "epochs": 2, "lr": 1e-4}

    def key(data="glyphs", **more):
        return run_id(describe({**base, **more}, data=data))

    same = [{"device": "auto"}, {"compile": True}, {"evaluate_every": 1}, {"metrics": ("R@1",)}]
    same += [{"tensorboard": True}, {"snapshots": "0,1"}]
    same += [{"method": "proxy_anchor(alpha=32)"}, {"size": 32}, {"images_per_class": 0}, {"space": "cosine"}]
    same += [{"head_lr": 1e-4}, {"lr": 1e-4}, {"clip_value": 10}]
    assert {key(**more) for more in same} == {key()}
    other = [{"seed": 1}, {"epochs": 3}, {"method": "proxy_anchor(alpha=16)"}, {"size": 64}, {"images_per_class": 2}]
    other += [{"space": "ball"}, {"head_lr": 1e-3}, {"lr": 1e-3}, {"data": "cub"}, {"weights": "none"}]
    assert len({key(), *(key(**more) for more in other)}) == len(other) + 1


def test_a_setting_to_come_leaves_older_ids_as_they_are():
    assert run_id({"seed": 1, "rate": 0.0, "kind": "", "flag": False}) == run_id({"seed": 1})
    assert run_id({"seed": 1, "rate": 0.5}) != run_id({"seed": 1}) != run_id({"seed": 0})


def test_weights_from_a_file_count_by_their_content(tmp_path):
    base = {"backbone": "conv4", "method": "proxy_anchor", "seed": 0}
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w.pth").write_bytes(content)
    a, b, c = (run_id(describe({**base, "weights": str(tmp_path / f / "w.pth")}, data="glyphs")) for f in "abc")
    assert a == b != c
    with pytest.raises(NearkinError, match="no file"):
        describe({**base, "weights": str(tmp_path / "none.pth")}, data="glyphs")


@pytest.mark.parametrize(("text", "seeds"), [("3", 3), ("0,1,2", [0, 1, 2]), ("5,", [5]), ("0,", [0])])
def test_seeds_are_how_many_or_which(text, seeds):
    assert parse_seeds(text) == seeds


TRAINING = {"cub": 5_864, "cars": 8_054, "sop": 59_551, "inshop": 25_882}


def test_what_a_suite_lets_begin_later_begins_within_its_training():
    late = {}
    for name in suite_names():
        for cell in expand(load_suite(name), seeds=1).cells:
            start = re.search(r"start=(\d+)", cell.description["method"])
            if start and cell.data in TRAINING:
                folds = cell.description.get("folds", 0)
                images = TRAINING[cell.data] * (1 - 1 / folds if folds else 1)
                steps = cell.description["epochs"] * int(images) // cell.description["batch"]
                late[name, cell.row] = int(start[1]) / steps
    assert len(late) >= 5
    assert all(part < 0.5 for part in late.values()), late


def test_seeds_come_first(tmp_path):
    sheet = expand(load_suite(written(tmp_path)))
    assert [(c.seed, c.row) for c in sheet.cells] == [(0, "PA"), (0, "C2"), (1, "PA"), (1, "C2")]
    assert sheet.missing == {"Later": "not_there_yet"}
    assert [c.seed for c in expand(load_suite(written(tmp_path)), seeds=[7, 3], rows=["C2"]).cells] == [7, 3]
    with pytest.raises(NearkinError, match="Seeds are different"):
        expand(load_suite(written(tmp_path)), seeds=[1, 1])
    with pytest.raises(NearkinError, match=r"no row 'C3'.*'C2'"):
        expand(load_suite(written(tmp_path)), rows=["C3"])
    assert list(expand(load_suite(written(tmp_path)), rows=["C2"]).suite.rows) == ["C2"]


def test_settings_for_all_rows_beat_the_suite_but_do_not_melt_its_rows(tmp_path):
    sizes = TINY + '[[row]]\nname = "64"\nmethod = "proxy_anchor"\nsettings = { size = 64 }\n'
    suite = load_suite(written(tmp_path, sizes))
    assert {c.description["epochs"] for c in expand(suite, settings={"epochs": 9}).cells} == {9}
    with pytest.raises(NearkinError, match="With size set for all rows, 'PA' and '64' are the same run"):
        expand(suite, settings={"size": 48})
    with pytest.raises(NearkinError, match="no setting 'epoch'"):
        expand(suite, settings={"epoch": 9})


# Running.


def test_a_suite_runs_every_row_with_every_seed_as_train_alone_does(done, tmp_path):
    _, out, result = done
    assert not result.stopped
    assert not result.failed
    assert len(result.results) == 4
    cell = next(c for c in result.sheet.cells if (c.row, c.seed) == ("C2", 1))
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
    for key, record in result.results.items():
        queries = read_queries(query_file(out, key))
        assert len(queries.labels) == 24 * 6
        for metric in ("R@1", "MAP@R"):
            assert float(queries.values[metric].mean()) == pytest.approx(record["scores"][metric], abs=1e-3)
        assert len(by_class(queries.values["R@1"], queries.labels)[0]) == 24


def test_finished_runs_are_skipped_and_shared_with_other_suites(done, tmp_path, monkeypatch):
    suite, out, _ = done
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    again = bench(suite, out=out, settings={"device": "cpu"})
    assert len(again.results) == 4
    other = TINY.replace('name = "C2"', 'name = "the same under another name"').replace("seeds = 2", "seeds = 1")
    shared = bench(written(tmp_path, other, "other"), out=out)
    assert {c.id for c in shared.sheet.cells} <= set(again.results)
    folders = [p.name for p in (out / "runs").iterdir()]
    assert sorted(folders) == sorted(again.results)
    assert not any(RunFolder(out / "runs" / name).checkpoint.exists() for name in folders)


def test_a_metric_that_was_not_measured_is_measured_without_training(done, tmp_path, monkeypatch):
    _, out, _ = done
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    more = written(tmp_path, TINY.replace('"MAP@R"]', '"P@3"]').replace("seeds = 2", "seeds = 1"), "more")
    assert not any("P@3" in r["scores"] for r in board(more, out=out).results.values())
    found = bench(more, out=out, rows=["PA"])
    record = found.results[found.sheet.cells[0].id]
    assert 0 <= record["scores"]["P@3"] <= 100
    assert record["wall"] > 0
    assert len(read_results(out / "results.jsonl")) == 4


def test_results_carried_here_without_their_folders_count(done, tmp_path, monkeypatch):
    suite, out, _ = done
    append_all(tmp_path / "here" / "results.jsonl", read_results(out / "results.jsonl").values())
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    assert len(bench(suite, out=tmp_path / "here").results) == 4


def append_all(path, records):
    for record in records:
        append_result(path, record)


def test_a_killed_suite_goes_on_where_it_was(tmp_path):
    suite = written(tmp_path, TINY.replace("epochs = 1", "epochs = 8").replace("seeds = 2", "seeds = 1"))
    out = tmp_path / "out"
    program = (
        "import importlib, sys; importlib.import_module('nearkin.training.loop').SAVE_SECONDS = 0;"
        "from nearkin.bench import bench;"
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
    (record,) = moved.results.values()
    whole = bench(suite, out=tmp_path / "whole", rows=["PA"], settings={"device": "cpu"})
    assert record["scores"] == next(iter(whole.results.values()))["scores"]
    assert record["wall"] is None, "a run made in two sittings has no honest wall time"
    assert len(began) < 8


def test_a_run_finished_but_not_written_down_is_only_written_down(done, tmp_path, monkeypatch):
    suite, _, first = done
    out = tmp_path / "out"
    bench(suite, out=out, rows=["PA"], seeds=1, settings={"device": "cpu"})
    (out / "results.jsonl").unlink()
    monkeypatch.setattr(module, "train", lambda **_: pytest.fail("trained again"))
    found = bench(suite, out=out, rows=["PA"], seeds=1)
    key = found.sheet.cells[0].id
    assert found.results[key]["scores"] == first.results[key]["scores"] | found.results[key]["scores"]


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    bad = TINY.replace('method = "contrastive(form=c2)"', 'method = "proxy_anchor"\nsettings = { batch = 5000 }')
    found = bench(written(tmp_path, bad), out=tmp_path / "out", seeds=1, queries=False, settings={"device": "cpu"})
    assert len(found.results) == 1
    assert "A batch of 5000" in found.failed[found.sheet.cells[1].id]
    assert not (tmp_path / "out" / "queries").exists()
    with pytest.raises(NearkinError, match=r"No run of tiny could be made.*A batch of 5000"):
        bench(written(tmp_path, bad), out=tmp_path / "other", rows=["C2"], seeds=1, settings={"device": "cpu"})


def test_where_the_data_lie(tmp_path):
    away = written(
        tmp_path, TINY.replace("[data.glyphs]\nread = ", "[data.cub]\n#").replace("paper.glyphs", "paper.cub")
    )
    with pytest.raises(NearkinError, match=r"Say where the data of tiny lie.*cub:PATH"):
        bench(away, out=tmp_path / "out")
    with pytest.raises(NearkinError, match=r"no data set 'cup'.*'cub'"):
        bench(away, out=tmp_path / "out", data=["cup:/somewhere"])
    with pytest.raises(NearkinError, match="write NAME:PATH"):
        bench(away, out=tmp_path / "out", data=["cub"])
    with pytest.raises(NearkinError, match=r"No run of tiny could be made.*nowhere"):
        bench(away, out=tmp_path / "out", data={"cub": tmp_path / "nowhere"})


# Budget.


def test_a_budget_is_read():
    assert [seconds_of(b) for b in ("25m", "90s", "1h30m", "2h", "45", 7.5)] == [1500, 90, 5400, 7200, 45, 7.5]
    for wrong in ("", "soon", "5d", "m", "-3m"):
        with pytest.raises(NearkinError, match="Cannot read the budget"):
            seconds_of(wrong)
    assert Clock(None).allows(1e12)
    assert Clock(10.0).allows(5)
    assert not Clock(10.0).allows(15)
    assert not Clock(0.0).allows(0)


def test_a_run_that_would_not_fit_is_not_begun(done, tmp_path):
    suite, _, first = done
    records = list(first.results.values())
    slow = [{**r, "wall": 1000.0} for r in records if r["seed"] == 0]
    append_all(tmp_path / "out" / "results.jsonl", slow)
    found = bench(suite, out=tmp_path / "out", budget="15m", settings={"device": "cpu"})
    assert found.stopped == "the budget does not hold another run; 2 are left"
    assert len(found.results) == 2
    assert not (tmp_path / "out" / "runs").exists()
    compiling = [{**r, "wall": wall} for r, wall in zip(slow, (1000.0, 1.0), strict=True)]  # the first of a sitting
    append_all(tmp_path / "first" / "results.jsonl", compiling)
    assert not bench(suite, out=tmp_path / "first", rows=["PA"], budget="15m", settings={"device": "cpu"}).stopped
    elsewhere = [{**r, "hardware": "an abacus"} for r in slow]
    append_all(tmp_path / "else" / "results.jsonl", elsewhere)
    assert not bench(suite, out=tmp_path / "else", rows=["PA"], budget="15m", settings={"device": "cpu"}).stopped


def test_out_of_time_leaves_a_run_that_goes_on(tmp_path):
    suite = written(tmp_path, TINY.replace("epochs = 1", "epochs = 100000"))
    out = tmp_path / "out"
    usual = signal.getsignal(signal.SIGINT)
    first = bench(suite, out=out, budget="4s", settings={"device": "cpu"})
    assert first.stopped == "the budget is spent; 4 runs are left, the first of them begun"
    assert not first.results
    folder = RunFolder(out / "runs" / first.sheet.cells[0].id)
    assert folder.checkpoint.exists()
    epochs = [e for e in folder.events() if e["event"] == "epoch"]
    config = read_json(folder.config)  # as if it had been begun on another machine
    write_json(folder.config, {**config, "plan": {**config["plan"], "data": "folder:/elsewhere", "device": "cuda:7"}})
    bench(suite, out=out, budget="3s", settings={"device": "cpu"})
    assert len([e for e in folder.events() if e["event"] == "epoch"]) > len(epochs) > 0
    assert [p.name for p in (out / "runs").iterdir()] == [first.sheet.cells[0].id]
    assert signal.getsignal(signal.SIGINT) is usual


def test_ctrl_c_is_not_taken_for_the_budget(tmp_path, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(written(tmp_path), out=tmp_path / "out", budget="1h")


def test_progress_is_told(tmp_path, capsys):
    from rich.console import Console

    bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1, reporter=Reporter(Console()))
    assert "[1/1] glyphs: PA, seed 0" in capsys.readouterr().out


def test_the_command_says_by_its_exit_code_that_a_run_failed(tmp_path, monkeypatch):
    bad = TINY.replace('method = "contrastive(form=c2)"', 'method = "proxy_anchor"\nsettings = { batch = 5000 }')
    words = ["nearkin", "bench", str(written(tmp_path, bad)), "--out", str(tmp_path / "out"), "--seeds", "1"]
    codes = []
    for rows in (["--rows", "PA"], []):
        monkeypatch.setattr(sys, "argv", [*words, *rows, "--set", "device=cpu"])
        with pytest.raises(SystemExit) as stopped:
            main()
        codes.append(stopped.value.code)
    assert codes == [0, 1]


def test_a_data_set_without_metrics_is_refused(tmp_path):
    none = re.sub(r"metrics = \[.*?\]", "metrics = []", TINY)
    with pytest.raises(NearkinError, match="metrics is empty"):
        load_suite(written(tmp_path, none))


def test_only_where_vectors_keep_their_length_is_a_short_start_part_of_a_run():
    def of(method, **more):
        return describe({"backbone": "conv4", "method": method, **more}, data="glyphs")

    assert of("n_pair")["short_start"]
    assert not of("n_pair", short_start=False)["short_start"]
    assert run_id(of("n_pair")) != run_id(of("n_pair", short_start=False))
    assert run_id(of("proxy_anchor")) == run_id(of("proxy_anchor", short_start=False))


def test_two_sittings_in_one_folder_are_refused(tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NearkinError, match="Another process is writing to"):
            bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1)
    assert bench(written(tmp_path), out=tmp_path / "out", rows=["PA"], seeds=1).results


# Results.


def test_a_line_cut_short_is_forgotten_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a", 1), run_line("b", 2)])
    with path.open("a") as file:
        file.write('{"id": "c", "v"')
    assert list(read_results(path)) == ["a", "b"]
    append_result(path, run_line("a", 3))
    assert [r["seed"] for r in read_results(path).values()] == [3, 2]
    assert path.read_text().count("\n") == 3
    assert read_results(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize(
    "line", [b"what is this", b'{"id": "abc"}', b'{"id": 1, "seed": 0, "scores": 3}', b"[1]", b"\xff{}"]
)
def test_a_line_that_is_no_run_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a")])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(NearkinError, match="Line 2 of"):
        merge([path], tmp_path / "out.jsonl")


def test_a_run_without_the_last_newline_is_a_run(tmp_path):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a"), run_line("b")])
    path.write_text(path.read_text().rstrip("\n"))
    assert list(read_results(path)) == ["a", "b"]
    append_result(path, run_line("c"))
    assert list(read_results(path)) == ["a", "b", "c"]


def run_line(key, seed=0, *, hardware="CPU", **scores):
    scores = {name.replace("_", "@"): value for name, value in scores.items()}
    return {"id": key, "data": "cub", "method": "proxy_anchor", "seed": seed, "hardware": hardware, "scores": scores}


def test_results_of_two_machines_are_merged(tmp_path):
    append_all(tmp_path / "a" / "results.jsonl", [run_line("x", R_1=60.0), run_line("y", 1, R_1=61.0)])
    append_all(
        tmp_path / "b" / "results.jsonl",
        [run_line("y", 1, R_1=61.0, R_2=70.0), run_line("z", 2, R_1=62.0), run_line("x", hardware="GPU", R_1=59.0)],
    )
    (tmp_path / "b" / "queries").mkdir()
    (tmp_path / "b" / "queries" / "z.safetensors").write_bytes(b"values")
    merged = merge(
        [tmp_path / "a" / "results.jsonl", tmp_path / "b" / "results.jsonl"], tmp_path / "c" / "results.jsonl"
    )
    assert merged.runs == 3
    (sentence,) = merged.conflicts
    assert "proxy_anchor on cub with seed 0: R@1 60.00 (CPU) is kept and 59.00 (GPU)" in sentence
    found = read_results(tmp_path / "c" / "results.jsonl")
    assert found["x"]["scores"] == {"R@1": 60.0}
    assert found["y"]["scores"] == {"R@1": 61.0, "R@2": 70.0}
    assert (tmp_path / "c" / "queries" / "z.safetensors").read_bytes() == b"values"
    again = merge(
        [tmp_path / "c" / "results.jsonl", tmp_path / "a" / "results.jsonl"], tmp_path / "c" / "results.jsonl"
    )
    assert again == (3, ())
    with pytest.raises(NearkinError, match="no results file"):
        merge([tmp_path / "d.jsonl"], tmp_path / "c" / "results.jsonl")


def test_a_suite_file_is_no_python(tmp_path):
    assert all(path.suffix in (".toml", ".py") or path.is_dir() for path in Path(FOLDER).iterdir())


# The page about it.

PAGE = (Path(nk.__file__).parents[2] / "docs" / "benchmark.md").read_text()


def test_the_page_lists_the_suites():
    assert docs.fill(PAGE, "suites", docs.suites_table()) == PAGE, "run python -m nearkin.report.docs"


def test_the_suite_on_the_page_is_one(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    sheet = expand(load_suite(written(tmp_path, block, "mine")))
    assert len(sheet.cells) == 3 * 3
    assert not sheet.missing
    assert sheet.suite.figure.x == "margin"


def test_the_commands_on_the_page_are_understood():
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    commands = typer.main.get_command(app).commands
    assert {words[1] for words in lines} == {"bench", "merge", "report", "train"}
    for program, name, *words in lines:
        assert program == "nearkin"
        given = commands[name].make_context(name, list(words)).params  # an unknown option is an error here
        if given.get("suite"):
            suite = load_suite(given["suite"])
            assert {text.split(":")[0] for text in given["data"] or ()} <= set(suite.parts)
            assert set(given["rows"] or ()) <= set(suite.rows)
