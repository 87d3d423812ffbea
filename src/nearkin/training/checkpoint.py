"""What training needs to go on, bit for bit: weights, method, optimiser, random generators."""
# MERGED: Model and method after chosen epochs, kept in a run's folder, and opened again: what pictures of a training need.
# MERGED: What a method knows of its training classes, kept beside the model: its proxies, and any number it holds a class.

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from nearkin.errors import NearkinError
from nearkin.files import Json, read_json, read_tensors, write_tensors
from nearkin.methods.base import Method
from nearkin.methods.catalogue import method
from nearkin.methods.proxies import Proxies
from nearkin.training.model import Model, build_embedder, embedding_dim
from nearkin.training.plan import Plan, make_plan, resolve_device
from nearkin.training.run_folder import RunFolder


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


class Snapshot(NamedTuple):
    """A run as it was after an epoch."""

    epoch: int
    model: Model
    method: Method


def write_snapshot(run: RunFolder, epoch: int, embedder: nn.Module, own: Method, names: Sequence[str]) -> None:
    """Keep the state of both after an epoch."""
    tensors = {f"model.{key}": value for key, value in embedder.state_dict().items()}
    tensors |= {f"method.{key}": value for key, value in own.state_dict().items()}
    path = run.snapshots / f"epoch-{epoch:04d}.safetensors"
    write_tensors(path, tensors, {"epoch": epoch, "names": list(names)})


def kept_epochs(run: RunFolder) -> dict[int, Path]:
    """The epochs that can be opened, with their files; the checkpoint of a finished run is its last epoch."""
    paths = {int(path.stem.removeprefix("epoch-")): path for path in run.snapshots.glob("epoch-*.safetensors")}
    if run.result.exists() and run.checkpoint.exists():
        last = read_json(run.result)["steps"] // read_json(run.config)["resolved"]["steps_per_epoch"]
        paths.setdefault(last, run.checkpoint)
    return dict(sorted(paths.items()))


def plan_of(run: RunFolder, *, data: str | None = None, device: str = "auto") -> Plan:
    """The plan a run was made by, for a device and a place of the data that may be others."""
    given: Json = {**read_json(run.config)["plan"], "device": str(resolve_device(device)), "precision": "auto"}
    return make_plan(given | {"weights": "none"} | ({"data": data} if data else {}), {})


def open_snapshot(run: RunFolder, epoch: int, *, data: str | None = None, device: str = "auto") -> Snapshot:
    """Model and method after an epoch, in eval mode."""
    paths = kept_epochs(run)
    if epoch not in paths:
        there = f"it has {', '.join(map(str, paths))}" if paths else f"train with --snapshots 0,{epoch}"
        raise NearkinError(f"{run.path} has no snapshot of epoch {epoch}: {there}.")
    tensors, about = read_tensors(paths[epoch])
    plan, config = plan_of(run, data=data, device=device), read_json(run.config)
    names = about["names"] if "names" in about else read_tensors(run.model)[1]["names"]
    own = method(config["method"], classes=len(names), dim=embedding_dim(plan), space=plan.space or None)
    embedder = build_embedder(plan, own.space)  # as in training: method and model are looked at together
    own.bind(embedder)
    parts: tuple[tuple[str, nn.Module], ...] = (("model.", embedder), ("method.", own))
    for prefix, module in parts:
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            said = str(error).splitlines()[-1].strip()
            raise NearkinError(f"{paths[epoch]} does not fit {run.config}: {said}") from None
    return Snapshot(epoch, Model(embedder.to(plan.device).eval(), plan, names), own.to(plan.device).eval())


COLUMN = "class."


class KnownClasses(NamedTuple):
    """The training classes as a method knows them."""

    names: tuple[str, ...]
    proxies: Tensor | None  # [P, D]
    labels: Tensor | None  # [P] which class a proxy is of
    columns: Mapping[str, Tensor]  # name → [C]


def write_classes(path: Path, method: Method, names: Sequence[str]) -> None:
    """Keep what the method knows now; a method that knows nothing of classes leaves no file."""
    tensors = {f"{COLUMN}{name}": value for name, value in method.class_values().items()}
    proxies = next((module for module in method.modules() if isinstance(module, Proxies)), None)
    if proxies is not None:
        tensors |= {"proxies": proxies.vectors, "labels": proxies.labels}
    if tensors:
        write_tensors(path, tensors, {"names": names})


def read_classes(path: Path) -> KnownClasses | None:
    """What was kept; None where nothing was."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    columns = {name.removeprefix(COLUMN): value for name, value in tensors.items() if name.startswith(COLUMN)}
    return KnownClasses(tuple(about["names"]), tensors.get("proxies"), tensors.get("labels"), columns)
