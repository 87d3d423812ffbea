"""State of a run in files: the checkpoint to resume from, snapshots of chosen epochs, and what a method has learnt.

A checkpoint holds weights, method, optimiser and random generators, so that a resumed run continues bit for bit.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.files import Json, Needs, read_json, read_tensors, write_tensors
from nearkin.methods.base import Method
from nearkin.methods.catalogue import method
from nearkin.methods.cut_proxies import cut_parameters, joined, own_part, own_state, same_on_all, whole_state
from nearkin.methods.proxies import Proxies
from nearkin.training.model import Model, build_embedder, embedding_dim, load_state
from nearkin.training.moved_data import find_data
from nearkin.training.plan import Plan, make_plan, resolve_device
from nearkin.training.run_folder import RunFolder

NEEDS: Needs = {
    "step": int,
    "scores": list,
    "trained": list,
    "seconds": int | float,
    "events": int,
    "images": int,
}
"""The entries of a checkpoint's record that training resumes from."""


class State(NamedTuple):
    """What changes from step to step, except a few numbers."""

    model: nn.Module
    method: nn.Module
    optimiser: torch.optim.Optimizer
    losses: Tensor  # of this epoch
    rng: Generator  # of the method
    crops: Generator  # of the training crops; the same object for runs of older versions
    mean: Mapping[str, Tensor]  # the running mean of the weights; empty if there is none


CROPS = "rng.crops"


def save(path: Path, state: State, about: Json) -> None:
    """Write the state and a record of numbers as one file, atomically; all ranks call it, and rank 0 writes."""
    tensors = _state_of(state.model, state.method)
    for number, (parameter, values) in enumerate(_moments(state)):
        tensors |= {
            f"optimiser.{number}.{name}": joined(state.method, value) if _is_cut(state, parameter, value) else value
            for name, value in values.items()
            if value is not None
        }
    if not ranks.is_first():
        return
    tensors |= {f"mean.{name}": t for name, t in state.mean.items()}
    tensors |= {"losses": state.losses, "rng.own": state.rng.get_state(), "rng.cpu": torch.get_rng_state()}
    if state.crops is not state.rng:
        tensors[CROPS] = state.crops.get_state()
    if state.losses.is_cuda:
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.losses.device)
    write_tensors(path, tensors, about)


def replicated(state: State) -> list[Tensor]:
    """The tensors that all ranks hold alike."""
    moments = [v for p, values in _moments(state) for v in values.values() if not _is_cut(state, p, v)]
    tensors = (*state.model.state_dict().values(), *same_on_all(state.method), *moments, *state.mean.values())
    return [t for t in tensors if isinstance(t, Tensor)]


def _moments(state: State) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """The parameters in the order of the optimiser's state, each with what it holds."""
    parameters = [p for group in state.optimiser.param_groups for p in group["params"]]
    return [(p, state.optimiser.state.get(p, {})) for p in parameters]


def _is_cut(state: State, parameter: Tensor, value: Any) -> bool:
    """Whether a value of the optimiser belongs to the proxies of this rank alone."""
    if not isinstance(value, Tensor) or value.shape[:1] != parameter.shape[:1]:
        return False
    return any(parameter is own for own in cut_parameters(state.method))


def check_settings(run: RunFolder, plan: Plan, written: Json) -> None:
    """Refuse the checkpoint of a run with other settings; data and device may have moved, epochs been added."""
    now = json.loads(json.dumps(dataclasses.asdict(plan))) | {"data": None, "device": None}
    if now["epochs"] > written.get("epochs", 0):
        now["epochs"] = None
    if other := [name for name, value in written.items() if now.get(name) not in (None, value)]:
        raise NearkinError(
            f"{run.checkpoint} was written with another {', '.join(other)} than {run.config} has: "
            "restore that file, or train into another folder."
        )


def restore(state: State, tensors: dict[str, Tensor]) -> None:
    """Load all parts of the state from the tensors of a checkpoint."""
    state.model.load_state_dict(_below("model.", tensors))
    state.method.load_state_dict(own_state(state.method, _below("method.", tensors)))
    own = cut_parameters(state.method)
    numbers = {n for n, (parameter, _) in enumerate(_moments(state)) if any(parameter is p for p in own)}
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in _below("optimiser.", tensors).items():
        number, name = key.split(".", 1)
        part = own_part(state.method, value) if int(number) in numbers and value.ndim else value
        moments.setdefault(int(number), {})[name] = part
    state.optimiser.load_state_dict({**state.optimiser.state_dict(), "state": moments})
    for parameter, values in state.optimiser.state.items():  # fused optimisers need the memory layout of the parameter
        for name, value in values.items():
            if value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)
    for name, value in _below("mean.", tensors).items():
        state.mean[name].copy_(value)
    state.losses.copy_(tensors["losses"])
    state.rng.set_state(tensors["rng.own"])
    if CROPS in tensors:
        state.crops.set_state(tensors[CROPS])
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and state.losses.is_cuda:
        torch.cuda.set_rng_state(tensors["rng.cuda"], state.losses.device)


