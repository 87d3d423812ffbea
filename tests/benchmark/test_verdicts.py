"""Claims of a suite tested on made-up results."""

import math
import re

import pytest
from benchmark.made_results import fill
from benchmark.tiny_suite import TINY, written
from scipy import stats

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.results import read_results
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import load_suite
from nearkin.benchmark.verdicts import check_claims, in_words

BASE = [60.0, 60.5, 59.6, 60.1, 60.3, 59.9, 60.2, 60.4]
NOISE = [0.1, -0.2, 0.0, 0.2, -0.1, 0.1, -0.1, 0.0]
ABOVE = [b + 1 + n for b, n in zip(BASE, NOISE, strict=True)]
BELOW = [b - 1 + n for b, n in zip(BASE, NOISE, strict=True)]
LEVEL = [b + 3 * n for b, n in zip(BASE, NOISE, strict=True)]

ROWS = TINY.replace("[50.0, 0.1] }", "50.0 }").replace(
    'method = "contrastive(form=c2)"',
    """method = "contrastive(form=c2)"
paper.glyphs = { "R@1" = 52.0 }
[[row]]
name = "C1"
method = "contrastive(form=c1)"
[[row]]
name = "ST"
method = "soft_triple"
""",
)


def claim(words, row, base, more=""):
    return f'[[claim]]\npaper = "P"\nwords = "{words}"\nrow = "{row}"\nbase = {base}\nmetric = "R@1"\n{more}\n'


HEAD = claim("main", "C2", '"PA"', "seeds = 8\nheadline = true")


@pytest.fixture
def check(tmp_path):
    """Check the claims of a text on scores by row."""

    def checked(claims, **scores):
        suite = written(tmp_path, ROWS + claims)
        seeds = max((len(values) for values in scores.values()), default=1)
        planned = plan_suite(load_suite(suite), seeds=seeds)
        fill(tmp_path, suite, scores)
        runs = read_results(tmp_path / "tiny" / "results.jsonl") if scores else {}
        return check_claims(SuiteResults(planned, runs, {}, (), ""))

    return checked


@pytest.mark.parametrize(
    ("ours", "outcome", "words"),
    [
        (ABOVE, "holds", "holds"),
        (BELOW, "opposite", "opposite"),
        (LEVEL, "not shown", r"not shown; by the interval the gain could be as large as 0\.\d points"),
        (BASE, "not shown", "not shown"),
        (ABOVE[:3], "too few seeds yet", "too few seeds yet: 3 of 8"),
        ([], "not run yet", "not run yet"),
    ],
)
def test_the_verdict_of_a_headline(check, ours, outcome, words):
    (found,) = check(HEAD, PA=BASE, C2=ours)
    assert found.outcome == outcome
    assert found.published == 2.0
    assert re.fullmatch(words, in_words([found]))
    if len(ours) == 8 and ours != BASE:
        theirs = stats.ttest_rel(ours, BASE)
        assert found.test.p == pytest.approx(theirs.pvalue)
        assert (found.test.low, found.test.high) == pytest.approx(tuple(theirs.confidence_interval()))


def test_estimates_have_no_verdict_but_can_contradict_the_headline(check):
    estimate = claim("in batches of 30", "C1", '"PA"', 'source = "Fig. 1"')
    holding = check(HEAD + estimate, PA=BASE, C2=ABOVE, C1=ABOVE[:3])
    assert [each.outcome for each in holding] == ["holds", "estimate"]
    assert math.isnan(holding[1].test.p)
    assert in_words(holding) == "holds"
    part = check(HEAD + estimate, PA=BASE, C2=ABOVE, C1=BELOW[:3])
    assert in_words(part) == "holds in part; the intervals are below zero for: in batches of 30"
    asked = check(HEAD + claim("asked by us", "C1", '"PA"'), PA=BASE, C2=ABOVE, C1=BELOW[:3])
    assert in_words(asked) == "holds", "the paper does not claim it"
    assert in_words(check(HEAD + estimate, PA=BASE, C2=LEVEL, C1=ABOVE[:3])).startswith("not shown")


def test_p_is_holms_over_the_claims_of_one_paper_that_have_a_verdict(check):
    second, foreign = (claim(words, "C1", '"PA"', "seeds = 8") for words in ("second", "foreign"))
    text = HEAD + second + foreign.replace('"P"', '"Q"') + claim("estimate", "ST", '"PA"')
    main, other, alone, estimate = check(text, PA=BASE, C2=ABOVE, C1=LEVEL, ST=ABOVE)
    raw = stats.ttest_rel(ABOVE, BASE).pvalue
    assert main.test.p == pytest.approx(2 * raw), "two claims of P"
    assert other.test.p == pytest.approx(alone.test.p), "the larger of two is not changed, nor a single one"
    assert math.isnan(estimate.test.p)


def test_a_sweep_is_represented_by_its_best_value(check):
    (found,) = check(claim("sweep", "C2", '["PA", "C1"]'), PA=BASE, C1=ABOVE, C2=ABOVE)
    assert found.base == "C1"
    assert found.test.difference == pytest.approx(0)
