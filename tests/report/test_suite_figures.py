"""Figures of suites from made-up results: curves and captions, ranked rows, files, and the command."""

import sys

import pytest
from PIL import Image

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import load_suite
from nearkin.cli import main
from nearkin.files import append_line
from nearkin.report.suite_figures import curves, write_figures, write_suite

SUITE = """
title = "How many proxies"
source = "A paper, Fig. 2"
backbone = "bn_inception"
seeds = 2
[figure]
x = "K"
scale = "log"
metric = "R@1"
[data.cub]
metrics = ["R@1", "MAP@R"]
[data.sop]
metrics = ["R@1"]
[[row]]
name = "K = 8"
method.cub = "mpa(per_class=8)"
x = 8
series = "mpa"
paper.cub = { "R@1" = 69.1 }
[[row]]
name = "K = 2"
method.cub = "mpa(per_class=2)"
x = 2
series = "mpa"
[[row]]
name = "S, K = 2"
method.cub = "soft_triple(per_class=2)"
x = 2
series = "soft triple"
[[row]]
name = "PA"
method.cub = "proxy_anchor"
[[row]]
name = "Quoted"
paper.cub = { "R@1" = 50.0 }
[[row]]
name = "Far"
x = 3
method.sop = "mpa"
"""

R1 = {"K = 8": (66.0, 67.0), "K = 2": (64.0,), "S, K = 2": (61.0, 61.5), "PA": (65.0, 66.0)}


def suite_results(tmp_path, r1=R1):
    path = tmp_path / "proxies.toml"
    path.write_text(SUITE)
    planned = plan_suite(load_suite(path))
    results = {}
    for cell in planned.runs:
        values = r1.get(cell.row, ())
        if cell.seed < len(values):
            results[cell.id] = {
                "scores": {"R@1": values[cell.seed], "MAP@R": 1.0},
                "settings": {"backbone": "lite0", "weights": "default", "size": 224, "dim": 512},
                "select": "last",
                "seed": cell.seed,
                "seconds": 9.0,
                "commit": "c",
                "hardware": "h",
                "precision": "bf16",
                "versions": {"torch": "2"},
            }
    return SuiteResults(planned, results, {}, (), "")


def test_points_lines_and_paper_numbers(tmp_path):
    made = suite_results(tmp_path)
    suite = made.planned.suite
    found = curves(made, suite.data["cub"], suite.figure)
    assert {name: [p.x for p in points] for name, points in found.series.items()} == {
        "mpa": [2, 8],
        "soft triple": [2],
    }
    two, eight = found.series["mpa"]
    assert (two.ours.n, two.ours.mean, two.paper) == (1, 64.0, None)
    assert (eight.ours.n, eight.ours.mean, eight.paper) == (2, 66.5, 69.1)
    assert eight.ours.error == pytest.approx(0.5)
    assert [(p.name, p.ours.n, p.paper) for p in found.lines] == [("PA", 2, None), ("Quoted", 0, 50.0)]
    assert "mean over 1 to 2 seeds, bars are the standard error" in found.caption
    assert "lite0" in found.caption
    assert "epoch: the last epoch" in found.caption
    assert "the paper's numbers (bn_inception)" in found.caption
    assert curves(made, suite.data["sop"], suite.figure).series == {"ours": [found_far(made)]}


def found_far(made):
    dataset = made.planned.suite.data["sop"]
    (point,) = curves(made, dataset, made.planned.suite.figure).series["ours"]
    assert (point.name, point.ours.n) == ("Far", 0)
    return point


def drawn(figure):
    """The artists of a drawn figure by label."""
    (plot,) = figure.axes
    handles, labels = plot.get_legend_handles_labels()
    return plot, dict(zip(labels, handles, strict=True))


def test_the_figure_shows_the_numbers(tmp_path, monkeypatch):
    import nearkin.report.suite_figures as module

    kept = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: kept.append(figure) or path)
    write_figures(suite_results(tmp_path), tmp_path)
    plot, artists = drawn(kept[0])
    assert plot.get_xscale() == "log"
    assert (plot.get_xlabel(), plot.get_ylabel()) == ("K", "R@1, percent")
    assert [tick.get_text() for tick in plot.get_xticklabels()] == ["2", "8"]
    assert set(artists) == {"mpa", "mpa, paper", "soft triple", "PA", "Quoted, paper"}
    line, _, bars = artists["mpa"].lines
    assert line.get_xydata().tolist() == [[2, 64.0], [8, 66.5]]
    ends = [segment[:, 1].tolist() for segment in bars[0].get_segments()]
    assert ends == [[64.0, 64.0], [66.0, 67.0]]
    assert artists["mpa, paper"].get_xydata().tolist() == [[8, 69.1]]
    assert artists["PA"].get_ydata() == [65.5, 65.5]


def test_files_are_written_and_reproducible(tmp_path):
    made = suite_results(tmp_path)
    paths = write_suite(made, tmp_path / "out")
    assert [path.name for path in paths] == ["proxies.md", "proxies-cub.png", "proxies-cub.svg"]
    with Image.open(paths[1]) as picture:
        assert picture.width > 600
    first = [path.read_bytes() for path in paths]
    assert first[0].decode().startswith("# How many proxies (cub)")
    assert b"<svg" in first[2]
    assert [path.read_bytes() for path in write_suite(made, tmp_path / "again")] == first


def test_the_command_writes_and_names_the_files(tmp_path, monkeypatch, capsys):
    made = suite_results(tmp_path)
    for key, record in made.runs.items():
        append_line(tmp_path / "out" / "results.jsonl", {"id": key, **record})
    words = ["nearkin", "bench", str(tmp_path / "proxies.toml"), "--show", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, "--format", "markdown"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    said = capsys.readouterr()
    assert said.out.startswith("### How many proxies (cub)")
    for name in ("proxies.md", "proxies-cub.png", "proxies-cub.svg"):
        assert str(tmp_path / "out" / name) in said.err
        assert (tmp_path / "out" / name).exists()
    before = (tmp_path / "out" / "proxies.md").read_text()
    row = next(iter(made.planned.suite.rows))
    monkeypatch.setattr(sys, "argv", [*words, "--rows", row, "--format", "markdown"])
    with pytest.raises(SystemExit):
        main()
    names = {line.split(" | ")[0][2:] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    assert names == {"", "---", row}
    assert (tmp_path / "out" / "proxies.md").read_text() == before  # some rows do not replace the suite's table


def test_a_suite_without_results_writes_nothing(tmp_path):
    assert write_suite(suite_results(tmp_path, r1={}), tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
