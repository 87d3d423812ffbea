"""What the five papers claim, as data, and whether results bear it out: a paired t-test over seeds, or nothing is said.

A claim is tested in every suite that has results for both sides, on rows that differ in nothing but the method; where
several rows could be the other side, it is the row's baseline if that is one of them. Suites that are curves (those
with a figure) are asked only where a claim names them, and rows that are variants, a method without a part of its
own, never.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nearkin.benchmark.planned_runs import Cell
from nearkin.benchmark.runner import Board
from nearkin.benchmark.suite import Part
from nearkin.benchmark.tables import LEVEL, below_start, finished
from nearkin.evaluation.statistics import Comparison, holm, paired_t
from nearkin.files import Json
from nearkin.spec import Call, parse


class Claim(NamedTuple):
    """One claim of a paper: rows of `method` are above those of `base`, by the metric the paper makes it by."""

    paper: str
    method: str  # the outermost method of a row
    base: str  # a method's name; empty: the inner loss of the row itself
    metric: str
    words: str
    suite: str = ""  # the only one it is about; empty: all without a figure
    option: str = ""  # of `method`: on in the row, off in the base, which is the same in all else
    around: bool = False  # whether the base is a strategy around the same loss as the row


CLAIMS = (
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor"),
    Claim("VCPA", "vcpa", "moco", "R@1", "VCPA is above a momentum network with a queue"),
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor on little data", "vcpa_fig3"),
    Claim("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA is above Proxy-Anchor in small batches", "vcpa_fig4"),
    Claim("Proxy-ISA", "proxy_isa", "proxy_anchor", "R@1", "Proxy-ISA is above Proxy-Anchor"),
    Claim("CCP", "ccp", "", "MAP@R", "alternating sub-problems are above the pair loss they use"),
    Claim("CCP", "ccp", "", "MAP@R 512-d", "so they are with the models of four folds side by side"),
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
    harmed: tuple[str, ...]  # those of the two that training left below the network as it began
    test: Comparison

    @property
    def verdict(self) -> str:
        """What the test says."""
        if math.isnan(self.test.p):
            return UNTESTED
        if self.test.p >= LEVEL:
            return NOT_SHOWN
        return HOLDS if self.test.difference > 0 else OPPOSITE


def check_claim(claim: Claim, boards: Iterable[Board]) -> list[Outcome]:
    """The claim on every pair of rows that was measured with the same seeds, by a paired t-test over these."""
    found = [tested for board in boards if _asked(claim, board) for tested in _measured(claim, board)]
    adjusted = holm([tested.test.p for tested in found])
    return [t._replace(test=t.test._replace(p=float(p))) for t, p in zip(found, adjusted, strict=True)]


def in_words(tested: Sequence[Outcome]) -> str:
    """What all pairs say together."""
    verdicts = {t.verdict for t in tested} - {UNTESTED}
    if not tested:
        return "not measured yet"
    if not verdicts:
        return "measured, but with too few seeds for a test"
    if len(verdicts) == 1:
        return verdicts.pop()
    if HOLDS not in verdicts:
        return "not shown, and in part the opposite is seen"
    return "holds in part and in part the opposite is seen" if OPPOSITE in verdicts else "holds here in part"


def _asked(claim: Claim, board: Board) -> bool:
    suite = board.sheet.suite
    return suite.name == claim.suite if claim.suite else suite.figure is None


def _measured(claim: Claim, board: Board) -> Iterator[Outcome]:
    suite = board.sheet.suite
    for part in suite.parts.values():
        for row, base in pairs(claim, board, part):
            done = {name: finished(board, suite.rows[name], part) for name in (row, base)}
            ours, theirs = (own.values(claim.metric) for own in done.values())
            shared = sorted(ours.keys() & theirs.keys())
            if shared:
                test = paired_t([ours[s] for s in shared], [theirs[s] for s in shared])
                harmed = tuple(name for name, own in done.items() if below_start(own, claim.metric))
                yield Outcome(suite.name, part.name, row, base, done[row].runs[shared[0]]["select"], harmed, test)


def pairs(claim: Claim, board: Board, part: Part) -> Iterator[tuple[str, str]]:
    """Rows that a claim compares, measured or not: (row, base)."""
    suite = board.sheet.suite
    cells = {
        cell.row: cell
        for cell in board.sheet.cells
        if cell.data == part.name and cell.seed == board.sheet.seeds[0] and suite.rows[cell.row].scores == "after"
    }
    specs = {row: parse(cell.description["method"]) for row, cell in cells.items()}
    for row, spec in specs.items():
        if spec.name == claim.method and not suite.rows[row].variant:
            bases = [
                other
                for other, base in specs.items()
                if _is_base(claim, spec, base) and _settings(cells[other]) == _settings(cells[row])
            ]
            named = suite.baselines.get(row)
            yield from ((row, base) for base in ([named] if named in bases else bases))


def _settings(cell: Cell) -> Json:
    return {name: value for name, value in cell.settings.items() if name != "method"}


def _is_base(claim: Claim, spec: Call, base: Call) -> bool:
    """Whether `base` is what the claim compares a row of this spec with."""
    if claim.option:
        varied = spec.options[claim.option] and not base.options.get(claim.option)
        return bool(varied) and _without(spec, claim.option) == _without(base, claim.option)
    if claim.base:
        return base.name == claim.base and (not claim.around or base.args == spec.args)
    return base in spec.args


def _without(spec: Call, option: str) -> Call:
    return spec._replace(options={name: value for name, value in spec.options.items() if name != option})
