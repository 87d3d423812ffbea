"""Pairs in blocks of columns: the same losses and gradients as of whole tensors, and the memory of one block."""

import math
import weakref

import many_classes
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nearkin.methods import column_blocks, relation
from nearkin.methods.base import Step
from nearkin.methods.catalogue import METHODS, method
from nearkin.methods.column_blocks import Columns, Pairs, cut_columns
from nearkin.methods.relation import relate
from nearkin.spec import option_names

B, C, DIM = 6, 23, 5
Y = torch.tensor([0, 0, 3, 7, 22, 22])
WITH_PROXIES = [name for name, entry in METHODS.items() if "sample_rate" in option_names(entry) and name != "proxy"]
OTHERS = [f"proxy({inner}, initial=normal)" for inner in ("contrastive", "triplet", "circle", "lifted", "nt_xent")]
OTHERS += [f"{name}({inner}, steps_per_epoch=1)" for name in ("proxy_isa",) for inner in ("proxy_anchor", "arcface")]
OTHERS += ["mpa_ap(similarity=max, per_class=2)", "mpa(similarity=mean)", "norm_softmax(smoothing=0.1, per_class=2)"]
OTHERS += ["proxy_anchor(sample_rate=0.5)", "vcpa(arcface, newton=False)", "arcface(per_class=3)"]


def results(spec):
    torch.manual_seed(0)
    m = method(spec, classes=C, dim=DIM).double()
    x = torch.randn(B, DIM, dtype=torch.float64)
    if "proxy_isa" in spec:
        for _ in range(4):
            m.after_step(Step(x, Y))
    x = x.requires_grad_()
    loss = m.loss(Step(x, Y, rng=torch.Generator().manual_seed(3)))
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in m.parameters())]


@pytest.mark.parametrize("spec", [*WITH_PROXIES, *OTHERS])
@pytest.mark.parametrize("block", [1, 10 * B])
def test_losses_and_gradients_are_those_of_whole_tensors(spec, block, monkeypatch):
    whole = results(spec)
    monkeypatch.setattr(column_blocks, "BLOCK", block)
    for got, expected in zip(results(spec), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_blocks_are_cut_between_classes_and_only_of_very_many_proxies(monkeypatch):
    assert cut_columns(180, 180_000, 1) is None, "two blocks"
    assert cut_columns(180, 10**6, 0) is None, "a memory or a batch"
    blocks = cut_columns(180, 2 * 10**6, 2)
    assert blocks.classes == 10**6
    assert blocks.width * 2 * 180 <= column_blocks.BLOCK
    assert len(blocks.numbers) == math.ceil(10**6 / blocks.width)
    monkeypatch.setattr(column_blocks, "BLOCK", 1)
    assert cut_columns(7, 12, 3) == Columns(4, 1)


def test_whatever_is_not_of_single_pairs_sees_the_whole_tensor():
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    pairs = Pairs.of(whole, Columns(3, 2, torch.tensor([0, 2, 2, 1])))
    assert isinstance(1 - 2 * pairs, Pairs)
    assert len(pairs) == 4
    assert pairs.ndim == 2
    assert torch.equal((1 - 2 * pairs).whole(), 1 - 2 * whole)
    assert torch.equal((~(pairs > 0) | (pairs == 1)).whole(), ~(whole > 0) | (whole == 1))
    assert torch.equal(
        torch.where(pairs > 0, pairs, torch.arange(6.0)).whole(), whole.where(whole > 0, torch.arange(6))
    )
    assert torch.equal(pairs.reshape(4, -1, 2).amax(-1).whole(), whole.reshape(4, 3, 2).amax(-1))
    assert torch.equal(pairs[:, ::2].whole(), whole[:, ::2])
    assert torch.equal(pairs[1:], whole[1:])
    assert torch.equal(pairs.T, whole.T)
    assert torch.equal((pairs * 2).sort(1).values, (whole * 2).sort(1).values)
    assert torch.equal(torch.softmax(pairs + 1, 1), torch.softmax(whole + 1, 1))
    with pytest.raises(AttributeError):
        _ = pairs.no_such_thing


class Largest(TorchDispatchMode):
    """Counts the operations whose result has as many numbers as all pairs, and all operations."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs, self.large, self.count, self.sums_of_exponents = pairs, [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        self.sums_of_exponents += "softmax" in func.__name__
        in_place = func.__name__.split(".")[0].endswith("_")
        if isinstance(out, torch.Tensor) and out.numel() >= self.pairs and not func.is_view and not in_place:
            self.large.append(func.__name__)
        return out


@pytest.mark.parametrize(
    "spec", ["proxy_anchor", "arcface", "mpa(per_class=2)", "mpa_ap(per_class=2, tau=0)", "norm_softmax(smoothing=0.1)"]
)
def test_only_products_and_their_gradient_are_as_large_as_all_pairs(spec, monkeypatch):
    classes, rows, dim = 400, 20, 4
    m = method(spec, classes=classes, dim=dim)
    x, y = torch.randn(rows, dim, requires_grad=True), torch.arange(rows)
    monkeypatch.setattr(column_blocks, "BLOCK", rows * 50 * m.proxies.per_class)
    monkeypatch.setattr(relation, "COMPARE_BLOCK", column_blocks.BLOCK)
    with Largest(classes * rows * m.proxies.per_class) as seen:
        loss = m.loss(Step(x, y))
        loss.backward()
    assert sorted(seen.large) == ["cat.default", "mm.default"]
    assert seen.count < 8 * 250, "the work per block does not grow with their number"
    if spec == "proxy_anchor":
        assert seen.sums_of_exponents == 8 + 8 + 1, "of the negatives, again for the gradient, and of the positives"


def test_the_vectors_are_freed_before_the_gradient_and_the_products_with_it(monkeypatch):
    monkeypatch.setattr(column_blocks, "BLOCK", 100)
    m = method("proxy_anchor", classes=200, dim=8)
    x, y = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    m.loss(Step(x, y)).backward()  # the first use of torch's checkpoints leaves a cycle
    r = relate(x, y, m.references(x, y), m.space)
    products, vectors = weakref.ref(r.s.known), weakref.ref(r.vectors)
    loss = m.objective(r)
    del r
    assert vectors() is None
    assert products() is not None
    loss.backward()
    assert products() is None


def test_the_benchmark_records_steps_and_errors():
    found = []
    many_classes.steps(torch.device("cpu"), tiny=True, only="arcface", limit=60, keep=found.append)
    assert [row["classes"] for row in found[-1]["rows"]] == [1000, 300, 100]
    assert all(row["milliseconds"] > 0 and row["last_loss"] < row["first_loss"] for row in found[-1]["rows"])
    many_classes.steps(torch.device("cpu"), tiny=True, only="arcface", limit=0, keep=found.append)
    assert "not measured" in found[-1]["rows"][0]["error"]


@pytest.mark.parametrize("scores_of", [many_classes.on_letters, many_classes.on_made_set])
def test_the_benchmark_scores_sampled_classes(scores_of, monkeypatch):
    monkeypatch.setattr(many_classes, "METHODS", ("arcface",))
    found = []
    many_classes.accuracy(scores_of, tiny=True, keep=found.append)
    assert [row["rate"] for row in found[-1]["rows"]] == [1, 0.1]
    assert all(0 < row["scores"]["MAP@R"] <= row["scores"]["R@1"] <= 100 for row in found[-1]["rows"])
