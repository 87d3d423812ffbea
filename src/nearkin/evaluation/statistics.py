"""Is a difference significant? Means and their errors, paired tests over seeds, bootstrap over queries and classes.

A missing value (a query without relevant items, a run that was not made) is NaN and is left out; in a paired
comparison the pair is. A result that cannot be computed is NaN, never a number that looks like an answer: the
deviation of one value, the test of one pair, a t-test of differences that are all the same.

Which test for what: seeds are independent trainings, so `paired_t` over seeds tells whether a *method* is better. One
pair of trained models on the same test set is compared by `paired_bootstrap`: this *model* against that one. Queries
of a class succeed and fail together, so if a class has many, resample classes (`groups`): resampling queries alone
finds differences that do not exist.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearkin.console import NOTHING
from nearkin.errors import NearkinError

Floats = NDArray[np.float64]

NAN = float("nan")
_AT_ONCE = 2**21  # draws held in memory at a time
_MOST_PAIRS = 1000  # where a calculation of power stops


class Summary(NamedTuple):
    """Number, mean, sample standard deviation (n − 1) and standard error of the mean."""

    n: int
    mean: float  # NaN without values
    deviation: float  # NaN for fewer than two
    error: float


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    n: int  # resampled units: queries, or classes
    mean: float
    low: float
    high: float


class Comparison(NamedTuple):
    """The difference a − b over pairs."""

    n: int  # pairs: seeds, queries, or classes
    difference: float  # mean of a − b
    low: float  # confidence interval of the difference
    high: float
    p: float  # two-sided
    effect: float  # Cohen's d_z: mean of the differences / their standard deviation


class AverageRanks(NamedTuple):
    """Methods ranked in several blocks (data sets, seeds, classes): what a critical-difference diagram shows."""

    blocks: int
    ranks: Floats  # [methods] 1 is best; ties share their mean rank
    p: float  # Friedman's test of "all methods are equal"; NaN for fewer than three methods or two blocks
    critical: float  # Nemenyi: ranks that differ by less are not significantly different
    groups: tuple[tuple[int, ...], ...]  # largest sets of methods, best first, without a significant difference


def summary(values: ArrayLike) -> Summary:
    """Number, mean, standard deviation and standard error of the values that are not NaN."""
    x = _floats(values)
    x = x[~np.isnan(x)]
    if not len(x):
        return Summary(0, NAN, NAN, NAN)
    deviation = float(x.std(ddof=1)) if len(x) > 1 else NAN
    return Summary(len(x), float(x.mean()), deviation, deviation / len(x) ** 0.5)


def paired_t(a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95) -> Comparison:
    """Student's t-test of paired values, such as the scores of two methods with the same seeds."""
    x, y = _pairs(a, b)
    d = x - y
    if not len(d):
        return Comparison(0, NAN, NAN, NAN, NAN, NAN)
    mean = float(d.mean())
    if len(d) < 2 or _constant(d, np.abs(x) + np.abs(y)):
        return Comparison(len(d), mean, NAN, NAN, NAN, NAN)
    from scipy import stats  # here, because importing it takes a second

    test = stats.ttest_1samp(d, 0.0)
    low, high = test.confidence_interval(confidence)
    return Comparison(len(d), mean, float(low), float(high), float(test.pvalue), mean / float(d.std(ddof=1)))


def pairs_for_power(deviation: float, difference: float, *, power: float = 0.8, level: float = 0.05) -> int:
    """The number of pairs with which a paired t-test finds a true difference as often as `power`.

    `deviation` is the standard deviation of the differences. The test is two-sided; at least two pairs are needed.
    """
    if not difference > 0 or not deviation >= 0:
        raise NearkinError(f"A difference above 0 and a deviation are needed, not {difference} and {deviation}.")
    if not deviation:
        return 2
    from scipy import stats  # as above

    def found(n: int) -> float:
        shift, critical = difference / deviation * n**0.5, stats.t.ppf(1 - level / 2, n - 1)
        return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))

    n = 2
    while n < _MOST_PAIRS and found(n) < power:
        n += 1
    return n


def against(
    scores: Mapping[str, Mapping[int, float]], baselines: Mapping[str, str], *, confidence: float = 0.95
) -> dict[str, Comparison]:
    """Each method against its baseline by `paired_t` over their common seeds; p is Holm's over all comparisons.

    `scores` is method → seed → score; `baselines` method → method. A method without scores is left out.
    """
    found = {}
    for name, base in baselines.items():
        if name in scores and base in scores:
            shared = sorted(scores[name].keys() & scores[base].keys())
            pairs = [scores[name][s] for s in shared], [scores[base][s] for s in shared]
            found[name] = paired_t(*pairs, confidence=confidence)
    adjusted = holm([c.p for c in found.values()])
    return {name: c._replace(p=float(p)) for (name, c), p in zip(found.items(), adjusted, strict=True)}


