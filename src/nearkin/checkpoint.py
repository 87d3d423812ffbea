"""What training needs to go on, bit for bit: weights, method, optimiser, random generators."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from nearkin.runs import Json, write_tensors


class State(NamedTuple):
    """All that changes from step to step, but for a few numbers."""

    model: nn.Module
    method: nn.Module
    optimiser: torch.optim.Optimizer
    losses: Tensor  # of this epoch
    rng: Generator


def save(path: Path, state: State, about: Json) -> None:
    """Write the state and a record of numbers as one file, whole or not at all."""
    moments = state.optimiser.state_dict()["state"]
    tensors = {f"model.{k}": v for k, v in state.model.state_dict().items()}
    tensors |= {f"method.{k}": v for k, v in state.method.state_dict().items()}
    tensors |= {f"optimiser.{i}.{k}": v for i, own in moments.items() for k, v in own.items() if v is not None}
    tensors |= {"losses": state.losses, "rng.own": state.rng.get_state(), "rng.cpu": torch.get_rng_state()}
    if state.losses.is_cuda:
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.losses.device)
    write_tensors(path, tensors, about)


def restore(state: State, tensors: dict[str, Tensor]) -> None:
    """Put everything back to where it was."""

    def below(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    state.model.load_state_dict(below("model."))
    state.method.load_state_dict(below("method."))
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in below("optimiser.").items():
        number, name = key.split(".", 1)
        moments.setdefault(int(number), {})[name] = value
    state.optimiser.load_state_dict({**state.optimiser.state_dict(), "state": moments})
    for parameter, own in state.optimiser.state.items():  # fused optimisers want the memory layout of the parameter
        for name, value in own.items():
            if value.shape == parameter.shape:
                own[name] = torch.empty_like(parameter).copy_(value)
    state.losses.copy_(tensors["losses"])
    state.rng.set_state(tensors["rng.own"])
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and state.losses.is_cuda:
        torch.cuda.set_rng_state(tensors["rng.cuda"], state.losses.device)
