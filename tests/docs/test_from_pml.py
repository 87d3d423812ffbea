"""Every row of docs/from-pml.md that says that both libraries agree is run with both: values and gradients."""

import inspect
import math
import re
from pathlib import Path

import pytest
import pytorch_metric_learning.losses
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch.utils.data import DataLoader, TensorDataset

import nearkin as nk

PAGE = (Path(__file__).parents[2] / "docs" / "from-pml.md").read_text()
C, D = 6, 5
MODULES = (losses, distances, miners, reducers, samplers)
NAMES = {name: value for module in MODULES for name, value in vars(module).items() if inspect.isclass(value)}


def rows(name: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    table = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    assert table, name
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table[1].splitlines()[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of four images that overlap, shuffled, of norms from 0.3 to 3."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(C).repeat_interleave(4)[torch.randperm(4 * C, generator=rng)]
    centres = torch.randn(C, D, generator=rng, dtype=torch.float64)
    x = centres[y] + 0.7 * torch.randn(len(y), D, generator=rng, dtype=torch.float64)
    return x.requires_grad_(), y


@pytest.mark.parametrize(("theirs", "ours"), rows("losses"))
def test_a_loss_has_the_same_value_and_gradients(theirs: str, ours: str) -> None:
    spec, *options = code(ours)
    space = options[0].removeprefix("space=").strip('"') if options else None
    method = nk.method(spec, classes=C, dim=D, space=space).double()
    *mining, expression = code(theirs)
    built = [eval(text, {"C": C, "D": D, "math": math, **NAMES}) for text in (*mining, expression)]
    loss = built[-1].double()
    parameters = list(loss.parameters())
    own = list(method.parameters())
    with torch.no_grad():
        for w, p in zip(parameters, own, strict=True):
            w.copy_(p if w.shape == p.shape else p.T)
    for seed in range(3):
        x, y = batch(seed)
        expected = loss(x, y, *(miner(x, y) for miner in built[:-1]))
        found = method(x, y)
        assert found.detach() > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        wanted = torch.autograd.grad(expected, (x, *parameters))
        got = torch.autograd.grad(found, (x, *own))
        assert got[0].abs().max() > 1e-4
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b if a.shape == b.shape else b.T, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("theirs", "options", "ours"), rows("metrics"))
def test_a_metric_is_the_same(theirs: str, options: str, ours: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(120, 8, generator=rng), dim=1)
    y = (torch.rand(120, generator=rng) ** 2 * 30).long()  # large classes and small ones
    q = slice(0, 50)
    (name,), (metric, *average) = code(theirs), code(ours)
    settings = eval(f"dict({', '.join(code(options))})")
    calculator = AccuracyCalculator(include=(name, "precision_at_1"), device=torch.device("cpu"), **settings)
    kind = {"average": average[0].removeprefix("average=").strip('"')} if average else {}
    for queries, sides in ((x, {}), (x[q], {"gallery": x[50:], "gallery_labels": y[50:]})):
        labels = y if len(queries) == len(x) else y[q]
        expected = calculator.get_accuracy(queries, labels, *sides.values())[name]
        found = nk.evaluate(queries, labels, metrics=(metric,), **sides, **kind)[metric]
        assert found / 100 == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("theirs", "ours", "spec"), rows("calls"))
def test_a_call_gives_the_same(theirs: str, ours: str, spec: str) -> None:
    x, y = batch(0)
    (x2, _), (v, z) = batch(1), batch(2)
    names = {"nk": nk, "torch": torch, "x": x, "y": y, "x2": x2, "v": v.detach(), "z": z, "C": C, "D": D, **NAMES}
    names |= {"DataLoader": DataLoader, "data": TensorDataset(y), "w": torch.linspace(0.5, 2, C, dtype=torch.float64)}
    if spec:
        names["loss"] = nk.method(code(spec)[0], classes=C, dim=D)
    expected, found = (torch.as_tensor(eval(code(cell)[0], names)) for cell in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if spec:
        assert found.detach().abs().max() > 0.01
        (wanted,), (got,) = (torch.autograd.grad(value.sum(), x) for value in (expected, found))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_mean_average_precision_at_a_depth_differs_as_the_page_says() -> None:
    x, y = batch(2)
    theirs = AccuracyCalculator(include=("mean_average_precision",), k=5, device=torch.device("cpu"))
    expected = theirs.get_accuracy(torch.nn.functional.normalize(x.detach().float()), y)["mean_average_precision"]
    found = nk.evaluate(x.detach(), y, metrics=("MAP@5",))["MAP@5"]
    assert found * 5 / 3 / 100 == pytest.approx(expected, abs=1e-6)  # three relevant items per query


def test_the_page_names_every_loss_of_pml() -> None:
    base = (losses.BaseMetricLossFunction, losses.BaseLossWrapper)
    abstract = {
        "BaseMetricLossFunction",
        "BaseLossWrapper",
        "WeightRegularizerMixin",
        "GenericPairLoss",
        "MultipleLosses",
    }
    found = [n for n, v in vars(pytorch_metric_learning.losses).items() if inspect.isclass(v) and issubclass(v, base)]
    assert len(found) > 30
    assert [name for name in found if name not in abstract and not re.search(rf"\b{name}\b", PAGE)] == []
    assert set(re.findall(r"`(\w+(?:Loss|Miner|Distance|Similarity|Sampler))\b(?!\.)", PAGE)) <= {
        *NAMES,
        "ClassBatchSampler",
    }
