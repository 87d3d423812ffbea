"""The plan of a run: all settings, their defaults and checks.

The fields of `Plan` are the flags of `nearkin train`, the keywords of `nearkin.train` and the keys of `config.json`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch

from nearkin import ranks
from nearkin.data.datasets import dataset_names
from nearkin.errors import NearkinError
from nearkin.evaluation import DEFAULT_METRICS, parse_metric
from nearkin.spec import check_options, fits, look_up, nearest, parse, words
from nearkin.training.recipes import recipe_settings

HeadInit = Literal["kaiming", "glorot"]
Schedule = Literal["step", "cosine", "plateau", "constant"]
BatchNorm = Literal["freeze", "freeze-stats", "train"]
Optimiser = Literal["adamw", "adam", "rmsprop", "sgd"]
Select = Literal["last", "validation", "test"]


def setting(default: Any, help_text: str, *, shown: str = "", flag: str = "") -> Any:
    """Return a field with the text that `--help` shows, and its default in words if the data decide on it.

    `flag` is its name on the command line if that differs.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, "shown": shown, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of a run. Defaults are those published for Proxy-Anchor; a backbone may have others."""

    recipe: str = setting(
        "", "A named set of settings (see nearkin recipes), to which --config and flags are preferred."
    )
    data: str = setting("glyphs", f"What to train and test on: {dataset_names()}.")
    method: str = setting(
        "proxy_anchor", "Loss or strategy, such as 'xbm(contrastive, size=1024)'; see nearkin methods."
    )
    backbone: str = setting(
        "conv4",
        "Network: conv4, lite0, resnet50, … or the name of any timm model.",
        shown="lite0 for photographs, conv4 for small grey images",
    )
    weights: str = setting(
        "default", "Initial weights: default, none (random), or a file, such as model.safetensors of a run."
    )
    trunk: str = setting(
        "train",
        "What becomes of the trunk: train; or frozen, so that head and proxies train on its features of a few views of "
        "every image, which are computed once; frozen(views=8).",
    )
    start: str = setting(
        "",
        "Folder of a finished run whose network to start from; data, network and method are those of that run unless "
        "given.",
        flag="--from",
    )
    dim: int = setting(512, "Dimension of the embedding (0: no linear head, the pooled features of the trunk).")
    pool: str = setting("avg+max", "Pooling of the feature map: avg, max, avg+max (summed), gem.")
    bias: bool = setting(True, "Use a bias in the linear head.")
    head_init: HeadInit = setting(
        "kaiming", "Initial weights of the linear head: kaiming (normal, as Proxy-Anchor's code) or glorot (uniform)."
    )
    layer_norm: bool = setting(False, "Apply layer norm before the linear head.")
    short_start: bool = setting(
        True, "Rescale the head so that unnormalised embeddings start with mean norm 11 (euclidean) or 4 (inner)."
    )
    drop_path: float = setting(0.0, "Stochastic depth: rate at which the last residual block is skipped (0: off).")
    space: str = setting(
        "",
        "Geometry of model, loss and evaluation: cosine, ball, euclidean; inner and ball_inner train by inner products "
        "and are evaluated by cosine and as ball (empty: that of the method).",
    )
    size: int = setting(0, "Side of the square network input, in pixels (0: that of the backbone).")
    test_size: int = setting(0, "Side of the square in which test images are shown (0: size).")
    test_crop: float = setting(
        0.0, "Share of a test image's short side that the square covers, above 0 to 1 (0: 0.875, as 224 of 256)."
    )
    test_view: Literal["given", "auto"] = setting(
        "given",
        "How test images are shown: by test_size and test_crop; or auto, chosen on held-out training classes, after a "
        "shorter training without a quarter of them if there are none.",
    )
    stored: float = setting(
        0.0,
        "Largest short side at which images are kept, as a multiple of size; smaller images keep their own (0: 2, or "
        "1.14 if memory is short).",
    )
    augment: str = setting(
        "resized_crop",
        "Augmentation: resized_crop, crop, affine, none, and jitter or erase around one of them; with options as in "
        "'erase(resized_crop(scale=(0.16, 1)))'.",
    )
    test: Literal["split", "none"] = setting(
        "split",
        "What to test on: the test part of the data; or none, to train on all classes, which cannot be measured then.",
    )
    halves: Literal["first", "swapped"] = setting("first", "Which half of the classes to train on.")
    fraction: float = setting(1.0, "Fraction of the training images of each class to use, 0 to 1.")
    epochs: int = setting(60, "Passes over the training set (0: measure the untrained network).")
    stop_after: int = setting(
        0, "Stop after this many epochs, with the learning rates of a run of all --epochs (0: train to the end)."
    )
    batch: int = setting(180, "Images per batch; by default fewer if there are few images.")
    images_per_class: int = setting(-1, "Images per class in a batch (0: random; -1: as the method needs).")
    optimiser: Optimiser = setting("adamw", "Optimiser.")
    lr: float = setting(1e-4, "Learning rate of the trunk; that of proxies is this times the speed of the method.")
    head_lr: float = setting(0.0, "Learning rate of the head (0: that of the trunk).")
    weight_decay: float = setting(1e-4, "Weight decay of all parameters.")
    momentum: float = setting(0.9, "Momentum of sgd and rmsprop.")
    warmup: int = setting(1, "Initial epochs with the trunk frozen.")
    batch_norm: BatchNorm = setting(
        "freeze-stats", "Batch norm: freeze all of it, freeze only its statistics, or train."
    )
    schedule: Schedule = setting("step", "Learning-rate schedule; plateau uses held-out training classes.")
    decay: float = setting(0.5, "Factor of the learning rate at each step or plateau.")
    decay_every: int = setting(10, "Epochs between steps; for plateau, checks without progress.")
    decay_at: str = setting(
        "", "Epochs after which the learning rate steps instead, such as 30,60; an epoch may stand there twice."
    )
    ramp: int = setting(0, "Epochs over which all learning rates rise linearly to their full values (0: off).")
    average: float = setting(
        0.0,
        "Keep a running mean of the network's weights, which is measured and kept: the part that a step leaves of it, "
        "such as 0.99; 1 is the plain mean (0: off).",
    )
    average_from: int = setting(0, "Epoch after which the running mean of the weights begins.")
    clip_value: float = setting(10.0, "Clip gradient entries at this value (0: off).")
    clip_norm: float = setting(0.0, "Clip the norm of the gradient at this value (0: off).")
    precision: Literal["auto", "float32", "bf16"] = setting("auto", "Arithmetic of the network (auto: bf16 on a GPU).")
    compile: bool = setting(False, "Compile the network with torch.compile.")
    graph: bool = setting(True, "Launch training steps as CUDA graphs (no effect on a CPU and on several GPUs).")
    cut_proxies: bool = setting(
        False, "With several processes: each keeps the proxies of a share of the classes, instead of those of all."
    )
    select: Select = setting("last", "Epoch to keep: last, best on held-out training classes, or best on test.")
    select_by: str = setting("MAP@R", "Metric that selects the best epoch.")
    held_out: float = setting(0.25, "Fraction of the training classes to hold out, if any are needed.")
    folds: int = setting(
        0, "Train this many models, each with another block of training classes held out, and join them (0: one model)."
    )
    fold: int = setting(0, "Train only this fold: 1, 2, … (0: all).")
    own_seeds: bool = setting(True, "Give each fold its own seed, instead of the same initial weights for all.")
    patience: int = setting(0, "Stop after this many checks without progress on held-out classes (0: never).")
    check_every: int = setting(0, "Steps between checks on held-out classes (0: one epoch).")
    evaluate_every: int = setting(0, "Epochs between test scores, for the curve only (0: at both ends).")
    snapshots: str = setting("", "Epochs after which to save model and method, such as 0,30,80.")
    metrics: tuple[str, ...] = setting(DEFAULT_METRICS, "Metrics on the test set, separated by commas.")
    tensorboard: bool = setting(False, "Also write curves for TensorBoard into the run folder (extra: track).")
    profile: bool = setting(False, "Time the parts of the run and trace a few steps; slows training a little.")
    seed: int = setting(0, "Seed of all random numbers.")
    device: str = setting("auto", "Where to compute: auto, cpu, cuda, cuda:1, …")

    @property
    def uses_graphs(self) -> bool:
        """Whether training steps are CUDA graphs: those of one GPU, since operations of several are not captured."""
        return self.graph and self.device.startswith("cuda") and ranks.size() == 1

    @property
    def frozen_views(self) -> int:
        """The number of views of every training image whose features are computed if the trunk is frozen; else 0."""
        call = parse(self.trunk)
        entry = look_up(call.name, TRUNKS, what="trunk")
        return entry(**check_options(call, entry))

    @property
    def needs_held_out(self) -> bool:
        """Whether some training classes are held out; never with select=test."""
        needed = self.select == "validation" or self.patience > 0 or self.schedule == "plateau" or self.folds > 0
        return needed and self.select != "test"

    @property
    def model_seed(self) -> int:
        """The seed of this model: with folds, different for each fold and each seed of the plan.

        Models that start from the same head learn similar features.
        """
        return (self.seed * self.folds + self.fold - 1) % 2**31 if self.fold and self.own_seeds else self.seed

    @property
    def last_epoch(self) -> int:
        """The number of epochs to train: all, or fewer with the same learning rates."""
        return min(self.stop_after or self.epochs, self.epochs)

    @property
    def snapshot_epochs(self) -> tuple[int, ...]:
        """The epochs after which model and method are saved; 0 is before the first step."""
        return _numbers(self.snapshots)

    @property
    def decay_epochs(self) -> tuple[int, ...]:
        """The epochs after which the learning rate steps; empty if it steps every few epochs."""
        return _numbers(self.decay_at)


def _trained() -> int:
    return 0


def _frozen(*, views: int = 4) -> int:
    if views < 1:
        raise NearkinError(f"A frozen trunk needs at least one view of every image, not views={views}.")
    return views


TRUNKS: dict[str, Callable[..., int]] = {"train": _trained, "frozen": _frozen}
"""What `trunk` may be; each returns the number of views whose features are kept."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text.strip() else ()