def holm(p: ArrayLike) -> Floats:
    """Holm's adjusted p-values, to compare with the level directly. NaN stays NaN and is not counted."""
    raw = _floats(p)
    adjusted = np.full(raw.shape, NAN)
    valid = np.flatnonzero(~np.isnan(raw))
    order = valid[np.argsort(raw[valid], kind="stable")]
    steps = raw[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(order) else steps
    return adjusted


def bootstrap(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    rng: np.random.Generator | int = 0,
) -> Interval:
    """The mean over queries with its percentile interval; queries are resampled, or with `groups` (labels) classes."""
    x = _floats(values)
    units = _units(x, groups)
    mean = float(np.nanmean(x)) if len(units.size) else NAN
    if len(units.size) < 2:
        return Interval(len(units.size), mean, NAN, NAN)
    low, high = _percentiles(_resampled(units, resamples, rng), confidence)
    return Interval(len(units.size), mean, low, high)


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    rng: np.random.Generator | int = 0,
) -> Comparison:
    """Two models on the same queries: the mean difference, resampled over queries, or with `groups` over classes.

    p is twice the smaller share of resampled differences on either side of 0, with one added to each side so that it
    is never 0. The effect is d_z over the units; NaN if all differences are equal.
    """
    units = _units(np.subtract(*_same_length(a, b)), groups)
    n = len(units.size)
    mean = float(units.total.sum() / units.size.sum()) if n else NAN
    if n < 2:
        return Comparison(n, mean, NAN, NAN, NAN, NAN)
    drawn = _resampled(units, resamples, rng)
    low, high = _percentiles(drawn, confidence)
    side = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    each = units.total / units.size
    effect = NAN if _constant(each, np.abs(each)) else float(each.mean() / each.std(ddof=1))
    return Comparison(n, mean, low, high, min(1.0, 2 * (int(side) + 1) / (resamples + 1)), effect)


def average_ranks(scores: ArrayLike, *, level: float = 0.05) -> AverageRanks:
    """Ranks of methods over blocks, scores [blocks, methods], higher is better; a block with a NaN is left out."""
    table = np.atleast_2d(_floats(scores))
    table = table[~np.isnan(table).any(axis=1)]
    blocks, methods = table.shape
    if blocks == 0:
        return AverageRanks(0, np.full(methods, NAN), NAN, NAN, ())
    from scipy import stats  # as above

    ranks = stats.rankdata(-table, axis=1).mean(axis=0)
    if blocks < 2 or methods < 2:
        return AverageRanks(blocks, ranks, NAN, NAN, ())
    q = stats.studentized_range.ppf(1 - level, methods, np.inf) / 2**0.5
    critical = float(q * (methods * (methods + 1) / (6 * blocks)) ** 0.5)
    tied = bool((table == table[:, :1]).all())  # the statistic would be 0/0
    p = float(stats.friedmanchisquare(*table.T).pvalue) if methods > 2 and not tied else NAN
    return AverageRanks(blocks, ranks, p, critical, _together(ranks, critical))


def _together(ranks: Floats, critical: float) -> tuple[tuple[int, ...], ...]:
    order = [int(i) for i in np.argsort(ranks, kind="stable")]
    groups: list[tuple[int, ...]] = []
    reached = 0
    for start in range(len(order)):
        end = start
        while end < len(order) and ranks[order[end]] - ranks[order[start]] < critical:
            end += 1
        if end > reached and end - start > 1:
            groups.append(tuple(order[start:end]))
        reached = max(reached, end)
    return tuple(groups)


class _Units(NamedTuple):
    """The units drawn with replacement: single queries, or whole classes."""

    total: Floats  # sum of a unit's values
    size: Floats  # their number


def _units(values: Floats, groups: ArrayLike | None) -> _Units:
    valid = ~np.isnan(values)
    if groups is None:
        return _Units(values[valid], np.ones(int(valid.sum())))
    labels = np.asarray(groups)
    if labels.shape != values.shape:
        raise NearkinError(f"Groups need one label per query; got {len(labels)} for {len(values)}.")
    _, number = np.unique(labels[valid], return_inverse=True)
    return _Units(np.bincount(number, weights=values[valid]).astype(np.float64), np.bincount(number).astype(np.float64))


def _resampled(units: _Units, resamples: int, rng: np.random.Generator | int) -> Floats:
    """Bootstrap means: n of n units drawn with replacement, in blocks of bounded memory."""
    rng = np.random.default_rng(rng)
    n = len(units.size)
    means = np.empty(resamples)
    equal = bool((units.size == units.size[0]).all())
    for rows in _blocks(resamples, max(1, _AT_ONCE // n)):
        drawn = rng.integers(n, size=(rows.stop - rows.start, n), dtype=np.int32)
        weight = n * units.size[0] if equal else units.size.take(drawn).sum(axis=1)
        means[rows] = units.total.take(drawn).sum(axis=1) / weight
    return means


def _blocks(total: int, size: int) -> Sequence[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _percentiles(drawn: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _pairs(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    x, y = _same_length(a, b)
    both = ~(np.isnan(x) | np.isnan(y))
    return x[both], y[both]


def _same_length(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    x, y = _floats(a), _floats(b)
    if x.shape != y.shape:
        raise NearkinError(f"Pairs need the same number of values on both sides; got {len(x)} and {len(y)}.")
    return x, y


def _constant(d: Floats, magnitude: Floats) -> bool:
    """Whether values differ only by rounding, given the magnitude of the numbers they were computed from."""
    return bool(np.ptp(d) <= 8 * np.finfo(np.float64).eps * magnitude.max())


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def mean_words(found: Summary) -> str:
    """A mean, with its standard error if there are several values."""
    return f"{found.mean:.2f}" if found.n < 2 else f"{found.mean:.2f} ± {found.error:.2f}"


def p_words(p: float) -> str:
    """A p-value as text."""
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
