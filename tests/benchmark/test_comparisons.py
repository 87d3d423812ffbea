"""Pairs of rows that suites without claims happen to compare."""

import pytest
from benchmark.made_results import fill

from nearkin.benchmark.comparisons import PAIRINGS, Pairing, compare, pairs
from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import load_suite
from tools.results_page import measured_suites

EVERY = "cub_lite0"
ANCHOR = (66.0, 66.4, 65.8, 66.2)


def measured(folder):
    return [found.results for found in measured_suites(folder)]


def named(words):
    return next(pairing for pairing in PAIRINGS if pairing.words == words)


def test_every_suite_is_used_on_rows_with_the_same_settings(tmp_path):
    fill(tmp_path, "proxy_isa_lite0", dict.fromkeys(load_suite("proxy_isa_lite0").rows, ANCHOR))
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR, "proxy_isa": (67.0, 67.5, 66.6, 67.0)})
    found = compare(named("Proxy-ISA and the loss that it weights"), measured(tmp_path))
    assert {(m.suite, m.row, m.base) for m in found} == {
        (EVERY, "proxy_isa", "proxy_anchor"),
        ("proxy_isa_lite0", "Proxy-ISA, fair", "Proxy-Anchor, fair"),
        ("proxy_isa_lite0", "Proxy-ISA, fair, the authors' code", "Proxy-Anchor, fair"),
        ("proxy_isa_lite0", "Proxy-ISA, exceptional", "Proxy-Anchor, exceptional"),
    }


def test_curves_and_suites_with_claims_are_left_out(tmp_path):
    fill(tmp_path, "vcpa_fig4", {"PA, batch 30": ANCHOR, "VCPA, batch 30": ANCHOR})
    fill(tmp_path, "vcpa_claims", {"Proxy-Anchor": ANCHOR, "VCPA": ANCHOR})
    assert compare(PAIRINGS[0], measured(tmp_path)) == []


def test_variants_of_a_method_are_left_out():
    suite = load_suite("vcpa_why")
    variants = {name for name, row in suite.rows.items() if row.variant}
    assert "vcpa, first order" in variants
    results = SuiteResults(plan_suite(suite), {}, {}, (), "")
    found = {row for row, _ in pairs(PAIRINGS[0], results, suite.data["glyphs"])}
    assert found == {name for name in suite.rows if name.startswith("vcpa")} - variants


@pytest.mark.parametrize("paper", ["CCP", "PROFS"])
def test_rows_outside_a_papers_protocol_are_no_evidence(paper):
    suite = load_suite(EVERY)
    results = SuiteResults(plan_suite(suite, seeds=1), {}, {}, (), "")
    for pairing in PAIRINGS:
        assert pairing.paper != paper or not list(pairs(pairing, results, suite.data["cub"]))


def test_the_base_of_a_strategy_is_its_inner_loss(tmp_path):
    values = {"xbm, C1": (52.0, 53.0, 52.5), "contrastive, C1": (50.0, 50.5, 50.1), "proxy_anchor": ANCHOR[:3]}
    fill(tmp_path, EVERY, values)
    (found,) = compare(Pairing("XBM", "xbm", "", "R@1", "a memory and none"), measured(tmp_path))
    assert (found.row, found.base) == ("xbm, C1", "contrastive, C1")
    assert found.test.difference == pytest.approx(52.5 - 50.2)


def test_an_option_is_compared_with_the_same_method_without_it(tmp_path):
    fill(tmp_path, "profs_lite0", dict.fromkeys(load_suite("profs_lite0").rows, ANCHOR))
    found = compare(next(pairing for pairing in PAIRINGS if pairing.option), measured(tmp_path))
    assert {(m.row, m.base) for m in found} == {(f"{letter}-PROFS-HNCM", f"{letter}-PROFS") for letter in "CTLNAM"}


def test_a_single_sub_problem_is_compared_with_many_around_the_same_loss():
    results = SuiteResults(plan_suite(load_suite("ccp_fig6")), {}, {}, (), "")
    pairing = named("alternating sub-problems and a single one")
    losses = ("C1", "C2", "MS", "Triplet")
    found = list(pairs(pairing, results, results.planned.suite.data["cub"]))
    assert found == [(f"{loss}-CCP", f"{loss}-Proxy") for loss in losses]
