"""The claims of a paper in a suite's file: which comparison tests each, decided before anything is run.

    [[claim]]
        paper               the paper's name
        words               the claim in words
        row, base           the row that should score higher, and the other one; with a list of bases, the one with the
                            highest mean, so that a sweep is represented by its best value
        metric              the paper's metric
        seeds               a verdict needs at least this many; absent: the difference is an estimate without a verdict
        headline            true for the one claim that `nearkin bench SUITE --headline` runs
        source              where the paper has its numbers, such as "Table 2"
        note                why the comparison is set up as it is, such as a shorter schedule

The paper's gain is the difference of the numbers published for the two rows. The test is a paired t-test over seeds,
with Holm's correction over the claims of the paper that have a verdict. Half the published gain should be found with a
power of 80 %: once three seeds are measured, their deviation says how many that takes, at most `MOST_SEEDS`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nearkin.benchmark.suite_file import check_metric, check_table
from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import pairs_for_power
from nearkin.spec import nearest

PILOT = 3
"""Seeds whose deviation says how many are needed."""

MOST_SEEDS = 16

_CLAIM: dict[str, Any] = {
    "paper": str,
    "words": str,
    "row": str,
    "base": str | list,
    "metric": str,
    "seeds": int,
    "headline": bool,
    "source": str,
    "note": str,
}


class Claim(NamedTuple):
    """A claim of a paper and the comparison that tests it: `row` scores higher than the best of `bases`."""

    paper: str
    words: str
    row: str
    bases: tuple[str, ...]
    metric: str
    seeds: int = 0  # for a verdict; 0: an estimate without one
    headline: bool = False
    source: str = ""
    note: str = ""

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows it compares, bases first."""
        return (*self.bases, self.row)


class Published(Protocol):
    """A row with published numbers: data set → metric → number."""

    @property
    def paper(self) -> Mapping[str, Mapping[str, Any]]: ...


def read_claims(tables: Sequence[Any], rows: Mapping[str, Any], where: str) -> tuple[Claim, ...]:
    """The checked claims of a suite's file."""
    claims = tuple(_claim(table, rows, where) for table in tables)
    if sum(claim.headline for claim in claims) > 1:
        raise NearkinError(f"In {where} two claims have headline = true: leave one.")
    return claims


def _claim(table: Any, rows: Mapping[str, Any], where: str) -> Claim:
    where = f"{where}, claim {table.get('words', '?')!r}" if isinstance(table, dict) else where
    check_table(table, _CLAIM, where, needed=("paper", "words", "row", "base", "metric"))
    check_metric(table["metric"], where)
    bases = table["base"] if isinstance(table["base"], list) else [table["base"]]
    plain = {name: value for name, value in table.items() if name != "base"}
    claim = Claim(bases=tuple(bases), **plain)
    for name in claim.rows:
        if name not in rows:
            raise NearkinError(f"In {where} {name!r} is not a row.{nearest(str(name), rows)}")
    if not bases or claim.row in bases:
        raise NearkinError(f"In {where} base must name another row than row.")
    if claim.headline and claim.seeds <= PILOT:
        raise NearkinError(f"In {where} a headline needs seeds, more than {PILOT}: it is there for a verdict.")
    return claim


def published_gain(claim: Claim, rows: Mapping[str, Published], data: str) -> float:
    """The paper's difference between the two rows, in points; NaN if it prints none."""
    numbers = [rows[name].paper.get(data, {}).get(claim.metric) for name in claim.rows]
    if any(number is None for number in numbers):
        return math.nan
    *bases, row = (float(number.value) for number in numbers if number is not None)
    return row - max(bases)


def seeds_needed(claim: Claim, gain: float, deviation: float) -> int:
    """How many seeds show half the published gain with a power of 80 %, at least the claim's, at most `MOST_SEEDS`.

    `deviation` is that of the differences over the first `PILOT` seeds; NaN: not known yet.
    """
    if math.isnan(gain) or math.isnan(deviation):
        return claim.seeds
    return min(max(claim.seeds, pairs_for_power(deviation, abs(gain) / 2)), max(MOST_SEEDS, claim.seeds))


def best_base(claim: Claim, scores: Mapping[str, Mapping[int, float]]) -> str:
    """The base with the highest mean over the seeds that all rows have; the first if there are none.

    `scores` is row → seed → score.
    """
    seeds = set.intersection(*(set(scores.get(name, ())) for name in claim.rows))
    return max(claim.bases, key=lambda name: sum(scores[name][seed] for seed in seeds) if seeds else 0.0)
