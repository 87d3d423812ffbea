"""The ranking of a sorted suite: its rows, their order, and the ends of the axis."""

import re

import pytest

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import load_suite
from nearkin.benchmark.tables import suite_tables
from nearkin.report.suite_figures import RankedRow, SuiteRanking, draw_ranking, ranking, write_figures

SCORES = {"proxy_anchor": (23.0, 23.4, 23.2), "arcface": (25.0, 25.4, 25.3), "lifted": (5.0, 4.0), "margin": (20.0,)}


def suite_results(scores, suite="cub_lite0", before=(15.0, 15.0, 15.0)):
    planned = plan_suite(load_suite(suite), seeds=3)
    results = {
        cell.id: {
            "id": cell.id,
            "seed": cell.seed,
            "scores": {"MAP@R": values[cell.seed]},
            "before": {"MAP@R": before[cell.seed]},
            "select": "last",
            "seconds": 1.0,
            "commit": "0123",
            "hardware": "One GPU",
            "precision": "bf16",
            "versions": {"torch": "2.11"},
            "settings": cell.description,
        }
        for cell in planned.runs
        for values in [scores.get(cell.row, ())]
        if cell.seed < len(values)
    }
    return SuiteResults(planned, results, {}, (), "")


def drawn(found):
    (plot,) = draw_ranking(found, metric="MAP@R", title="A title").axes
    return plot


def test_rows_are_ranked_by_mean():
    measured = suite_results(SCORES)
    found = ranking(measured, measured.planned.suite.data["cub"])
    assert [row.name for row in found.rows] == ["arcface", "proxy_anchor", "margin", "lifted"]
    assert found.rows[3].scores == [5.0, 4.0]
    assert found.base == pytest.approx(23.2)
    assert found.untrained == 15.0


def test_marks_match_the_table():
    measured = suite_results(SCORES | {"lifted": (5.0, 3.5)}, before=(15.0, 22.0, 18.0))
    (table,) = suite_tables(measured)
    column = table.header.index("MAP@R")
    shown = {row[0]: re.sub("[^↑↓]", "", row[column]) for row in table.cells}
    marks = {row.name: row.mark.strip() for row in ranking(measured, measured.planned.suite.data["cub"]).rows}
    assert marks == {name: shown[name] for name in marks}
    assert marks == {
        "arcface": "↑",
        "proxy_anchor": "",
        "margin": "",
        "lifted": "",
    }


def test_no_line_without_a_baseline():
    measured = suite_results({"arcface": (25.0,), "margin": (20.0,)})
    found = ranking(measured, measured.planned.suite.data["cub"])
    assert (found.base, found.untrained) == (None, None)
    assert drawn(found).get_xlim()[0] < 20


def test_a_dot_for_each_seed_in_order_from_the_top():
    plot = drawn(SuiteRanking([RankedRow("a", [24.0, 25.0], " ↑"), RankedRow("b", [23.0], "")], 23.0, 15.0))
    assert [label.get_text() for label in plot.get_yticklabels()] == ["a ↑", "b"]
    top, bottom = (next(line for line in plot.lines if list(line.get_ydata()) == [y] * n) for y, n in ((0, 2), (1, 1)))
    assert list(top.get_xdata()) == [24.0, 25.0]
    assert list(bottom.get_xdata()) == [23.0]
    assert plot.yaxis_inverted()


def test_means_below_the_untrained_network_are_written_at_the_edge():
    plot = drawn(SuiteRanking([RankedRow("a", [24.0, 25.0], ""), RankedRow("b", [0.1, 0.3], "")], 24.5, 15.0))
    assert 10 < plot.get_xlim()[0] < 15
    assert "◂ 0.2" in [text.get_text().strip() for text in plot.texts]
    assert all(x >= plot.get_xlim()[0] for line in plot.lines for x in line.get_xdata())


def test_a_ranking_needs_two_rows(tmp_path):
    assert write_figures(suite_results({"arcface": (25.0,)}), tmp_path) == []
    names = [path.name for path in write_figures(suite_results(SCORES), tmp_path)]
    assert names == ["cub_lite0-cub.png", "cub_lite0-cub.svg"]
    assert write_figures(suite_results({"PA": (20.0,), "VCPA, tau 0.01": (21.0,)}, suite="vcpa_lite0"), tmp_path) == []
