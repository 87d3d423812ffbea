"""The runs that a suite asks for, each with an id: a hash of everything that decides its outcome.

That is the data set, all resolved settings, the method with all its options, and the seed; not the paths of data and
results, nor the machine. So suites share runs, and results can be copied between machines.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.benchmark.suite import Row, Suite, SuiteData
from nearkin.errors import NearkinError
from nearkin.files import Json, content_digest
from nearkin.methods.catalogue import METHODS, method
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.networks.backbones import BACKBONES, backbone_settings
from nearkin.spec import Call, nearest, parse
from nearkin.training.plan import Plan, make_plan
from nearkin.training.run_folder import RunFolder

NEUTRAL = ("device", "compile", "graph", "metrics", "evaluate_every", "snapshots", "tensorboard", "profile")
"""Settings that affect only speed and reporting."""


class PlannedRun(NamedTuple):
    """One run that a suite asks for."""

    row: str
    data: str
    seed: int
    id: str
    settings: Json  # for `train`, without the data set
    description: Json  # the id is a hash of it


@dataclass(frozen=True)
class PlannedSuite:
    """A suite with its runs, and the rows that cannot be run."""

    suite: Suite
    seeds: tuple[int, ...]
    overrides: Mapping[str, Any]
    runs: tuple[PlannedRun, ...]
    missing: Mapping[str, str]  # row → the unknown method


def plan_suite(
    suite: Suite,
    *,
    seeds: int | Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PlannedSuite:
    """The runs of a suite, or of some of its rows, seed by seed; `settings` (fields of Plan) override the suite's."""
    overrides = dict(settings or {})
    numbers = tuple(seeds) if isinstance(seeds, Sequence) else tuple(range(suite.seeds if seeds is None else seeds))
    if not numbers or len(set(numbers)) < len(numbers):
        raise NearkinError(f"Seeds are different whole numbers, at least one, not {seeds!r}.")
    chosen = _chosen(suite, rows)
    suite = dataclasses.replace(suite, rows={row.name: row for row in chosen})
    missing = {row.name: name for row in chosen if (name := _unknown_method(row))}
    known = [row for row in chosen if row.name not in missing]
    wanted = [(row, dataset) for dataset in suite.data.values() for row in known if dataset.name in row.methods]
    runs = _runs(suite, wanted, numbers, overrides)
    if overrides:
        _refuse_to_merge_rows(_runs(suite, wanted, numbers[:1], {}), runs, overrides)
    return PlannedSuite(suite, numbers, overrides, runs, missing)


def _chosen(suite: Suite, rows: Sequence[str] | None) -> list[Row]:
    for name in rows or ():
        if name not in suite.rows:
            names = ", ".join(suite.rows)
            raise NearkinError(f"{suite.name} has no row {name!r}.{nearest(name, suite.rows)} There are: {names}.")
    return [row for row in suite.rows.values() if rows is None or row.name in rows]


def _unknown_method(row: Row) -> str:
    """The first unknown method in a row's specs, or an empty text."""

    def names(call: Call) -> Iterator[str]:
        yield call.name
        for inner in call.args:
            yield from names(inner)

    known = {**LOSSES, **STRATEGIES}
    return next((n for spec in row.methods.values() for n in names(parse(spec)) if n not in known), "")


def _runs(
    suite: Suite, wanted: Sequence[tuple[Row, SuiteData]], seeds: Sequence[int], overrides: Mapping[str, Any]
) -> tuple[PlannedRun, ...]:
    runs = []
    for seed in seeds:
        for row, dataset in wanted:
            settings = {**suite.settings, **dataset.settings, **row.settings, **overrides}
            settings |= {"method": row.methods[dataset.name], "seed": seed}
            try:
                description = describe(settings, data=dataset.read)
            except NearkinError as error:
                raise NearkinError(f"In suite {suite.name}, row {row.name!r}, data {dataset.name}: {error}") from None
            runs.append(PlannedRun(row.name, dataset.name, seed, run_id(description), settings, description))
    return tuple(runs)


def describe(settings: Mapping[str, Any], *, data: str) -> Json:
    """All that decides a run's outcome: the data set without its path, resolved settings, the method's options."""
    relevant = {name: value for name, value in settings.items() if name not in NEUTRAL}
    plan = make_plan({**relevant, "device": "cpu", "precision": "float32"}, backbone_settings(settings["backbone"]))
    built = method(plan.method, classes=2, dim=2, space=plan.space or None)
    default_size = BACKBONES[plan.backbone].size if plan.backbone in BACKBONES else 0
    resolved = dataclasses.asdict(plan) | {
        "recipe": "",  # its settings are there
        "data": data,
        "method": _spec(built.spec),
        "space": str(built.space.value),
        "size": plan.size or default_size,
        "weights": _weights(plan.weights),
        "images_per_class": built.images_per_class if plan.images_per_class < 0 else plan.images_per_class,
        "head_lr": plan.head_lr or plan.lr,
        "head_init": "" if plan.head_init == Plan.head_init or not plan.dim else plan.head_init,
        "trunk": f"frozen(views={plan.frozen_views})" if plan.frozen_views else "",
        "test_view": "" if plan.test_view == Plan.test_view else plan.test_view,
        "test": "" if plan.test == Plan.test else plan.test,
        "start": content_digest(RunFolder(plan.start).model) if plan.start else "",
        "own_seeds": plan.own_seeds and bool(plan.folds),
        "short_start": plan.short_start and built.space.norm_floor is None,
        "precision": settings.get("precision", "auto"),
    }
    return {name: _plain(value) for name, value in resolved.items() if name not in NEUTRAL}


def _plain(value: Any) -> Any:
    """Whole numbers as integers: 32 and 32.0 are one setting."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spec(call: Call) -> str:
    options = {name: _plain(value) for name, value in METHODS[call.name].id_options(call.options).items()}
    return str(Call(call.name, tuple(parse(_spec(inner)) for inner in call.args), options))


def run_id(description: Json) -> str:
    """The id of a run, twelve digits. Settings that are off are left out, so that a new setting changes no older id."""
    on = {name: value for name, value in description.items() if value not in (0, "")}
    return hashlib.sha256(json.dumps(on, sort_keys=True).encode()).hexdigest()[:12]


def _weights(weights: str) -> str:
    """The weights, a file by its name and content instead of its path."""
    if weights in ("default", "none"):
        return weights
    path = Path(weights)
    if not path.is_file():
        raise NearkinError(f"There is no file {path} with weights.")
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def _refuse_to_merge_rows(
    plain: Sequence[PlannedRun], runs: Sequence[PlannedRun], overrides: Mapping[str, Any]
) -> None:
    """Raise if settings for all rows make two rows the same run that were different ones."""
    before = {(run.data, run.row): run.id for run in plain}
    seen: dict[str, PlannedRun] = {}
    for run in runs:
        other = seen.setdefault(run.id, run)
        if before[run.data, run.row] != before[other.data, other.row]:
            raise NearkinError(
                f"With {', '.join(sorted(overrides))} set for all rows, {other.row!r} and {run.row!r} are the same "
                "run: leave it out, or choose rows."
            )
