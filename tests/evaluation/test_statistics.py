"""Statistics against naive loops and SciPy; results for too few values; false alarms on data without a difference."""

import math
import time
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import against, average_ranks, bootstrap, holm, paired_bootstrap, paired_t, summary

NAN = math.nan


def test_summary_by_hand():
    s = summary([1.0, 2.0, 4.0, NAN])
    assert s.n == 3
    assert s.mean == pytest.approx(7 / 3)
    deviation = math.sqrt(sum((v - 7 / 3) ** 2 for v in (1, 2, 4)) / 2)
    assert s.deviation == pytest.approx(deviation)
    assert s.error == pytest.approx(deviation / math.sqrt(3))


def test_summary_of_one_value_and_of_none():
    one = summary([5.0])
    assert (one.n, one.mean) == (1, 5.0)
    assert math.isnan(one.deviation)
    assert math.isnan(one.error)
    none = summary([NAN])
    assert none.n == 0
    assert math.isnan(none.mean)


def test_paired_t_equals_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 7), rng.normal(0, 1, 7)
    ours, theirs = paired_t(a, b), stats.ttest_rel(a, b)
    assert ours.p == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert ours.difference == pytest.approx((a - b).mean())
    assert ours.effect == pytest.approx((a - b).mean() / np.std(a - b, ddof=1))
    assert paired_t(b, a).p == pytest.approx(ours.p)
    assert paired_t(b, a).effect == pytest.approx(-ours.effect)


def test_a_pair_with_a_gap_is_left_out():
    a, b = [1.0, 2.0, NAN, 4.0, 6.0], [0.0, NAN, 1.0, 2.0, 3.0]
    assert paired_t(a, b) == paired_t([1.0, 4.0, 6.0], [0.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [
        ([67.1], [66.0], 1),
        ([67.1, 66.0], [67.1, 66.0], 2),
        ([67.1, 66.3, 65.9], [66.1, 65.3, 64.9], 3),  # apart by 1 but for rounding
        ([], [], 0),
    ],
)
def test_too_few_pairs_give_nan(a, b, n):
    c = paired_t(a, b)
    assert c.n == n
    assert math.isnan(c.p)
    assert math.isnan(c.effect)
    assert math.isnan(c.low)
    if n:
        assert c.difference == pytest.approx(np.mean(np.subtract(a, b)))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    with_gap = holm([0.01, NAN, 0.04])
    assert with_gap[[0, 2]] == pytest.approx([0.02, 0.04])
    assert math.isnan(with_gap[1])
    assert len(holm([])) == 0


def test_holm_rejects_what_the_stepwise_rule_rejects():
    rng = np.random.default_rng(1)
    for _ in range(50):
        p = rng.uniform(0, 0.1, size=rng.integers(1, 8))
        rejected, order = set(), np.argsort(p)
        for step, i in enumerate(order):
            if p[i] > 0.05 / (len(p) - step):
                break
            rejected.add(int(i))
        assert {i for i, q in enumerate(holm(p)) if q <= 0.05} == rejected


def test_methods_against_a_baseline_over_shared_seeds():
    scores = {
        "base": {0: 60.0, 1: 61.0, 2: 60.5, 3: 59.0},
        "better": {0: 62.0, 1: 63.1, 2: 62.6, 4: 99.0},
        "alone": {7: 10.0},
        "other": {0: 1.0, 1: 2.0},
    }
    found = against(scores, {"better": "base", "alone": "base", "lost": "base", "base": "gone"})
    assert list(found) == ["better", "alone"]
    alone = found["alone"]
    assert (found["better"].n, alone.n) == (3, 0)
    assert math.isnan(alone.p)
    assert found["better"].p == pytest.approx(stats.ttest_rel([62.0, 63.1, 62.6], [60.0, 61.0, 60.5]).pvalue)


def test_each_method_has_the_baseline_it_names_and_all_share_one_correction():
    scores = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 2.0, 1: 3.5, 2: 5.0}, "c": {0: 3.0, 1: 4.0, 2: 6.5}}
    found = against(scores, {"b": "a", "c": "b"})
    raw = [stats.ttest_rel(list(scores[x].values()), list(scores[y].values())).pvalue for x, y in ("ba", "cb")]
    assert [found[name].p for name in "bc"] == pytest.approx(holm(raw).tolist())
    assert found["c"].difference == pytest.approx(1.0)


def naive_bootstrap(values, labels, resamples, seed):
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        if labels is None:
            drawn = [values[i] for i in rng.integers(len(values), size=len(values))]
        else:
            classes = sorted(set(labels))
            drawn = []
            for c in rng.integers(len(classes), size=len(classes)):
                drawn += [v for v, y in zip(values, labels, strict=True) if y == classes[c]]
        means.append(sum(drawn) / len(drawn))
    return means


@pytest.mark.parametrize("clustered", [False, True])
def test_bootstrap_agrees_with_a_naive_one(clustered):
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    values = rng.normal(0.3, 1, len(labels)) + rng.normal(0, 1, 12)[labels]
    groups = labels if clustered else None
    naive = naive_bootstrap(values, labels if clustered else None, 4000, seed=5)
    ours = bootstrap(values, groups=groups, resamples=20_000)
    assert ours.mean == pytest.approx(values.mean())
    assert ours.n == (12 if clustered else len(values))
    assert (ours.low, ours.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.05)
    paired = paired_bootstrap(values, np.zeros_like(values), groups=groups, resamples=20_000)
    assert (paired.low, paired.high) == (ours.low, ours.high)
    share = np.mean(np.asarray(naive) <= 0)
    assert paired.p == pytest.approx(2 * min(share, 1 - share), abs=0.03)