TINY = 1e-30  # stands for "above 0"
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "decay_every"), (1, math.inf)),
    "epochs": (0, math.inf),
    "stop_after": (0, 2**31),
    "dim": (0, 100_000),
    **dict.fromkeys(("size", "test_size", "warmup", "patience", "check_every", "evaluate_every", "seed"), (0, 2**31)),
    **dict.fromkeys(("folds", "fold", "ramp", "average_from"), (0, 2**31)),
    "images_per_class": (-1, math.inf),
    **dict.fromkeys(("head_lr", "weight_decay", "clip_value", "clip_norm"), (0, 1e30)),
    "lr": (TINY, 1e30),
    "decay": (TINY, 1),
    **dict.fromkeys(("momentum", "average"), (0, 1)),
    "stored": (0, 100),
    "test_crop": (0, 1),
    "drop_path": (0, 1 - 1e-9),
    "fraction": (TINY, 1),
    "held_out": (TINY, 1 - 1e-9),
}
"""Allowed values of numbers, both ends included."""


def make_plan(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> Plan:
    """Return the checked plan: settings first, then its recipe, the defaults of the backbone, and those of `Plan`."""
    check_names(settings)
    hints = get_type_hints(Plan)
    for name, value in settings.items():
        if name != "metrics" and not fits(value, hints[name]):
            raise NearkinError(f"The setting {name} must be {words(hints[name])}, not {value!r}.")
    of_folds = {"select": "validation"} if settings.get("folds") else {}
    usual = {**of_folds, **defaults}
    if settings.get("recipe"):
        own = {field.name: field.default for field in dataclasses.fields(Plan)}
        usual |= recipe_settings(settings["recipe"], given=settings, usual={**own, **usual})
    plan = Plan(**{**usual, **settings})
    for name, (least, most) in RANGES.items():
        if not least <= getattr(plan, name) <= most:  # NaN is neither
            limit = f"at least {least:g}" if most >= 1e30 else f"from {least:g} to {most:g}"
            raise NearkinError(f"The setting {name} must be {limit}, not {getattr(plan, name)}.")
    if plan.test == "none" and (plan.select == "test" or plan.folds):
        other = "select=test" if plan.select == "test" else "folds"
        raise NearkinError(f"test=none leaves no test images, which {other} needs: leave out one of them.")
    _check_folds(plan)
    _check_trunk(plan)
    if plan.test_view == "auto" and (plan.test_size or plan.test_crop):
        raise NearkinError("test_view=auto chooses test_size and test_crop: leave out these, or test_view.")
    if plan.average and plan.average_from >= max(plan.epochs, 1):
        raise NearkinError(f"average_from must be below epochs={plan.epochs}, not {plan.average_from}.")
    _check_epoch_lists(plan)
    names: str | Sequence[str] = plan.metrics
    metrics = tuple(names.replace(" ", "").split(",") if isinstance(names, str) else names)
    for metric in (*metrics, plan.select_by):
        parse_metric(metric)
    device = resolve_device(plan.device)
    precision = ("bf16" if device.type == "cuda" else "float32") if plan.precision == "auto" else plan.precision
    if precision == "bf16" and device.type == "cpu":
        raise NearkinError("precision=bf16 needs a GPU; on a CPU use float32.")
    return dataclasses.replace(plan, device=str(device), precision=precision, metrics=metrics)


def check_names(names: Iterable[str]) -> None:
    """Raise an error that names the nearest setting, unless all are fields of `Plan`."""
    fields = {f.name for f in dataclasses.fields(Plan)}
    for name in names:
        if name not in fields:
            raise NearkinError(f"There is no setting {name!r}.{nearest(name, fields)} See nearkin train --help.")


def _check_folds(plan: Plan) -> None:
    if plan.folds == 1 or plan.fold > plan.folds:
        raise NearkinError(
            f"There must be at least 2 folds, and fold must be one of them: not folds={plan.folds}, fold={plan.fold}."
        )
    if plan.folds and not plan.dim:
        raise NearkinError("The models of folds need a head each: leave out dim=0 or folds.")
    if plan.folds and plan.test_view == "auto":
        raise NearkinError("The models of folds see the same test images: give test_size instead of test_view=auto.")
    if plan.folds and plan.select == "test":
        raise NearkinError("The held-out classes of a fold select its epoch: leave out select=test or folds.")


def _check_trunk(plan: Plan) -> None:
    if not plan.frozen_views:
        return
    if not plan.dim:
        raise NearkinError("With a frozen trunk the head is what trains: leave out dim=0.")
    if ranks.size() > 1:
        raise NearkinError("With a frozen trunk one process trains the head: leave out torchrun, or trunk=frozen.")
    if wrong := [name for name in ("compile", "drop_path") if getattr(plan, name)]:
        raise NearkinError(f"A frozen trunk has nothing to do while the head trains: leave out {wrong[0]}.")


def _check_epoch_lists(plan: Plan) -> None:
    for name in ("snapshots", "decay_at"):
        text = getattr(plan, name)
        try:
            valid = all(0 <= epoch <= plan.epochs for epoch in _numbers(text))
        except ValueError:
            valid = False
        if not valid:
            raise NearkinError(
                f"The setting {name} must be epochs from 0 to {plan.epochs}, separated by commas, such as "
                f"0,{plan.epochs}, not {text!r}."
            )


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is a GPU if there is one. Each of several ranks has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise NearkinError(f"There is no device {name!r}: use auto, cpu, cuda or cuda:1.")
    if ranks.size() > 1:
        device = ranks.local_device(device.type)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise NearkinError(f"There is no device {name!r}: {torch.cuda.device_count()} GPUs were found; use cpu.")
    return device
