"""docs/claims.md: every claim with its verdict or its cost, from made-up results, and the page in the tree."""

from pathlib import Path

import pytest
from benchmark.made_results import fill

import nearkin
from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import load_suite, suite_names
from tools.claims_page import claims_page, main, seconds_of

ROOT = Path(nearkin.__file__).parents[2]
BASE = (60.0, 60.5, 59.6, 60.1, 60.3, 59.9, 60.2, 60.4)
ABOVE = tuple(b + 1.4 + (-1) ** n * 0.1 for n, b in enumerate(BASE))
SUITES = [suite for suite in map(load_suite, suite_names()) if suite.claims]


def section(page, paper):
    return page.split(f"\n## {paper}\n")[1].split("\n## ")[0]


def row(text, words):
    line = next(x for x in text.splitlines() if x.startswith("| ") and words in x)
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("results")
    fill(tmp_path, "vcpa_claims", {"Proxy-Anchor": BASE, "VCPA": ABOVE, "PA-1st": BASE[:3], "PA-2nd": ABOVE[:3]})
    fill(tmp_path, "cub_lite0", {"proxy_anchor": BASE[:3], "vcpa, tau 0.001": (60.5, 60.6, 60.2)})
    return claims_page(tmp_path)


def test_the_claim_that_was_run_has_effect_interval_and_verdict(page):
    own = section(page, "VCPA")
    _, metric, source, paper, ours, interval, p, seeds, outcome, left = row(own, "**VCPA is above Proxy-Anchor**")
    assert (metric, source, paper, ours) == ("R@1", "Table 2", "+1.37", "+1.40")
    assert interval.startswith("+1.31 to +1.4")
    assert (p, seeds, outcome, left) == ("< 0.001", "8", "holds", "")
    assert "**Verdict: holds.**" in own
    assert "| [VCPA](#vcpa) | holds |" in page


def test_an_estimate_names_the_best_of_a_sweep_and_has_no_p(page):
    cells = row(section(page, "VCPA"), "ten updates of the proxies")
    assert "best of 2: PA-2nd" in cells[0]
    assert cells[6] == ""
    assert cells[-2] == "estimate"


def test_what_was_not_run_is_shown_with_its_cost(page):
    cells = row(section(page, "VCPA"), "with 10 % of the data")
    assert cells[-2] == "not run yet"
    assert cells[-1].startswith("6 runs, ")
    for suite in SUITES:
        text = section(page, suite.claims[0].paper)
        assert all(row(text, claim.words) for claim in suite.claims)
        for part in (suite.source, suite.note, suite.why, suite.missing):
            assert part
            assert part in text
    assert page.count("**Verdict: not run yet.**") == 4


def test_other_settings_are_listed_without_a_verdict(page):
    text = section(page, "VCPA").split("In other settings, which decide nothing")[1]
    line = next(x for x in text.splitlines() if "vcpa, tau 0.001 less proxy_anchor (cub_lite0, the last epoch)" in x)
    assert ": +0.40, 95 % " in line
    assert line.endswith(", 3 seeds.")
    assert not any(word in text for word in ("holds", "not shown", "opposite"))


def test_the_cost_of_a_run():
    runs = {run.row: run for run in plan_suite(load_suite("vcpa_claims"), seeds=1).runs}
    speeds = {30: 1000.0, 180: 10_000.0}
    assert seconds_of(runs["VCPA"], speeds) == pytest.approx(20 * 5864 / 10_000)
    assert seconds_of(runs["VCPA, batch 30"], speeds) == pytest.approx(20 * 5864 / 1000)
    assert seconds_of(runs["VCPA, 324 px"], speeds) == pytest.approx(20 * 5864 / 10_000 * (324 / 224) ** 2)
    swapped = next(iter(plan_suite(load_suite("mpa_claims"), seeds=1).runs))
    assert seconds_of(swapped, speeds) == pytest.approx(20 * 5924 / 10_000)


def test_results_with_changed_settings_test_no_claim(tmp_path):
    fill(tmp_path, "vcpa_claims", {"Proxy-Anchor": BASE, "VCPA": ABOVE}, settings={"backbone": "lite1"})
    fill(tmp_path, "cub_lite0", {"proxy_anchor": BASE[:3]})
    assert claims_page(tmp_path).count("**Verdict: not run yet.**") == 5


def test_the_page_and_the_pictures_in_the_tree_are_current(tmp_path):
    main(["--results", str(ROOT / "benchmarks" / "results"), "-o", str(tmp_path / "claims.md")])
    kept, now = (ROOT / "docs", "run python -m tools.claims_page")
    assert (tmp_path / "claims.md").read_text() == (kept / "claims.md").read_text(), now
    drawn, known = (folder / "pictures" / "claims" for folder in (tmp_path, kept))
    assert {p.name: p.read_bytes() for p in drawn.glob("*")} == {p.name: p.read_bytes() for p in known.glob("*")}, now


def test_a_figure_shows_what_was_measured(tmp_path):
    fill(tmp_path / "results", "vcpa_claims", {"Proxy-Anchor": BASE, "VCPA": ABOVE})
    text = claims_page(tmp_path / "results", pictures=tmp_path / "pictures", link="there/")
    assert [picture.name for picture in (tmp_path / "pictures").iterdir()] == ["vcpa_claims.svg"]
    assert "](there/vcpa_claims.svg)" in section(text, "VCPA")
    assert text.count(".svg") == 1
