"""`evaluate` against the oracle and pytorch-metric-learning, and its invariances."""

import math

import numpy as np
import pytest
import torch
from evaluation import naive
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.evaluation import DEFAULT_METRICS, counting, evaluate
from nearkin.evaluation import copies as copies_module
from nearkin.evaluation import positive_ranks as ranks_module
from nearkin.space import Space


def made(count: int, classes: int, *, seed: int, dim: int = 5, copies: int = 0) -> tuple[Tensor, Tensor]:
    """Random points with random labels; some vectors repeat, in any class; some classes have one item."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=rng)
    x[torch.randperm(count, generator=rng)[:copies]] = x[torch.randint(count, (copies,), generator=rng)]
    skew = torch.rand(count, generator=rng) ** 2  # large classes and small ones
    return x, (skew * classes).long()


def integers(count: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Small integers, whose inner products are exact and mostly tied."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (count, 3), generator=rng).float(), torch.randint(classes, (count,), generator=rng)


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(ours) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("space", Space)
@pytest.mark.parametrize(("classes", "copies"), [(40, 0), (40, 25), (4, 30), (1, 3)])
def test_leave_self_out_agrees_with_the_oracle(space: Space, classes: int, copies: int) -> None:
    x, y = made(70, classes, seed=classes, copies=copies)
    ours = evaluate(x, y, metrics=naive.METRICS, per_query=True, space=space)
    assert_same(ours, naive.per_query(x, y, x, y, list(range(70)), space))


@pytest.mark.parametrize("space", Space)
@pytest.mark.parametrize("classes", [30, 3])
def test_query_gallery_agrees_with_the_oracle(space: Space, classes: int) -> None:
    x, y = made(90, classes, seed=classes + 1, copies=40)
    q, g = slice(0, 31), slice(31, None)
    ours = evaluate(x[q], y[q], gallery=x[g], gallery_labels=y[g], metrics=naive.METRICS, per_query=True, space=space)
    assert_same(ours, naive.per_query(x[q], y[q], x[g], y[g], [-1] * 31, space))


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_ties_agree_with_the_oracle(classes: int) -> None:
    x, y = integers(80, classes, seed=classes)
    ours = evaluate(x, y, metrics=naive.METRICS, per_query=True, space="inner")
    assert_same(ours, naive.per_query(x, y, x, y, list(range(80)), "inner"))


@pytest.mark.parametrize("few", [0, 1000])
def test_both_ways_of_counting_agree_with_the_oracle(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "FEW", few)
    x, y = integers(80, 6, seed=9)
    expected = naive.per_query(x, y, x, y, list(range(80)), "inner")
    for metrics in (("R@1",), ("P@5", "nDCG@4"), ("P@R", "MAP@R"), naive.METRICS):
        ours = evaluate(x, y, metrics=metrics, per_query=True, space="inner")
        assert_same(ours, {name: expected[name] for name in metrics})


def test_the_top_of_a_row_holds_its_highest_scores() -> None:
    """In a row folded once, often or not at all, of any length, with ties and removed items."""
    rng = np.random.default_rng(0)
    for length, count in ((5, 5), (63, 4), (64, 4), (1000, 3), (1001, 60), (4099, 1)):
        row = np.round(rng.standard_normal(length).astype(np.float32), 1)
        row[rng.integers(length, size=length // 3)] = -np.inf
        top = counting._top(row, count)
        assert len(top) >= count
        assert top.tolist() == sorted(row.tolist())[length - len(top) :]
        below = row[row < top[0]]
        assert len(top) + len(below) == length or length < 16 * count


@pytest.mark.parametrize("metrics", [("R@1",), ("P@R", "MAP@R"), naive.METRICS])
def test_counting_on_a_gpu_agrees_with_the_oracle(metrics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = counting.above_on_gpu
    monkeypatch.setattr(
        ranks_module, "above_in_rows", lambda block, scores, bound: on_gpu(block, scores, int(bound.max()))
    )
    x, y = integers(50, 12, seed=10)
    expected = naive.per_query(x, y, x, y, list(range(50)), "inner")
    ours = evaluate(x, y, metrics=metrics, per_query=True, space="inner")
    assert_same(ours, {name: expected[name] for name in metrics})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_block_size_and_threads_do_not_matter(rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = made(150, 20, seed=3, copies=60)
    expected = evaluate(x, y, metrics=naive.METRICS, per_query=True)
    monkeypatch.setattr(ranks_module, "_split_work", lambda *_: (threads, rows))
    seen: list[tuple[int, int]] = []
    ours = evaluate(
        x, y, metrics=naive.METRICS, per_query=True, progress=lambda done, total: seen.append((done, total))
    )
    assert_same(ours, expected)
    assert seen == [(min(start + rows, 150), 150) for start in range(0, 150, rows)]


@pytest.mark.parametrize("copies", [0, 20])
@pytest.mark.parametrize("rows", [50, 64])
def test_products_that_count_for_both_of_their_items_agree_with_the_oracle(
    rows: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    multiply = ranks_module._product
    monkeypatch.setattr(ranks_module, "DIMENSIONS_PER_ITEM", 0)
    monkeypatch.setattr(ranks_module, "_split_work", lambda *_: (2, rows))
    monkeypatch.setattr(counting, "TILE", (7, 16))
    monkeypatch.setattr(
        ranks_module, "_product", lambda x, v, out: (products.append(out.numel()), multiply(x, v, out=out))
    )
    tied = torch.cartesian_prod(*[torch.arange(-1.0, 2)] * 5)[:200], torch.arange(200) * 7 % 41  # no two are equal
    for (x, y), space in ((made(200, 40, seed=1, copies=copies), "cosine"), (tied, "inner")):
        expected = naive.per_query(x, y, x, y, list(range(200)), space)
        for metrics in (("R@1",), ("P@R", "MAP@R"), naive.METRICS):
            products.clear()
            ours = evaluate(x, y, metrics=metrics, per_query=True, space=space)
            assert_same(ours, {name: expected[name] for name in metrics})
            if space == "cosine" and not copies:
                assert sum(products) < 0.8 * 200**2


@pytest.mark.parametrize("space", Space)
def test_the_order_of_the_items_does_not_matter_even_with_ties(space: Space) -> None:
    x, y = made(203, 30, seed=5, dim=17, copies=150)
    order = torch.randperm(203, generator=torch.Generator().manual_seed(0))
    before = evaluate(x, y, metrics=naive.METRICS, per_query=True, space=space)
    after = evaluate(x[order], y[order], metrics=naive.METRICS, per_query=True, space=space)
    assert_same(after, {name: value[order] for name, value in before.items()})


@pytest.mark.parametrize("space", Space)
@pytest.mark.parametrize("count", [7, 33, 1001])
def test_identical_embeddings_score_zero(space: Space, count: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)).expand(count, 64)
    scores = evaluate(x, torch.arange(count) % 3, metrics=("R@1", "R@2", "P@R", "MAP@R", "nDCG@2"), space=space)
    assert set(scores.values()) == {0.0}


def test_equal_vectors_tie_in_any_position() -> None:
    """A matrix product rounds equal columns differently; a copy of another class must still come first, always."""
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    x = x.repeat_interleave(2, 0)  # each vector under two classes
    x = torch.cat([x, x[:1]])  # an odd count leaves the product's last column to other code
    y = torch.arange(1001) % 2
    y[-1] = 0
    found = evaluate(x, y, metrics=("R@1",), per_query=True)["R@1"]
    assert found.sum() == 0


def test_minus_zero_is_zero() -> None:
    v = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    keys = copies_module.fingerprint(v)
    assert keys[0] == keys[1]


def test_copies_are_found_and_nothing_else() -> None:
    points = torch.randint(2, (200, 6), generator=torch.Generator().manual_seed(0)).float()
    copies, originals = copies_module.find_copies(points)
    rows = [tuple(row) for row in points.tolist()]
    assert sorted(zip(copies.tolist(), originals.tolist(), strict=True)) == [
        (i, rows.index(row)) for i, row in enumerate(rows) if rows.index(row) < i
    ]
    assert len(copies_module.find_copies(torch.arange(40.0).reshape(10, 4))[0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprints_tell_codes_apart(dtype: torch.dtype) -> None:
    for pair in ([-1.0, 1.0], [0.0, 1.0], [0.5, 0.25]):  # all their difference is in the highest bits
        codes = torch.cartesian_prod(*[torch.tensor(pair, dtype=dtype)] * 14)
        assert len(torch.unique(copies_module.fingerprint(codes))) == 2**14
    assert len(torch.unique(copies_module.fingerprint(torch.eye(500, dtype=dtype)))) == 500


@pytest.mark.parametrize("space", Space)
def test_long_embeddings_score_as_short_ones_or_are_refused(space: Space) -> None:
    """Scaled by a power of two nothing else rounds, up to the overflow, which is refused where norms are not fixed."""
    x, y = made(60, 10, seed=3, dim=8)
    metrics = ("R@1", "MAP@R", "NMI")
    expected = evaluate(x * 2.0**20, y, space=space, metrics=metrics)  # long enough to leave the ball
    highest = 48 if space.norm_floor is None else 60
    for power in (30, 40, highest):
        assert evaluate(x * 2.0**power, y, space=space, metrics=metrics) == expected, power
    for power in range(highest + 4, 66, 2):
        with pytest.raises(NearkinError, match="overflowing values"):
            evaluate(x * 2.0**power, y, space=space, metrics=metrics)
    assert evaluate((x * 2.0**64).double(), y, space=space, metrics=("R@1",))["R@1"] == expected["R@1"]


def test_large_ids_do_not_collide() -> None:
    x, y = made(60, 12, seed=8)
    expected = evaluate(x, y, metrics=naive.METRICS, per_query=True)
    for shift in (2**24, 2**53, 2**62, -(2**62)):
        assert_same(evaluate(x, y + shift, metrics=naive.METRICS, per_query=True), expected)


@pytest.mark.parametrize("classes", [300, 12])
def test_agrees_with_pytorch_metric_learning(classes: int) -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    x, y = made(600, classes, seed=4, dim=16)
    theirs = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
    )
    unit = torch.nn.functional.normalize(x, dim=1)
    expected = theirs.get_accuracy(unit, y)
    ours = evaluate(x, y, metrics=("R@1", "P@R", "MAP@R"))
    assert ours["R@1"] / 100 == pytest.approx(expected["precision_at_1"], abs=1e-5)
    assert ours["P@R"] / 100 == pytest.approx(expected["r_precision"], abs=1e-5)
    assert ours["MAP@R"] / 100 == pytest.approx(expected["mean_average_precision_at_r"], abs=1e-5)


def test_scores_are_means_over_the_queries_that_count() -> None:
    x, y = made(80, 60, seed=6)
    values = evaluate(x, y, per_query=True)
    scores = evaluate(x, y)
    alone = sum((y == label).sum() == 1 for label in y.tolist())
    assert alone > 5
    assert (scores.queries, scores.left_out) == (80 - alone, alone)
    assert tuple(scores) == DEFAULT_METRICS
    for name, value in values.items():
        assert (value.shape, value.dtype) == ((80,), torch.float64)
        assert int(value.isnan().sum()) == alone
        assert scores[name] == pytest.approx(float(value[~value.isnan()].mean()))


def test_precision_of_the_input() -> None:
    x, y = made(60, 10, seed=7)
    half = x.half()
    assert evaluate(half, y) == evaluate(half.float(), y)
    # 1e-10 apart: told apart in float64 alone, where the nearest of each is of its class
    fine = torch.tensor([[1.0, 0.0], [1.0, 1e-10], [1.0, 3e-10], [1.0, 4e-10]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    assert evaluate(fine, labels, metrics=("R@1",), space="ball")["R@1"] == 0  # d² is 1e-20 there: all tied
    far = fine * torch.tensor([0.0, 1.0], dtype=torch.float64) + torch.tensor([0.5, 0.3], dtype=torch.float64)
    query = torch.tensor([[0.0, 0.9]], dtype=torch.float32)
    found = evaluate(query, labels[-1:], gallery=far, gallery_labels=labels, metrics=("P@R",), space="ball")
    assert found["P@R"] == 100
    assert (
        evaluate(query, labels[-1:], gallery=far.float(), gallery_labels=labels, metrics=("P@R",), space="ball")["P@R"]
        == 0
    )


def test_inputs_with_gradients_numpy_and_lists_are_accepted() -> None:
    x, y = made(30, 4, seed=1)
    expected = evaluate(x, y)
    assert evaluate(x.clone().requires_grad_(), y) == expected
    assert evaluate(x.numpy(), y.tolist()) == expected  # type: ignore[arg-type]
    assert evaluate(x.T.contiguous().T, y.int(), metrics=list(DEFAULT_METRICS)) == expected
    with torch.inference_mode():
        assert evaluate(x + 0, y) == expected
    assert evaluate(x, y, metrics="R@1") == {"R@1": expected["R@1"]}


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_blocks_stay_small_whatever_the_gallery(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for gallery, widest in ((60_502, 12), (5_924, 60), (1_000_000, 1000), (60_502, 30_000), (10, 3)):
        points = torch.empty(1, 1).expand(gallery, 512)
        workers, rows = ranks_module._split_work(points, widest, gallery)
        assert workers in (1, threads)
        assert workers * rows >= min(64, gallery)
        assert workers * rows * (gallery * 4 + widest * 32) <= 2**28 + 2**20


X, Y = made(20, 4, seed=0)
NOT_FINITE = X.clone()
NOT_FINITE[3, 1] = math.nan
INFINITE = X.clone()
INFINITE[5, 0] = math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": NOT_FINITE}, "NaN, infinite or overflowing values in 1 of 20 rows, the first of them row 3"),
        ({"embeddings": INFINITE}, "the first of them row 5"),
        ({"embeddings": X * 1e30}, "overflowing values in 20 of 20"),
        ({"embeddings": None}, "The embeddings cannot be read from NoneType: give a tensor or an array"),
        ({"embeddings": "abc"}, "The embeddings cannot be read from str"),
        ({"embeddings": [[1.0, 2.0], [3.0]]}, "The embeddings cannot be read from list"),
        ({"embeddings": X.to_sparse()}, r"The embeddings must not be sparse: call to_dense\(\)"),
        ({"labels": None}, "The labels of the embeddings cannot be read from NoneType"),
        ({"labels": ["cat"] * 19 + [1]}, "embeddings cannot be read from list: give one integer or string per item"),
        ({"labels": ["cat"] * 19}, "20 rows and there are labels of 19"),
        ({"labels": Y.to_sparse()}, "The labels of the embeddings must not be sparse"),
        ({"gallery": "abc", "gallery_labels": Y}, "The gallery cannot be read from str"),
        ({"gallery": X.to_sparse(), "gallery_labels": Y}, "The gallery must not be sparse"),
        ({"embeddings": X[:0], "labels": Y[:0]}, r"not empty: its shape is \(0, 5\)"),
        ({"embeddings": X[0]}, r"must be a matrix.*\(5,\)"),
        ({"labels": Y[:-1]}, "20 rows and there are labels of 19"),
        ({"labels": Y[:, None]}, r"\(20, 1\)"),
        ({"labels": Y.float()}, "give integers"),
        ({"labels": torch.arange(20)}, "No query has a relevant item"),
        ({"gallery": X}, "give both or neither"),
        ({"gallery_labels": Y}, "give both or neither"),
        ({"gallery": X[:, :3], "gallery_labels": Y}, "5 dimensions and the gallery 3"),
        ({"gallery": NOT_FINITE, "gallery_labels": Y}, "The gallery hold"),
        ({"gallery": X, "gallery_labels": Y + 100}, "No query has a relevant item"),
        ({"metrics": ()}, "No metric was asked for"),
        ({"metrics": ("R@1", "mAP")}, "no metric 'mAP'. Did you mean 'MAP'"),
        ({"metrics": ("NMI",), "per_query": True}, "NMI has no value per query"),
        ({"space": "cosin"}, "no space 'cosin'. Did you mean 'cosine'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(NearkinError, match=message):
        evaluate(**{"embeddings": X, "labels": Y, **arguments})  # type: ignore[call-overload]


def test_tf32_is_off_during_the_product_and_back_afterwards() -> None:
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_tf32 = True
        with ranks_module._no_tf32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.allow_tf32
        matmul.allow_tf32 = False
        matmul.fp32_precision = "tf32"
        with ranks_module._no_tf32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "none"
        matmul.allow_tf32 = False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("space", Space)
@pytest.mark.parametrize("tf32", [False, True])
def test_gpu_and_cpu_agree(space: Space, tf32: bool) -> None:
    x, y = made(300, 40, seed=11, dim=32, copies=100)
    z, w = made(200, 40, seed=12, dim=32)
    old = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        ours = evaluate(x.cuda(), y.cuda(), metrics=naive.METRICS, per_query=True, space=space)
        across = evaluate(
            x.cuda(), y, gallery=z, gallery_labels=w.cuda(), metrics=naive.METRICS, per_query=True, space=space
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = old
    assert_same(ours, evaluate(x, y, metrics=naive.METRICS, per_query=True, space=space))
    assert_same(across, evaluate(x, y, gallery=z, gallery_labels=w, metrics=naive.METRICS, per_query=True, space=space))
    assert set(evaluate(torch.ones(333, 64).cuda(), torch.arange(333) % 3, space=space).values()) == {0.0}
