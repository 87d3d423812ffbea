"""Tests between runs against SciPy and naive loops, and the tables that report them."""

import numpy as np
import pytest
from scipy import stats

from nearkin.evaluation.statistics import AverageRanks, Comparison, holm
from nearkin.report import comparison
from nearkin.report.comparison import (
    PairTest,
    Ranking,
    class_means,
    class_ranking,
    comparison_tables,
    differing_scores,
    facts_table,
    intervals,
    model_tests,
    resamples,
    score_table,
    seed_tests,
)

LABELS = np.repeat(np.arange(12), 4)


def noisy_run(make_run, name, seed=0, *, noise, labels=LABELS):
    """Points around one centre per class; more noise, lower scores."""
    centres = np.random.default_rng(7).normal(size=(labels.max() + 1, 6))
    points = centres[labels] + noise * np.random.default_rng([seed, len(name)]).normal(size=(len(labels), 6))
    return make_run(points, labels, name=name, seed=seed)


@pytest.fixture
def seeds(make_run):
    noise = {"near": 0.5, "far": 1.5, "middle": 1.0}
    return [noisy_run(make_run, name, seed, noise=n) for name, n in noise.items() for seed in (0, 1, 2)]


@pytest.fixture
def models(make_run):
    return [noisy_run(make_run, name, noise=n) for name, n in (("near", 0.5), ("far", 1.5), ("middle", 1.0))]


def test_seed_tests_are_paired_t_tests_with_holm(seeds):
    found = {(p.a, p.b): p for p in seed_tests(seeds, "MAP@R")}
    scores = {(s.label.method, s.seed): float(np.nanmean(s.values["MAP@R"])) for s in seeds}
    raw = {}
    for a, b in found:
        raw[a, b] = stats.ttest_rel([scores[a, s] for s in range(3)], [scores[b, s] for s in range(3)]).pvalue
    assert list(found) == [("near", "far"), ("near", "middle"), ("far", "middle")]
    for (pair, test), p in zip(found.items(), holm(list(raw.values())), strict=True):
        assert test.test.p == pytest.approx(p)
        assert test.test.n == 3
        assert test.test.difference == pytest.approx(
            np.mean([scores[pair[0], s] - scores[pair[1], s] for s in range(3)])
        )
    assert not model_tests(seeds, "MAP@R")


def test_single_models_are_compared_over_classes_and_over_queries(models):
    assert not seed_tests(models, "MAP@R")
    found = model_tests(models, "MAP@R")
    assert [(p.a, p.b) for p in found] == [("near", "far"), ("near", "middle"), ("far", "middle")]
    near, far = (s.values["MAP@R"].numpy() for s in models[:2])
    assert found[0].test.difference == pytest.approx((near - far).mean())
    assert found[0].test.n == 12
    assert found[0].test.p < 0.01
    assert found[0].p_queries < 0.01
    alike = model_tests([models[0], models[0].__class__(**{**vars(models[0]), "label": models[1].label})], "R@1")
    assert alike[0].test.p == 1.0
    assert alike[0].verdict == "no significant difference"


def test_methods_with_one_shared_seed_are_compared_as_models(make_run, seeds):
    alone = noisy_run(make_run, "alone", seed=9, noise=0.7)
    assert {frozenset((p.a, p.b)) for p in model_tests([*seeds, alone], "R@1")} == {
        frozenset((name, "alone")) for name in ("near", "far", "middle")
    }
    assert len(seed_tests([*seeds, alone], "R@1")) == 3


@pytest.mark.parametrize(
    ("difference", "p", "words"),
    [
        (1.0, 0.01, "a is better"),
        (-1.0, 0.01, "b is better"),
        (1.0, 0.05, "no significant difference"),
        (1.0, np.nan, "cannot"),
    ],
)
def test_a_verdict_of_better_needs_significance(difference, p, words):
    assert PairTest("a", "b", Comparison(3, difference, 0, 0, p, 1), np.nan).verdict.startswith(words)


def test_class_means_are_naive_means(models):
    found = class_means(models[:2], "MAP@R")
    for c in range(12):
        means = [s.values["MAP@R"][c == LABELS].mean() for s in models[:2]]
        assert found[c] == pytest.approx(np.mean(means))


def test_a_class_with_one_image_has_no_mean(make_run):
    labels = np.array([0, 0, 1, 1, 2])
    one = make_run(np.random.default_rng(0).normal(size=(5, 3)), labels)
    assert np.isnan(class_means([one], "R@1")).tolist() == [False, False, True]


def test_the_ranking_is_friedman_over_classes(models):
    found = class_ranking(models, "MAP@R")
    table = np.stack([class_means([s], "MAP@R") for s in models], axis=1)
    assert found.names == ["near", "far", "middle"]
    assert found.ranks.blocks == 12
    assert found.ranks.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
    assert found.ranks.ranks == pytest.approx(stats.rankdata(-table, axis=1).mean(axis=0))
    assert found.differ
    assert not found.why_not


