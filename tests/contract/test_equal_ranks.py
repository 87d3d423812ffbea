"""Several ranks train every method to the state of one that has the whole batch."""

from functools import cache

import pytest
import torch
from contract.cases import METHOD_SPECS, SAMPLED_SPECS, Run
from contract.processes import on_ranks

import nearkin as nk
from nearkin import ranks
from nearkin.methods import column_blocks
from nearkin.methods.base import Step
from nearkin.methods.cut_proxies import cut, whole_state
from nearkin.methods.proxies import Proxies
from nearkin.methods.strategies import vcpa

SPECS = METHOD_SPECS + SAMPLED_SPECS
STEPS = 6
CONTROL = "proxy_anchor"


def trained(specs, *, cutting=False, clip=0.0):
    """Losses, parameters and buffers after a few steps, by spec; or why a method cannot be cut."""
    found = {}
    for spec in specs:
        try:
            run = Run(spec, dtype=torch.float64, cut=cutting, clip=clip)
            for group in run.optimiser.param_groups:
                group["eps"] = 1e-4  # else Adam enlarges gradients that are 0 but for rounding
            run.steps(STEPS)
            state = {"model": run.model.state_dict(), "method": whole_state(run.method)}
            named = {f"{part}.{name}": t for part in state for name, t in state[part].items()}
            found[spec] = named | {"losses": torch.tensor(run.losses, dtype=torch.float64)}
        except nk.NearkinError as error:
            found[spec] = str(error)
    return found


def differing(found, expected):
    """The specs whose state differs, with the names of the tensors."""
    unlike = {
        spec: [
            name
            for name, t in tensors.items()
            if not torch.allclose(found[spec][name].double(), t.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
        ]
        for spec, tensors in expected.items()
    }
    return {spec: names for spec, names in unlike.items() if names}


@cache
def alone(clip=0.0):
    return trained(SPECS, clip=clip)


def trained_on_ranks(specs):
    """The same of all specs, and of one whose ranks keep their own gradients."""
    found = trained(specs)
    ranks.average = list
    return found, trained([CONTROL])


@pytest.mark.parametrize("count", [2, 4])
def test_every_method_trains_as_on_one_rank(count):
    for found, control in on_ranks(count, trained_on_ranks, SPECS):
        assert not differing(found, alone())
        assert differing(control, {CONTROL: alone()[CONTROL]}), "notices gradients that are not averaged"


CLIP = 0.5
IN_BLOCKS = [
    "proxy_anchor",
    "norm_softmax(smoothing=0.1)",
    "mpa(per_class=2)",
    "proxy_nca",
    "proxy_isa(steps_per_epoch=1)",
]
VCPA_BLOCK = {"cpu": 70 * 4}
CONTROLS = ["proxy_anchor", "norm_softmax"]


def trained_with_cuts(specs):
    """The state with proxies cut between ranks, the numbers in it, and controls in which a reduction is left out."""
    found, numbers = trained(specs, cutting=True, clip=CLIP), numbers_in(Run(LARGEST, cut=True))
    controls = {}
    for name in ("total", "collect", "spread"):
        kept = getattr(ranks, name)
        setattr(ranks, name, (lambda t: t[None]) if name == "collect" else (lambda t: t))
        controls[name] = trained(CONTROLS, cutting=True, clip=CLIP)
        setattr(ranks, name, kept)
    column_blocks.BLOCK, vcpa.BLOCK = 80, VCPA_BLOCK  # several blocks on some ranks
    return found, numbers, controls, {**trained(IN_BLOCKS, cutting=True), "newton": newton_steps()}


def newton_steps():
    """VCPA's state after steps on few of many classes, whose proxies move apart from the others, in several blocks."""
    torch.manual_seed(0)
    x, y, rng = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) * 7 % 25, torch.Generator().manual_seed(1)
    m = nk.method("vcpa(proxy_anchor(per_class=2), tau=0.3, steps=3, positives=batch)", classes=100, dim=4).double()
    cut(m)
    for _ in range(2):
        step = Step(x, y, rng=rng)
        m.loss(step)
        m.after_step(step)
    return whole_state(m)


LARGEST = "vcpa(soft_triple(per_class=2), newton=False)"


def numbers_in(run):
    """How many numbers a method holds per proxy: vectors, labels, standard deviations, moments."""
    return sum(t.numel() for t in run.method.state_dict().values() if t.ndim)


def test_proxies_cut_unevenly_train_as_on_one_rank(monkeypatch):
    specs = [s for s in SPECS if any(isinstance(module, Proxies) for module in Run(s).method.modules())]
    expected = {spec: alone(CLIP)[spec] for spec in specs}
    answers = on_ranks(3, trained_with_cuts, specs)
    whole = numbers_in(Run(LARGEST))
    assert [numbers for _, numbers, _, _ in answers] == [whole * classes // 8 for classes in (2, 3, 3)]
    found, _, controls, in_blocks = answers[0]  # rank 0 joins the proxies of all
    refused = {spec: text for spec, text in found.items() if isinstance(text, str)}
    assert {spec.partition("(")[0] for spec in refused} == {"proxy_gml", "proxy"}
    assert set(refused) & {s for s in specs if s.startswith("proxy(")} == {s for s in specs if "triplet" in s}
    assert all("leave out cut_proxies" in text for text in refused.values())
    assert not differing(found, {spec: state for spec, state in expected.items() if spec not in refused})
    for name, control in controls.items():
        assert differing(control, {spec: expected[spec] for spec in CONTROLS}), f"notices that {name} is left out"
    monkeypatch.setattr(vcpa, "BLOCK", VCPA_BLOCK)
    assert not differing(in_blocks, {**trained(IN_BLOCKS), "newton": newton_steps()})