def _state_of(model: nn.Module, method: nn.Module) -> dict[str, Tensor]:
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    return tensors | {f"method.{key}": value for key, value in whole_state(method).items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


class Snapshot(NamedTuple):
    """A run after an epoch."""

    epoch: int
    model: Model
    method: Method


def write_snapshot(run: RunFolder, epoch: int, model: nn.Module, method: Method, names: Sequence[str]) -> None:
    """Write the state of model and method after an epoch; all ranks call it, and rank 0 writes."""
    path, tensors = run.snapshots / f"epoch-{epoch:04d}.safetensors", _state_of(model, method)
    if ranks.is_first():
        write_tensors(path, tensors, {"epoch": epoch, "names": list(names)})


def kept_epochs(run: RunFolder) -> dict[int, Path]:
    """Return the files of the saved epochs by their numbers; the checkpoint of a finished run is its last epoch."""
    paths = {int(path.stem.removeprefix("epoch-")): path for path in run.snapshots.glob("epoch-*.safetensors")}
    if run.result.exists() and run.checkpoint.exists():
        last = run.read_result()["steps"] // read_json(run.config)["resolved"]["steps_per_epoch"]
        paths.setdefault(last, run.checkpoint)
    return dict(sorted(paths.items()))


def plan_of(run: RunFolder, *, data: str | None = None, device: str = "auto") -> Plan:
    """Return the plan of a run, for this device and, if given, another location of the data."""
    settings: Json = {**read_json(run.config)["plan"], "device": str(resolve_device(device)), "precision": "auto"}
    return make_plan(settings | {"weights": "none", "start": "", "data": data or find_data(run)}, {})


def open_snapshot(run: RunFolder, epoch: int, *, data: str | None = None, device: str = "auto") -> Snapshot:
    """Load model and method as they were after an epoch, in eval mode."""
    paths = kept_epochs(run)
    if epoch not in paths:
        hint = f"it has {', '.join(map(str, paths))}" if paths else f"train with --snapshots 0,{epoch}"
        raise NearkinError(f"{run.path} has no snapshot of epoch {epoch}: {hint}.")
    tensors, about = read_tensors(paths[epoch])
    plan, config = plan_of(run, data=data, device=device), read_json(run.config)
    names = about["names"] if "names" in about else read_tensors(run.model)[1]["names"]
    objective = method(config["method"], classes=len(names), dim=embedding_dim(plan), space=plan.space or None)
    embedder = build_embedder(plan, objective.space)  # the space of training, as the method has it
    objective.bind(embedder)
    load_state(embedder, _below("model.", tensors), paths[epoch], run.config)
    load_state(objective, _below("method.", tensors), paths[epoch], run.config)
    return Snapshot(epoch, Model(embedder.to(plan.device).eval(), plan, names), objective.to(plan.device).eval())


COLUMN = "class."


class KnownClasses(NamedTuple):
    """What a method has learnt about the training classes."""

    names: tuple[str, ...]
    proxies: Tensor | None  # [P, D]
    labels: Tensor | None  # [P] the class of each proxy
    columns: Mapping[str, Tensor]  # name → one value per class [C]


def write_classes(path: Path, method: Method, names: Sequence[str]) -> None:
    """Write a method's proxies and values per class; without any, no file. All ranks call it, and rank 0 writes."""
    tensors = {f"{COLUMN}{name}": value for name, value in method.class_values().items()}
    proxies = next((module for module in method.modules() if isinstance(module, Proxies)), None)
    if proxies is not None:
        tensors |= {"proxies": joined(method, proxies.vectors), "labels": joined(method, proxies.labels)}
    if tensors and ranks.is_first():
        write_tensors(path, tensors, {"names": names})


def read_classes(path: Path) -> KnownClasses | None:
    """Read what `write_classes` wrote; None if there is no file."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    columns = {name.removeprefix(COLUMN): value for name, value in tensors.items() if name.startswith(COLUMN)}
    return KnownClasses(tuple(about["names"]), tensors.get("proxies"), tensors.get("labels"), columns)
