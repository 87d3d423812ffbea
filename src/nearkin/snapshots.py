"""Model and method after chosen epochs, kept in a run's folder, and opened again: what pictures of a training need."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from nearkin.errors import NearkinError
from nearkin.method import Method, method
from nearkin.model import Model, build_embedder, embedding_dim
from nearkin.plan import Plan, make_plan, resolve_device
from nearkin.runs import Json, RunFolder, read_json, read_tensors, write_tensors


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
