"""The claims of a suite tested on its results: the effect with its interval, and the verdict where one was planned.

A claim with a number of seeds is tested by a paired t-test over common seeds, with Holm's correction over such claims
of the same paper. The others are estimates: their intervals are shown, and they get no verdict.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from nearkin.benchmark.headlines import needed_seeds
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite_claims import Claim, best_base, published_gain
from nearkin.benchmark.tables import LEVEL, row_runs
from nearkin.evaluation.statistics import Comparison, holm, paired_t

HOLDS, OPPOSITE, NOT_SHOWN = "holds", "opposite", "not shown"
NOT_RUN, TOO_FEW, ESTIMATE = "not run yet", "too few seeds yet", "estimate"


class TestedClaim(NamedTuple):
    """A claim with what was measured; in `test` p is Holm's, and all is NaN where nothing was."""

    claim: Claim
    base: str  # of several bases the best one
    published: float  # the paper's gain; NaN if it prints none
    needed: int  # seeds, for a verdict or as the suite plans
    test: Comparison

    @property
    def outcome(self) -> str:
        """The verdict, or why there is none."""
        if not self.test.n:
            return NOT_RUN
        if not self.claim.seeds:
            return ESTIMATE
        if self.test.n < self.needed:
            return TOO_FEW
        if not self.test.p < LEVEL:
            return NOT_SHOWN
        return HOLDS if self.test.difference > 0 else OPPOSITE


def check_claims(results: SuiteResults) -> list[TestedClaim]:
    """The claims of a suite on its first data set, in the suite's order."""
    suite = results.planned.suite
    dataset = next(iter(suite.data.values()))
    runs = {row.name: row_runs(results, row, dataset) for row in suite.rows.values()}
    found = []
    for claim in suite.claims:
        scores = {name: runs[name].values(claim.metric) for name in claim.rows}
        base = best_base(claim, scores)
        shared = sorted(scores[claim.row].keys() & scores[base].keys())
        test = paired_t([scores[claim.row][s] for s in shared], [scores[base][s] for s in shared])
        gain = published_gain(claim, suite.rows, dataset.name)
        needed = needed_seeds(suite, claim, scores) if claim.seeds else suite.seeds
        found.append(TestedClaim(claim, base, gain, needed, test))
    return _corrected(found)


def _corrected(found: Sequence[TestedClaim]) -> list[TestedClaim]:
    adjusted: dict[int, float] = {}
    for paper in {each.claim.paper for each in found}:
        places = [n for n, each in enumerate(found) if each.claim.paper == paper and each.claim.seeds]
        adjusted |= dict(zip(places, holm([found[n].test.p for n in places]).tolist(), strict=True))
    return [each._replace(test=each.test._replace(p=adjusted.get(n, math.nan))) for n, each in enumerate(found)]


def in_words(found: Sequence[TestedClaim]) -> str:
    """The verdict on a paper: that of its headline, and where estimates contradict it."""
    headline = next((each for each in found if each.claim.headline), None)
    if headline is None:
        return NOT_RUN
    outcome, test = headline.outcome, headline.test
    if outcome == TOO_FEW:
        return f"{TOO_FEW}: {test.n} of {headline.needed}"
    if outcome == NOT_SHOWN and not math.isnan(test.high):  # NaN: all differences are equal
        return f"{NOT_SHOWN}; by the interval the gain could be as large as {test.high:.1f} points"
    papers_own = [each for each in found if each.claim.source]  # not those that this project asks
    against = [each.claim.words for each in papers_own if each.outcome == ESTIMATE and each.test.high < 0]
    if outcome == HOLDS and against:
        return f"holds in part; the intervals are below zero for: {'; '.join(against)}"
    return outcome
