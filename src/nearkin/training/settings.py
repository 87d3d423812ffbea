"""The settings of a run as types, so that editors complete and check the keywords of `nearkin.train`.

Each is a field of `Plan`, which has defaults and descriptions; a test compares the two.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, TypeVar, get_type_hints

from torch import nn

from nearkin.data.labelled_items import Items
from nearkin.training.plan import BatchNorm, HeadInit, Optimiser, Plan, Schedule, Select

F = TypeVar("F", bound=Callable[..., object])


class Settings(TypedDict, total=False):
    """Settings of a run; those left out have the defaults of the data, of the backbone, or of `Plan`."""

    recipe: str
    data: str | Items | tuple[Items, Items]
    method: str
    backbone: str | nn.Module
    weights: str
    trunk: str
    start: str
    dim: int
    pool: str
    bias: bool
    head_init: HeadInit
    layer_norm: bool
    short_start: bool
    drop_path: float
    space: str
    size: int
    test_size: int
    test_crop: float
    test_view: Literal["given", "auto"]
    stored: float
    augment: str
    test: Literal["split", "none"]
    halves: Literal["first", "swapped"]
    fraction: float
    epochs: int
    stop_after: int
    batch: int
    images_per_class: int
    optimiser: Optimiser
    lr: float
    head_lr: float
    weight_decay: float
    momentum: float
    warmup: int
    batch_norm: BatchNorm
    schedule: Schedule
    decay: float
    decay_every: int
    decay_at: str
    ramp: int
    average: float
    average_from: int
    clip_value: float
    clip_norm: float
    precision: Literal["auto", "float32", "bf16"]
    compile: bool
    graph: bool
    cut_proxies: bool
    select: Select
    select_by: str
    held_out: float
    folds: int
    fold: int
    own_seeds: bool
    patience: int
    check_every: int
    evaluate_every: int
    snapshots: str
    metrics: str | Sequence[str]
    tensorboard: bool
    profile: bool
    seed: int
    device: str


class _Shown(str):
    """A default that is not one value: text without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def with_plan_keywords(function: F) -> F:
    """Show the fields of Plan in the signature and the docstring of a function that takes `**settings`."""
    signature, hints = inspect.signature(function), get_type_hints(Settings)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword, fields = inspect.Parameter.KEYWORD_ONLY, dataclasses.fields(Plan)
    shown = {
        field.name: _Shown(f"<{text}>") if (text := field.metadata["shown"]) else field.default for field in fields
    }
    added = [inspect.Parameter(f.name, keyword, default=shown[f.name], annotation=hints[f.name]) for f in fields]
    function.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    lines = [f"{f.name} = {shown[f.name]!r}: {f.metadata['help']}" for f in fields]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Settings:", *(f"    {line}" for line in lines)])
    return function
