"""Start from a finished run: which settings a new run takes from it, and its network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nearkin.data.pixels.views import Normalise
from nearkin.errors import NearkinError
from nearkin.files import Json, content_digest, read_json, read_tensors
from nearkin.networks.embedder import Embedder
from nearkin.training.moved_data import find_data
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder

_NETWORK = ("backbone", "dim", "pool", "bias", "layer_norm", "drop_path", "size")
_DATA = ("halves", "test", "fraction")
_METHOD = ("method", "space", "images_per_class")


def with_start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those a run takes from the one it starts from: network, data and method, if not given."""
    if not settings.get("start"):
        return dict(settings)
    if settings.get("weights", "none") not in ("none", "default"):
        raise NearkinError("A run starts from weights or from a run: leave out --weights or --from.")
    start = settings["start"]
    run = RunFolder(Path(start.path if isinstance(start, RunFolder) else start).resolve())
    if parts := run.parts():
        raise NearkinError(f"{run.path} is {len(parts)} models: start from one of them, such as {parts[0].path}.")
    plan = read_json(run.config)["plan"]
    if (backbone := settings.get("backbone", plan["backbone"])) != plan["backbone"]:
        raise NearkinError(f"{run.path} has the backbone {plan['backbone']}, not {backbone}: leave out --backbone.")
    names = (*_NETWORK, *(() if "data" in settings else _DATA), *(() if "method" in settings else _METHOD))
    taken = {name: plan[name] for name in names if name in plan}
    if "data" not in settings:
        taken["data"] = find_data(run)
    return {**taken, **settings, "start": str(run.path), "weights": "none"}


def load_start(embedder: Embedder, start: str) -> None:
    """Load the network of a run into a new one, with its head if that has the same shape."""
    model = RunFolder(start).model
    tensors, about = read_tensors(model)
    if not _fits(embedder, tensors):
        tensors = {name: t for name, t in tensors.items() if not name.startswith("head.")}
        tensors |= {f"head.{name}": t for name, t in embedder.head.state_dict().items()}
    try:
        embedder.load_state_dict(tensors)
    except RuntimeError as error:
        raise NearkinError(
            f"{model} does not fit the network of this run ({str(error).splitlines()[-1].strip()}): leave out settings "
            "of the network, such as --size and --pool."
        ) from None
    if saved := about.get("preprocessing"):
        embedder.trunk.normalise = Normalise(tuple(saved["mean"]), tuple(saved["std"]), saved["bgr"])


def keeps_head(embedder: Embedder, start: str) -> bool:
    """Whether a network has the head of the run it starts from, and not a new one."""
    return _fits(embedder, read_tensors(RunFolder(start).model)[0])


def _fits(embedder: Embedder, tensors: Mapping[str, Tensor]) -> bool:
    own = {f"head.{name}": t.shape for name, t in embedder.head.state_dict().items()}
    return own == {name: t.shape for name, t in tensors.items() if name.startswith("head.")}


def start_record(run: RunFolder, plan: Plan) -> Json:
    """Return what a run stores of the one it starts from: its name, the digest of its model, and all its classes.

    With a checkpoint the run no longer needs the other one. Without, the other one must be what it was.
    """
    known = read_json(run.config).get("start") if run.config.exists() else None
    if known and run.checkpoint.exists():
        return dict(known)
    model = RunFolder(plan.start).model
    about = read_tensors(model)[1]
    seen = sorted({*about["names"], *about.get("seen_before", ())})
    record = {"run": Path(plan.start).name, "model": content_digest(model), "seen_before": seen}
    if known and known["model"] != record["model"]:
        raise NearkinError(f"{plan.start} is not the run that {run.path} started from: train again from the new one.")
    return record