def test_all_methods_are_joined_if_friedman_is_not_significant(make_run):
    alike = [noisy_run(make_run, name, seed=s, noise=1.0) for name, s in (("aa", 1), ("bb", 2), ("cc", 3))]
    found = class_ranking(alike, "MAP@R")
    assert found.ranks.p > 0.05
    assert [sorted(group) for group in found.groups] == [[0, 1, 2]]


def test_pairs_are_compared_only_after_friedman():
    names, ranks = ["a", "b", "c"], np.array([1.0, 2.0, 3.0])
    for p, groups in ((0.2, ((0, 1, 2),)), (np.nan, ((0, 1, 2),)), (0.01, ((0, 1),))):
        assert Ranking(names, AverageRanks(20, ranks, p, 1.1, ((0, 1),)), "").groups == groups


def test_too_few_methods_or_classes_have_no_ranking(make_run, models):
    assert "three methods" in class_ranking(models[:2], "MAP@R").why_not
    few = np.repeat(np.arange(5), 4)
    small = [noisy_run(make_run, name, noise=1.0, labels=few) for name in ("a", "bb", "ccc")]
    assert class_ranking(small, "MAP@R").why_not == "It needs at least 10 test classes with a score; there are 5."


def test_intervals_hold_the_score(models):
    found = intervals(models[2], "R@1")
    score = models[2].score("R@1")
    assert found.queries.mean == found.classes.mean == pytest.approx(score)
    for each in found:
        assert each.low < score < each.high
    assert (found.queries.n, found.classes.n) == (48, 12)


def test_the_number_of_resamples_is_bounded():
    assert resamples(10) == 10_000
    assert resamples(10**7) == 1_000
    assert resamples(10_000) * 10_000 <= comparison.DRAWS


# Tables.


def test_the_table_of_one_run_has_intervals(models):
    table = score_table(models[:1])
    assert table.header == ["", "score", "95 % over queries", "95 % over classes", "before training"]
    rows = {row[0]: row for row in table.cells}
    assert rows["R@1"][1] == f"{models[0].score('R@1'):.2f}"
    assert rows["R@1"][4] == "1.00"
    assert rows["MAP@R"][4] == "–"
    assert "trust the interval over classes" in table.notes[0]


def test_a_clustering_metric_is_the_stored_score(make_run):
    one = noisy_run(make_run, "a", noise=0.5)
    one.result["scores"]["NMI"] = 55.5
    row = next(row for row in score_table([one]).cells if row[0] == "NMI")
    assert row[1:4] == ["55.50", "–", "–"]


def test_several_seeds_have_a_mean_and_an_error(seeds):
    table = score_table(seeds)
    assert table.header == ["", "seeds", "R@1", "MAP@R"]
    scores = [s.score("R@1") for s in seeds[:3]]
    assert table.cells[0][:3] == ["near", "3", f"{np.mean(scores):.2f} ± {stats.sem(scores):.2f}"]
    assert "standard error over seeds" in table.notes[0]


def test_single_runs_come_with_a_warning_about_seeds(models):
    table = score_table(models)
    assert table.header[-1] == "MAP@R: 95 % over classes"
    assert "a difference may be due to the seed" in table.notes[0]


def test_a_stored_score_that_differs_is_reported(models):
    assert differing_scores(models) == []
    models[0].result["scores"]["R@1"] += 1
    (sentence,) = differing_scores(models)
    assert "near, seed 0 (R@1" in sentence


def test_concatenated_models_are_reported_as_such(models):
    models[0].config["parts"] = ["fold-1", "fold-2"]
    models[0].result["scores"] |= {"R@1": 12.5, "R@1 4-d": 50.0}
    (sentence,) = differing_scores(models)
    assert sentence.startswith(
        "near, seed 0 is 2 models with their embeddings concatenated. The mean of their separate"
    )
    assert "R@1 12.50" in sentence
    assert "R@1 4-d" not in models[0].metrics


def test_tables_match_the_tests(seeds, models):
    by_seed = comparison_tables(seeds)
    assert [t.title for t in by_seed] == ["MAP@R: methods over seeds", "R@1: methods over seeds"]
    by_model = comparison_tables(models)
    assert [t.title for t in by_model] == ["MAP@R: model against model", "R@1: model against model"]
    row = by_model[0].cells[0]
    assert row[0] == "near − far"
    assert row[-1] == "near is better"
    assert row[2].startswith("+")
    assert "−" in by_model[0].cells[2][2]


def test_facts_that_all_runs_share_stand_once(models):
    models[1].result["hardware"] = "a slide rule"
    table = facts_table(models)
    assert table.header == ["", "method", "hardware"]
    assert [row[2] for row in table.cells] == ["an abacus, float32", "a slide rule, float32", "an abacus, float32"]
    assert "epoch chosen by: the last epoch (epoch 2 of 2)" in table.notes[0]
    assert "none of them a training class" in table.notes[0]


def test_training_classes_in_the_test_set_are_counted(make_run):
    one = noisy_run(make_run, "a", noise=0.5)
    object.__setattr__(one, "training_classes", frozenset({"class 1", "elsewhere"}))
    assert "1 of them training classes" in score_table([one]).notes[0]
