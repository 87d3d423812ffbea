"""Several ranks train every method to the state of one that has the whole batch."""

import pytest
import torch
from contract.cases import METHOD_SPECS, SAMPLED_SPECS, Run
from contract.processes import on_ranks

from nearkin import ranks

SPECS = METHOD_SPECS + SAMPLED_SPECS
STEPS = 6
CONTROL = "proxy_anchor"


def trained(specs):
    """Losses, parameters and buffers after a few steps, by spec."""
    found = {}
    for spec in specs:
        run = Run(spec, dtype=torch.float64)
        for group in run.optimiser.param_groups:
            group["eps"] = 1e-4  # else Adam enlarges gradients that are 0 but for rounding
        state = run.steps(STEPS).state()
        named = {f"{part}.{name}": t for part in ("model", "method") for name, t in state[part].items()}
        found[spec] = named | {"losses": torch.tensor(run.losses, dtype=torch.float64)}
    return found


def trained_on_ranks(specs):
    """The same of all specs, and of one whose ranks keep their own gradients."""
    found = trained(specs)
    ranks.average = list
    return found, trained([CONTROL])


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


@pytest.fixture(scope="module")
def alone():
    return trained(SPECS)


@pytest.mark.parametrize("count", [2, 4])
def test_every_method_trains_as_on_one_rank(alone, count):
    for found, control in on_ranks(count, trained_on_ranks, SPECS):
        assert not differing(found, alone)
        assert differing(control, {CONTROL: alone[CONTROL]}), "the comparison notices gradients that are not averaged"