def test_bootstrap_agrees_with_scipys():
    values = np.random.default_rng(4).exponential(size=80)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0))
    ours = bootstrap(values, resamples=20_000)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.02)


def test_bootstrap_leaves_out_queries_without_a_value_and_follows_its_seed():
    rng = np.random.default_rng(5)
    a, b, labels = rng.uniform(0, 100, 40), rng.uniform(0, 100, 40), np.arange(40) % 5
    a[3] = b[7] = NAN
    keep = ~(np.isnan(a) | np.isnan(b))
    assert paired_bootstrap(a, b) == paired_bootstrap(a[keep], b[keep])
    assert paired_bootstrap(a, b, groups=labels) == paired_bootstrap(a[keep], b[keep], groups=labels[keep])
    assert paired_bootstrap(a, b, rng=1) == paired_bootstrap(a, b, rng=np.random.default_rng(1))
    assert paired_bootstrap(a, b, rng=1) != paired_bootstrap(a, b, rng=2)


def test_bootstrap_of_too_few_or_constant_values():
    one = paired_bootstrap([1.0], [0.0])
    assert one.difference == 1.0
    assert math.isnan(one.p)
    one_class = bootstrap([1.0, 2.0], groups=[4, 4])
    assert (one_class.n, one_class.mean) == (1, 1.5)
    assert math.isnan(one_class.low)
    none = bootstrap([NAN, NAN])
    assert none.n == 0
    assert math.isnan(none.mean)
    same = paired_bootstrap([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    assert math.isnan(same.effect)


def test_pairs_and_groups_of_other_lengths_are_refused():
    with pytest.raises(NearkinError, match="same number of values"):
        paired_t([1.0, 2.0], [1.0])
    with pytest.raises(NearkinError, match="same number of values"):
        paired_bootstrap([1.0, 2.0], [1.0])
    with pytest.raises(NearkinError, match="one label per query"):
        bootstrap([1.0, 2.0], groups=[1])


def test_the_rate_of_false_alarms_is_about_the_level():
    rng = np.random.default_rng(6)
    t = np.mean([paired_t(*rng.normal(size=(2, 5))).p < 0.05 for _ in range(600)])
    assert 0.025 < t < 0.08
    labels = np.repeat(np.arange(60), 8)
    by_query, by_class = [], []
    for trial in range(150):
        d = rng.normal(size=60)[labels] + rng.normal(size=len(labels))  # queries of a class fail together
        zero = np.zeros(len(d))
        by_query.append(paired_bootstrap(d, zero, resamples=500, rng=trial).p < 0.05)
        by_class.append(paired_bootstrap(d, zero, groups=labels, resamples=500, rng=trial).p < 0.05)
    assert np.mean(by_class) < 0.12
    assert np.mean(by_query) > 0.2, "resampling queries alone should be fooled here; that is why classes are resampled"


def test_a_true_difference_is_found():
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(50), 20)
    b = rng.uniform(0, 100, 1000)
    c = paired_bootstrap(b + 2 + rng.normal(0, 5, 1000), b, groups=labels)
    assert c.low > 1
    assert c.high < 3
    assert c.p < 0.001


def test_ten_thousand_resamples_of_a_whole_test_set_are_quick_and_small():
    rng = np.random.default_rng(8)
    a, b = rng.uniform(0, 100, (2, 6000))
    began = time.perf_counter()
    paired_bootstrap(a, b)
    took = time.perf_counter() - began
    tracemalloc.start()
    paired_bootstrap(a, b, resamples=2000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 6, took  # about 0.6 s on a free core
    assert peak < 64 * 2**20


def test_average_ranks_by_hand_and_by_scipy():
    table = [[90, 80, 70, 60], [85, 86, 70, 50], [95, 85, 75, 65], [91, 91, 80, 70], [NAN, 1, 2, 3]]
    r = average_ranks(table)
    assert r.blocks == 4
    assert r.ranks == pytest.approx([1.375, 1.625, 3.0, 4.0])
    assert r.p == pytest.approx(stats.friedmanchisquare(*np.array(table[:4]).T).pvalue)
    assert r.critical == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 4)), abs=1e-3)  # Demšar 2006, Table 5
    assert r.groups == ((0, 1, 2), (2, 3))


def test_groups_are_the_largest_sets_without_a_significant_difference():
    blocks = [[5, 4, 3, 2, 1]] * 12
    r = average_ranks(blocks)
    assert 1 < r.critical < 2
    assert r.groups == ((0, 1), (1, 2), (2, 3), (3, 4))
    same = average_ranks([[1, 1, 1]] * 4)
    assert same.groups == ((0, 1, 2),)
    assert math.isnan(same.p)
    assert average_ranks([[1, 2]]).groups == ()
    assert math.isnan(average_ranks([[NAN, 2]]).ranks[0])
