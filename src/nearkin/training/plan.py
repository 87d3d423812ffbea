"""The plan of a run: every setting there is, what follows from it, and nothing that runs.

The fields of `Plan` are the flags of `nearkin train`, the keywords of `nearkin.train` and the keys of `config.json`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch

from nearkin.data.datasets import dataset_names
from nearkin.errors import NearkinError
from nearkin.evaluation import DEFAULT_METRICS, parse_metric
from nearkin.spec import fits, nearest, words

Schedule = Literal["step", "cosine", "plateau", "constant"]
BatchNorm = Literal["freeze", "freeze-stats", "train"]
Optimiser = Literal["adamw", "adam", "rmsprop", "sgd"]
Select = Literal["last", "validation", "test"]


def setting(default: Any, help_text: str) -> Any:
    """A field with the sentence that `--help` shows."""
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of a run. Defaults are Proxy-Anchor's published ones; a backbone may bring its own."""

    data: str = setting("glyphs", f"What to train and test on: {dataset_names()}.")
    method: str = setting(
        "proxy_anchor", "What to train with, as in 'xbm(contrastive, size=1024)'; see nearkin methods."
    )
    backbone: str = setting("conv4", "The network: conv4, lite0, resnet50, … or any timm model name.")
    weights: str = setting("default", "Its weights to begin with: default, none (random), or a file.")
    dim: int = setting(512, "Dimension of the embedding (0: no linear head, the trunk's own pooled features).")
    pool: str = setting("avg+max", "Pooling of the feature map: avg, max, avg+max (summed), gem.")
    bias: bool = setting(True, "A bias in the linear head.")
    layer_norm: bool = setting(False, "Layer norm before the linear head.")
    short_start: bool = setting(
        True, "Embeddings that keep their length begin 11 long (space euclidean) or 4 (inner), not as the head comes."
    )
    drop_path: float = setting(0.0, "Stochastic depth: rate at which the last residual block is skipped (0: off).")
    space: str = setting(
        "",
        "Geometry of model, loss and evaluation: cosine, ball, euclidean; inner trains by inner products, is measured "
        "by the cosine (empty: the method's own).",
    )
    size: int = setting(0, "Side of the square image the network sees, in pixels (0: the backbone's own).")
    augment: str = setting(
        "resized_crop", "Training-time views: resized_crop, crop, affine, none; as in 'resized_crop(scale=(0.16, 1))'."
    )
    halves: Literal["first", "swapped"] = setting("first", "Train on the first half of the classes, or the second.")
    fraction: float = setting(1.0, "Part of the training images of each class that is used, 0 to 1.")
    epochs: int = setting(60, "How often the training set is gone through (0: measure the network as it is).")
    batch: int = setting(180, "Images in a batch.")
    images_per_class: int = setting(-1, "Images of each class in a batch (0: drawn at random; -1: the method's own).")
    optimiser: Optimiser = setting("adamw", "Optimiser.")
    lr: float = setting(1e-4, "Learning rate of the trunk; proxies have their method's speed times it.")
    head_lr: float = setting(0.0, "Learning rate of the head (0: as the trunk).")
    weight_decay: float = setting(1e-4, "Weight decay, on everything.")
    momentum: float = setting(0.9, "Momentum of sgd and rmsprop.")
    warmup: int = setting(1, "Epochs at the beginning with the trunk frozen.")
    batch_norm: BatchNorm = setting("freeze-stats", "Batch norm: all frozen, only its statistics frozen, or trained.")
    schedule: Schedule = setting("step", "Learning-rate schedule; plateau looks at held-out training classes.")
    decay: float = setting(0.5, "Factor of a step or a plateau.")
    decay_every: int = setting(10, "Epochs between steps; checks without progress before a plateau's.")
    clip_value: float = setting(10.0, "Largest value of a gradient entry (0: off).")
    clip_norm: float = setting(0.0, "Largest norm of the gradient (0: off).")
    precision: Literal["auto", "float32", "bf16"] = setting("auto", "Arithmetic of the network (auto: bf16 on a GPU).")
    compile: bool = setting(False, "Compile the network with torch.compile.")
    select: Select = setting("last", "Which epoch is kept: last, best on held-out training classes, or best on test.")
    select_by: str = setting("MAP@R", "The metric by which held-out classes (or test) choose.")
    held_out: float = setting(0.25, "Part of the training classes held out where select, patience or plateau need it.")
    folds: int = setting(
        0, "Train so many models, each with another block of the training classes held out, and join them (0: one)."
    )
    fold: int = setting(0, "Only this one of the folds: 1, 2, … (0: all of them).")
    own_seeds: bool = setting(True, "Whether each fold draws from a seed of its own, or all begin alike.")
    patience: int = setting(0, "Stop after so many checks without progress on held-out classes (0: never).")
    check_every: int = setting(0, "Steps between checks of method and held-out classes (0: an epoch).")
    evaluate_every: int = setting(0, "Epochs between looks at the test set, for the curve only (0: at both ends).")
    snapshots: str = setting("", "Epochs after which model and method are kept, for pictures of both, as 0,30,80.")
    metrics: tuple[str, ...] = setting(DEFAULT_METRICS, "What is measured on the test set.")
    tensorboard: bool = setting(False, "Also write the curves for TensorBoard, into the run's folder (extra: track).")
    seed: int = setting(0, "Seed of everything random.")
    device: str = setting("auto", "Where to compute: auto, cpu, cuda, cuda:1, …")

    @property
    def needs_held_out(self) -> bool:
        """Whether training classes are put aside; never where test itself chooses."""
        asked = self.select == "validation" or self.patience > 0 or self.schedule == "plateau" or self.folds > 0
        return asked and self.select != "test"

    @property
    def own_seed(self) -> int:
        """What this one model draws from: with folds, no two of the same plan or of another seed's begin alike.

        Heads that begin alike see much the same of an image.
        """
        return (self.seed * self.folds + self.fold - 1) % 2**31 if self.fold and self.own_seeds else self.seed

    @property
    def snapshot_epochs(self) -> tuple[int, ...]:
        """The epochs after which model and method are kept; 0 is before the first step."""
        return tuple(int(part) for part in self.snapshots.split(",")) if self.snapshots.strip() else ()


