"""The table of a suite from made-up results: means, marks, what is said beside them, and the three formats."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.results import Queries, query_file, write_queries
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import load_suite
from nearkin.benchmark.tables import suite_tables
from nearkin.console import latex, markdown, terminal
from nearkin.evaluation.statistics import holm, p_words, paired_bootstrap, paired_t

SUITE = """
title = "A & B"
source = "A paper, Table 7"
backbone = "bn_inception"
paper_select = "the best epoch on test"
spread = "standard deviation"
baseline = "PA"
seeds = 4
note = "take it with salt"
[settings]
epochs = 60
select = "test"
[data.cub]
metrics = ["R@1", "MAP@R"]
[data.sop]
metrics = ["R@1"]
[[row]]
name = "Quoted"
backbone = "resnet50"
dim = 128
paper.cub = { "R@1" = 63.6 }
[[row]]
name = "PA"
method = "proxy_anchor"
paper.cub = { "R@1" = [68.40, 0.1], "MAP@R" = 26.53 }
[[row]]
name = "Better_1"
method = "soft_triple"
paper.cub = { "R@1" = [69.9, 0.2] }
[[row]]
name = "Same"
method = "proxy_nca"
note = "no wonder"
[[row]]
name = "Worse"
method = "contrastive"
[[row]]
name = "Untrained"
method = "proxy_anchor"
scores = "before"
[[row]]
name = "One seed"
method = "triplet"
[[row]]
name = "Failing"
method = "margin"
[[row]]
name = "Absent"
method = "not_there_yet"
"""

R1 = {
    "PA": [66.0, 66.4, 65.8, 66.2],
    "Better_1": [67.0, 67.5, 66.9, 66.6],
    "Same": [66.3, 66.1, 66.0, 66.1],
    "Worse": [60.1, 60.4, 59.7, 60.2],
    "One seed": [70.0],
}


def record(cell, r1, *, backbone):
    scores = {"R@1": r1, "MAP@R": r1 - 40}
    return {
        "id": cell.id,
        "data": cell.data,
        "method": cell.description["method"],
        "seed": cell.seed,
        "scores": scores,
        "before": {"R@1": 12.5, "MAP@R": 2.5},
        "select": "test",
        "seconds": 100.0,
        "wall": 120.0 if cell.seed else None,
        "commit": "0123456789abcdef0123456789abcdef01234567+changes",
        "hardware": "One GPU",
        "precision": "bf16",
        "versions": {"torch": "2.11"},
        "settings": {**cell.description, "backbone": backbone},
    }


def made(tmp_path, *, text=SUITE, settings=None, backbone="lite0", r1=R1, **more):
    path = tmp_path / "made.toml"
    path.write_text(text)
    planned = plan_suite(load_suite(path), settings=settings)
    results = {}
    for cell in planned.runs:
        values = r1.get(cell.row, [])
        if cell.data == "cub" and cell.seed < len(values):
            results[cell.id] = record(cell, values[cell.seed], backbone=backbone)
    failed = {c.id: "The loss was nan at step 3." for c in planned.runs if c.row == "Failing" and c.seed == 0}
    return SuiteResults(planned, results, failed, **{"without_data": ("sop",), "stopped": "", **more})


def rows_of(table):
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.cells}


@pytest.fixture
def table(tmp_path):
    return suite_tables(made(tmp_path, settings={"backbone": "lite0", "device": "cpu"}))[0]


def test_published_numbers_are_shown_beside_ours_with_their_network(table):
    rows = rows_of(table)
    assert list(rows) == [
        "Quoted", "PA", "Better_1", "Same", "Worse", "Untrained", "One seed", "Failing", "Absent",
    ]  # fmt: skip
    assert rows["PA"]["R@1 paper"] == "68.40 ± 0.1"
    assert rows["PA"]["MAP@R paper"] == "26.53"
    assert rows["PA"]["paper's network"] == "bn_inception"
    assert rows["Quoted"]["paper's network"] == "resnet50, 128-d"
    assert rows["Quoted"]["R@1 paper"] == "63.60"
    assert rows["Quoted"]["R@1 ours"] == rows["Quoted"]["seeds"] == ""
    assert rows["Same"]["R@1 paper"] == rows["Same"]["paper's network"] == ""
    assert rows["Better_1"]["MAP@R paper"] == "–"
    error = stats.sem(R1["PA"])
    assert rows["PA"]["R@1 ours"] == f"66.10 ± {error:.2f}"
    assert rows["One seed"]["R@1 ours"] == "70.00"
    assert rows["Failing"]["R@1 ours"] == rows["Absent"]["R@1 ours"] == "–"
    assert (rows["PA"]["seeds"], rows["One seed"]["seeds"]) == ("4", "1")
    assert rows["PA"]["time"] == "2.0 min"  # the median of 100, 120, 120, 120 seconds
    assert rows["Untrained"]["R@1 ours"] == "12.50 ± 0.00 ↓"


def test_marks_come_from_a_corrected_test(table):
    rows = rows_of(table)
    assert rows["Better_1"]["R@1 ours"].endswith(" ↑")
    assert rows["Worse"]["R@1 ours"].endswith(" ↓")
    assert not re.search("[↑↓]", rows["Same"]["R@1 ours"] + rows["PA"]["R@1 ours"] + rows["One seed"]["R@1 ours"])
    column = "MAP@R less PA"
    p = {name: stats.ttest_rel(R1[name], R1["PA"]).pvalue for name in ("Better_1", "Same", "Worse")}
    p["Untrained"] = stats.ttest_rel([12.5] * 4, R1["PA"]).pvalue
    assert p["Same"] == max(p.values())
    assert f"p {p['Same']:.3f}" in rows["Same"][column]  # the largest of four is corrected by 1
    order = sorted(p, key=p.get)
    corrected = max(p[name] * (4 - place) for place, name in enumerate(order[: order.index("Better_1") + 1]))
    assert corrected == 2 * p["Better_1"]
    assert rows["Better_1"][column].startswith(f"+0.90 (p {corrected:.3f}, d ")
    assert rows["Better_1"]["95 %"] == "+0.36 to +1.44"
    assert rows["Worse"][column].startswith("−6.00 (p < 0.001")
    assert rows["One seed"][column] == rows["PA"][column] == rows["Quoted"][column] == "–"
    assert any("paired t-test" in note and "Holm" in note and "d_z" in note for note in table.notes)


def test_one_seed_gives_no_marks_and_no_claims(tmp_path):
    table = suite_tables(made(tmp_path, r1={"PA": [60.0], "Worse": [50.0]}))[0]
    assert not any(re.search("[↑↓]", cell) for row in table.cells for cell in row)
    assert not any("t-test" in note for note in table.notes)
    assert {row["MAP@R less PA"] for row in rows_of(table).values()} == {"–"}


def test_one_seed_in_common_compares_the_models_over_classes(tmp_path):
    results = made(tmp_path, r1={"PA": [60.0], "Worse": [50.0], "Same": [59.9]}, out=tmp_path)
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(20).repeat_interleave(6)
    values = {}
    for row, mean in (("PA", 20.0), ("Worse", 10.0), ("Same", 20.2)):
        cell = next(c for c in results.planned.runs if (c.row, c.data, c.seed) == (row, "cub", 0))
        values[row] = mean + torch.randn(120, generator=rng)
        write_queries(query_file(tmp_path, cell.id), Queries(labels, {"MAP@R": values[row]}))
    table = suite_tables(results)[0]
    tests = [paired_bootstrap(values[row], values["PA"], groups=labels) for row in ("Same", "Worse")]
    for row, test, p in zip(("Same", "Worse"), tests, holm([t.p for t in tests]), strict=True):
        expected = f"{test.difference:+.2f} (models: p {p_words(p)})".replace("-", "−")
        assert rows_of(table)[row]["MAP@R less PA"] == expected
        assert rows_of(table)[row]["95 %"] == f"{test.low:+.2f} to {test.high:+.2f}".replace("-", "−")
    assert p_words(tests[1].p) == "< 0.001"
    assert not any(re.search("[↑↓]", cell) for row in table.cells for cell in row)
    assert any("tells about these models, not about the methods" in note for note in table.notes)


def test_without_its_baseline_no_row_is_tested_and_a_note_says_so(tmp_path):
    table = suite_tables(made(tmp_path, r1={"Worse": [60.1, 60.4], "Same": [66.3, 66.1]}))[0]
    assert "Not measured, so no row is tested against it: PA." in table.notes
    assert not any("less PA" in name for name in table.header)


def test_a_row_is_tested_against_the_baseline_it_names_itself(tmp_path):
    text = SUITE.replace('name = "Same"\n', 'name = "Same"\nbaseline = "Worse"\n')
    table = suite_tables(made(tmp_path, text=text, r1={name: R1[name] for name in ("PA", "Same", "Worse")}))[0]
    rows = rows_of(table)
    tests = [paired_t(np.subtract(R1[a], 40), np.subtract(R1[b], 40)) for a, b in (("Same", "Worse"), ("Worse", "PA"))]
    for (name, base), test, p in zip(
        (("Same", "Worse"), ("Worse", "PA")), tests, holm([t.p for t in tests]), strict=True
    ):
        assert rows[name]["baseline"] == base
        expected = f"{test.difference:+.2f} (p {p_words(p)}, d {test.effect:.1f})".replace("-", "−")
        assert rows[name]["MAP@R less its baseline"] == expected
    assert "↑" in rows["Same"]["MAP@R ours"]
    assert "↓" in rows["Worse"]["MAP@R ours"]
    assert rows["PA"]["baseline"] == ""
    assert any("better or worse than its baseline" in note for note in table.notes)


def test_neutral_settings_are_not_called_a_change(tmp_path):
    table = suite_tables(made(tmp_path, settings={"device": "cpu", "compile": True, "tensorboard": True}))[0]
    assert not any("Changed for all rows" in note for note in table.notes)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_and_numbers_are_not_broken_in_a_narrow_terminal(table, width):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(terminal([table]))
    lines = captured.get().splitlines()
    assert all(len(line) <= width for line in lines)
    for row in table.cells:
        own = "\n".join(line for line in lines if line.startswith(row[0]))
        assert all(cell in own for cell in row), row


def test_the_notes_say_everything_needed_to_compare(table):
    notes = "\n".join(table.notes)
    assert "Source: A paper, Table 7." in notes
    assert "What chose the paper's epoch: the best epoch on test." in notes
    assert "± of the paper: standard deviation." in notes
    assert "Ours: lite0 (default weights); 224 px; 512-d; ± is the standard error over seeds 0, 1, 2, 3." in notes
    assert "What chose our epoch: the best ON THE TEST SET." in notes
    assert "Changed for all rows: backbone = lite0." in notes
    assert "Commit 0123456789ab+changes; One GPU, bf16; torch 2.11." in notes
    assert "Our network (lite0) is not the paper's (bn_inception)" in notes
    assert "Unknown methods: Absent (not_there_yet)." in notes
    assert "Failing failed: The loss was nan at step 3." in notes
    assert "6 of 24 runs are not finished" in notes  # triplet and margin with three seeds each
    assert "Same: no wonder." in notes
    assert "Take it with salt." in notes


def test_the_same_network_is_not_warned_about(tmp_path):
    table = suite_tables(made(tmp_path, backbone="bn_inception"))[0]
    assert not any("is not the paper's" in note for note in table.notes)


def test_a_data_set_without_a_path_says_so_and_shows_quoted_numbers(tmp_path):
    cub, sop = suite_tables(made(tmp_path, stopped="the budget is spent"))
    assert "is not finished" not in cub.title
    assert any("not finished: the budget is spent" in note for note in cub.notes)
    assert any("not finished: give sop:PATH" in note for note in sop.notes)
    assert sop.header == ["", "R@1"]
    assert {row[1] for row in sop.cells} == {"–"}
    assert "Quoted" not in rows_of(sop)


def test_sorting_by_our_mean_puts_unmeasured_rows_last(tmp_path):
    table = suite_tables(made(tmp_path, text='sort = "MAP@R"\n' + SUITE))[0]
    assert [row[0] for row in table.cells] == [
        "One seed", "Better_1", "Same", "PA", "Worse", "Untrained", "Quoted", "Failing", "Absent",
    ]  # fmt: skip


def test_formats_hold_the_same_cells(table):
    text = markdown([table], level=2)
    assert text.startswith("## A & B (cub)\n\n|  | paper's network | R@1 paper | R@1 ours |")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(table.cells)
    assert {line.count("|") for line in lines} == {len(table.header) + 1}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(terminal([table]))
    for row in table.cells:
        assert any(all(cell in line for cell in row) for line in captured.get().splitlines()), row
    tex = latex([table])
    assert r"\caption{A \& B (cub)." in tex
    assert r"Better\_1 & bn\_inception & 69.90 $\pm$ 0.2" in tex
    assert tex.count(r"\\") == 1 + len(table.cells)
    assert not re.search(r"(?<!\\)[_#]|[±↑↓–−]", tex)
    body = [line for line in tex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.header) - 1}


@pytest.mark.parametrize(("seconds", "words"), [(3.2, "3 s"), (99, "99 s"), (150, "2.5 min"), (36000, "10.0 h")])
def test_times_have_suitable_units(tmp_path, seconds, words):
    results = made(tmp_path)
    runs = {key: {**run, "wall": seconds} for key, run in results.runs.items()}
    assert rows_of(suite_tables(dataclasses.replace(results, runs=runs))[0])["PA"]["time"] == words
