"""The claims of the five papers, as data, each tested on our results by a paired t-test over seeds.

A claim is tested in every suite that has results for both sides, on rows that differ only in the method. If several
rows could be the other side, the row's baseline is taken if it is one of them. A suite with a figure is used only if
the claim names it; rows that are variants (a method without one of its parts) are never used.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nearkin.benchmark.planned_runs import PlannedRun
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import SuiteData
from nearkin.benchmark.tables import LEVEL, below_start, row_runs
from nearkin.evaluation.statistics import Comparison, holm, paired_t
from nearkin.files import Json
from nearkin.spec import Call, parse


class Claim(NamedTuple):
    """One claim of a paper: rows of `method` score higher than rows of `base`, by the paper's metric."""

    paper: str
    method: str  # the outermost method of a row
    base: str  # a method's name; empty: the inner loss of the row
    metric: str
    words: str
    suite: str = ""  # the only suite it is tested on; empty: all without a figure
    option: str = ""  # an option of `method`: on in the row, off in the base, which is otherwise the same
    around: bool = False  # whether the base is a strategy with the same inner loss as the row


CLAIMS = (
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor"),
    Claim("VCPA", "vcpa", "moco", "R@1", "VCPA is above a momentum network with a queue"),
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor on little data", "vcpa_fig3"),
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor in small batches", "vcpa_fig4"),
    Claim("Proxy-ISA", "proxy_isa", "proxy_anchor", "R@1", "Proxy-ISA is above Proxy-Anchor"),
    Claim("CCP", "ccp", "", "MAP@R", "alternating sub-problems are above the pair loss they use"),
    Claim("CCP", "ccp", "", "MAP@R 512-d", "the same with the joint embeddings of four folds"),
    Claim("CCP", "ccp", "proxy", "MAP@R", "alternating sub-problems are above a single one", around=True),
    Claim("CCP", "ccp", "xbm", "MAP@R", "alternating sub-problems are above a memory", around=True),
    Claim("MPA", "mpa", "soft_triple", "R@1", "MPA is above SoftTriple"),
    Claim("MPA", "mpa", "proxy_anchor", "R@1", "MPA is above Proxy-Anchor"),
    Claim("MPA", "mpa_dw", "soft_triple", "R@1", "MPA-DW is above SoftTriple"),
    Claim("MPA", "mpa_dw", "proxy_anchor", "R@1", "MPA-DW is above Proxy-Anchor"),
    Claim("MPA", "mpa_ap", "soft_triple", "R@1", "MPA-AP is above SoftTriple"),
    Claim("MPA", "mpa_ap", "proxy_anchor", "R@1", "MPA-AP is above Proxy-Anchor"),
    Claim("MPA", "mpa_dw", "mpa", "R@1", "MPA-DW is above MPA"),
    Claim("MPA", "mpa_ap", "mpa", "R@1", "MPA-AP is above MPA"),
    Claim("PROFS", "profs", "", "R@1", "alternating projections are above the loss they use"),
    Claim("PROFS", "profs", "", "R@1", "mining hard classes lifts them further", option="hard_classes"),
)

HOLDS, OPPOSITE, NOT_SHOWN, UNTESTED = "holds here", "the opposite is seen", "not shown", "not tested"


class Outcome(NamedTuple):
    """A claim on two rows of a suite; p is Holm's over all pairs that the claim was tested on."""

    suite: str
    data: str
    row: str
    base: str
    select: str  # what chose the epoch of the row
    harmed: tuple[str, ...]  # those of the two rows that score lower after training than before
    test: Comparison

    @property
    def verdict(self) -> str:
        """The outcome of the test."""
        if math.isnan(self.test.p):
            return UNTESTED
        if self.test.p >= LEVEL:
            return NOT_SHOWN
        return HOLDS if self.test.difference > 0 else OPPOSITE


def check_claim(claim: Claim, suites: Iterable[SuiteResults]) -> list[Outcome]:
    """Test the claim on every pair of rows with common seeds, by a paired t-test over these."""
    found = [outcome for results in suites if _applies(claim, results) for outcome in _outcomes(claim, results)]
    adjusted = holm([outcome.test.p for outcome in found])
    return [o._replace(test=o.test._replace(p=float(p))) for o, p in zip(found, adjusted, strict=True)]


def in_words(outcomes: Sequence[Outcome]) -> str:
    """The verdict over all pairs."""
    verdicts = {outcome.verdict for outcome in outcomes} - {UNTESTED}
    if not outcomes:
        return "not measured yet"
    if not verdicts:
        return "measured, but with too few seeds for a test"
    if len(verdicts) == 1:
        return verdicts.pop()
    if HOLDS not in verdicts:
        return "not shown, in part the opposite"
    return "holds in part, in part the opposite" if OPPOSITE in verdicts else "holds here in part"


def _applies(claim: Claim, results: SuiteResults) -> bool:
    suite = results.planned.suite
    return suite.name == claim.suite if claim.suite else suite.figure is None


def _outcomes(claim: Claim, results: SuiteResults) -> Iterator[Outcome]:
    suite = results.planned.suite
    for dataset in suite.data.values():
        for row, base in pairs(claim, results, dataset):
            done = {name: row_runs(results, suite.rows[name], dataset) for name in (row, base)}
            ours, theirs = (runs.values(claim.metric) for runs in done.values())
            shared = sorted(ours.keys() & theirs.keys())
            if shared:
                test = paired_t([ours[s] for s in shared], [theirs[s] for s in shared])
                harmed = tuple(name for name, runs in done.items() if below_start(runs, claim.metric))
                yield Outcome(suite.name, dataset.name, row, base, done[row].runs[shared[0]]["select"], harmed, test)


def pairs(claim: Claim, results: SuiteResults, dataset: SuiteData) -> Iterator[tuple[str, str]]:
    """The pairs (row, base) that a claim compares, measured or not."""
    suite = results.planned.suite
    first_seed = results.planned.seeds[0]
    runs = {
        run.row: run
        for run in results.planned.runs
        if run.data == dataset.name and run.seed == first_seed and suite.rows[run.row].scores == "after"
    }
    specs = {row: parse(run.description["method"]) for row, run in runs.items()}
    for row, spec in specs.items():
        if spec.name == claim.method and not suite.rows[row].variant:
            bases = [
                other
                for other, base in specs.items()
                if _is_base(claim, spec, base) and _settings(runs[other]) == _settings(runs[row])
            ]
            named = suite.baselines.get(row)
            yield from ((row, base) for base in ([named] if named in bases else bases))


def _settings(run: PlannedRun) -> Json:
    return {name: value for name, value in run.settings.items() if name != "method"}


def _is_base(claim: Claim, spec: Call, base: Call) -> bool:
    """Whether the claim compares a row of this spec with `base`."""
    if claim.option:
        varied = spec.options[claim.option] and not base.options.get(claim.option)
        return bool(varied) and _without(spec, claim.option) == _without(base, claim.option)
    if claim.base:
        return base.name == claim.base and (not claim.around or base.args == spec.args)
    return base in spec.args


def _without(spec: Call, option: str) -> Call:
    return spec._replace(options={name: value for name, value in spec.options.items() if name != option})