TINY = 1e-30  # stands for "above 0"
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "decay_every"), (1, math.inf)),
    "epochs": (0, math.inf),
    "dim": (0, 100_000),
    **dict.fromkeys(("size", "warmup", "patience", "check_every", "evaluate_every", "seed"), (0, 2**31)),
    **dict.fromkeys(("folds", "fold"), (0, 2**31)),
    "images_per_class": (-1, math.inf),
    **dict.fromkeys(("head_lr", "weight_decay", "clip_value", "clip_norm"), (0, 1e30)),
    "lr": (TINY, 1e30),
    "decay": (TINY, 1),
    "momentum": (0, 1),
    "drop_path": (0, 1 - 1e-9),
    "fraction": (TINY, 1),
    "held_out": (TINY, 1 - 1e-9),
}
"""What a number may be, both ends included."""


def make_plan(given: Mapping[str, Any], natural: Mapping[str, Any]) -> Plan:
    """The plan of what was given, then what is natural to the backbone, then the defaults; each value checked."""
    fields = {f.name for f in dataclasses.fields(Plan)}
    hints = get_type_hints(Plan)
    for name, value in given.items():
        if name not in fields:
            raise NearkinError(f"There is no setting {name!r}.{nearest(name, fields)} See nearkin train --help.")
        if name != "metrics" and not fits(value, hints[name]):
            raise NearkinError(f"The setting {name} is {words(hints[name])}, not {value!r}.")
    chosen = {"select": "validation"} if given.get("folds") else {}  # what a fold holds out is there to choose
    plan = Plan(**{**chosen, **natural, **given})
    for name, (least, most) in RANGES.items():
        if not least <= getattr(plan, name) <= most:  # NaN is neither
            limit = f"at least {least:g}" if most >= 1e30 else f"from {least:g} to {most:g}"
            raise NearkinError(f"The setting {name} is {limit}, not {getattr(plan, name)}.")
    _check_folds(plan)
    _check_snapshots(plan)
    names: str | Sequence[str] = plan.metrics
    metrics = tuple(names.replace(" ", "").split(",") if isinstance(names, str) else names)
    for metric in (*metrics, plan.select_by):
        parse_metric(metric)
    device = resolve_device(plan.device)
    precision = ("bf16" if device.type == "cuda" else "float32") if plan.precision == "auto" else plan.precision
    if precision == "bf16" and device.type == "cpu":
        raise NearkinError("precision=bf16 needs a GPU here; on a CPU use float32.")
    return dataclasses.replace(plan, device=str(device), precision=precision, metrics=metrics)


def _check_folds(plan: Plan) -> None:
    if plan.folds == 1 or plan.fold > plan.folds:
        raise NearkinError(
            f"There are at least 2 folds, and a fold is one of them: not folds={plan.folds}, fold={plan.fold}."
        )
    if plan.folds and not plan.dim:
        raise NearkinError("Models that are joined have a head each: leave out dim=0, or the folds.")
    if plan.folds and plan.select == "test":
        raise NearkinError("The held-out classes of a fold choose its epoch: leave out select=test, or the folds.")


def _check_snapshots(plan: Plan) -> None:
    try:
        known = all(0 <= epoch <= plan.epochs for epoch in plan.snapshot_epochs)
    except ValueError:
        known = False
    if not known:
        raise NearkinError(
            f"Snapshots are epochs from 0 to {plan.epochs} with commas between, as 0,{plan.epochs}, "
            f"not {plan.snapshots!r}."
        )


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise NearkinError(f"There is no device {name!r}: use auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise NearkinError(f"The device {name!r} is not there: {torch.cuda.device_count()} GPUs were found; use cpu.")
    return device
