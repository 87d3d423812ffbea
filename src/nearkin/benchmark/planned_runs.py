"""A suite spelt out: the runs it asks for, each with an id that is a hash of what decides its outcome.

That is the data set, all settings resolved, the method with all its options, and the seed; not where data and results
lie, nor on which machine. So suites share runs, and results can be carried.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.benchmark.suite import Part, Row, Suite
from nearkin.errors import NearkinError
from nearkin.files import Json
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.networks.backbones import BACKBONES, natural_plan
from nearkin.spec import Call, nearest, parse
from nearkin.training.plan import make_plan

NEUTRAL = ("device", "compile", "metrics", "evaluate_every", "snapshots", "tensorboard")
"""Settings that decide nothing but speed and what is seen."""


class Cell(NamedTuple):
    """One run that a suite asks for."""

    row: str
    data: str
    seed: int
    id: str
    settings: Json  # for `train`, without the data set
    description: Json  # what the id is a hash of


@dataclass(frozen=True)
class Sheet:
    """A suite spelt out: its runs, and the rows that cannot be run."""

    suite: Suite
    seeds: tuple[int, ...]
    overrides: Mapping[str, Any]
    cells: tuple[Cell, ...]
    missing: Mapping[str, str]  # row → the method that is not there yet


def expand(
    suite: Suite,
    *,
    seeds: int | Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Sheet:
    """The runs of a suite, or of some of its rows, seeds first; `settings` (fields of Plan) beat the suite's own."""
    overrides = dict(settings or {})
    numbers = tuple(seeds) if isinstance(seeds, Sequence) else tuple(range(suite.seeds if seeds is None else seeds))
    if not numbers or len(set(numbers)) < len(numbers):
        raise NearkinError(f"Seeds are different whole numbers, at least one, not {seeds!r}.")
    chosen = _chosen(suite, rows)
    suite = dataclasses.replace(suite, rows={row.name: row for row in chosen})
    missing = {row.name: name for row in chosen if (name := _missing(row))}
    there = [row for row in chosen if row.name not in missing]
    wanted = [(row, part) for part in suite.parts.values() for row in there if part.name in row.methods]
    cells = _cells(suite, wanted, numbers, overrides)
    if overrides:
        _refuse_to_merge_rows(_cells(suite, wanted, numbers[:1], {}), cells, overrides)
    return Sheet(suite, numbers, overrides, cells, missing)


def _chosen(suite: Suite, rows: Sequence[str] | None) -> list[Row]:
    for name in rows or ():
        if name not in suite.rows:
            there = ", ".join(suite.rows)
            raise NearkinError(f"{suite.name} has no row {name!r}.{nearest(name, suite.rows)} There are: {there}.")
    return [row for row in suite.rows.values() if rows is None or row.name in rows]


def _missing(row: Row) -> str:
    """The first method of a row's specs that no table has."""

    def names(call: Call) -> Iterator[str]:
        yield call.name
        for inner in call.args:
            yield from names(inner)

    known = {**LOSSES, **STRATEGIES}
    return next((n for spec in row.methods.values() for n in names(parse(spec)) if n not in known), "")


def _cells(
    suite: Suite, wanted: Sequence[tuple[Row, Part]], seeds: Sequence[int], overrides: Mapping[str, Any]
) -> tuple[Cell, ...]:
    cells = []
    for seed in seeds:
        for row, part in wanted:
            settings = {**suite.settings, **part.settings, **row.settings, **overrides}
            settings |= {"method": row.methods[part.name], "seed": seed}
            try:
                description = describe(settings, data=part.read)
            except NearkinError as error:
                raise NearkinError(f"In suite {suite.name}, row {row.name!r}, data {part.name}: {error}") from None
            cells.append(Cell(row.name, part.name, seed, run_id(description), settings, description))
    return tuple(cells)


def describe(settings: Mapping[str, Any], *, data: str) -> Json:
    """All that decides a run's outcome, resolved: the data set without its path, the settings, the method's options."""
    given = {name: value for name, value in settings.items() if name not in NEUTRAL}
    plan = make_plan({**given, "device": "cpu", "precision": "float32"}, natural_plan(settings["backbone"]))
    built = method(plan.method, classes=2, dim=2, space=plan.space or None)
    own = BACKBONES[plan.backbone].size if plan.backbone in BACKBONES else 0
    resolved = dataclasses.asdict(plan) | {
        "data": data,
        "method": _spec(built.spec),
        "space": built.space,
        "size": plan.size or own,
        "weights": _weights(plan.weights),
        "images_per_class": built.images_per_class if plan.images_per_class < 0 else plan.images_per_class,
        "head_lr": plan.head_lr or plan.lr,
        "own_seeds": plan.own_seeds and bool(plan.folds),
        "short_start": plan.short_start and built.space.norm_floor is None,
        "precision": settings.get("precision", "auto"),
    }
    return {name: _plain(value) for name, value in resolved.items() if name not in NEUTRAL}


def _plain(value: Any) -> Any:
    """Whole numbers without a point: 32 and 32.0 are one setting."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spec(call: Call) -> str:
    options = {name: _plain(value) for name, value in call.options.items()}
    return str(Call(call.name, tuple(parse(_spec(inner)) for inner in call.args), options))


def run_id(description: Json) -> str:
    """Twelve digits that stand for a run. What is off is left out, so that a setting to come changes no older id."""
    on = {name: value for name, value in description.items() if value not in (0, "")}
    return hashlib.sha256(json.dumps(on, sort_keys=True).encode()).hexdigest()[:12]


def _weights(given: str) -> str:
    """Weights by what they are: a file by its content, wherever it lies."""
    if given in ("default", "none"):
        return given
    path = Path(given)
    if not path.is_file():
        raise NearkinError(f"There is no file {path} with weights.")
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def _refuse_to_merge_rows(plain: Sequence[Cell], cells: Sequence[Cell], overrides: Mapping[str, Any]) -> None:
    before = {(cell.data, cell.row): cell.id for cell in plain}
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.id, cell)
        if before[cell.data, cell.row] != before[other.data, other.row]:
            said = ", ".join(sorted(overrides))
            raise NearkinError(
                f"With {said} set for all rows, {other.row!r} and {cell.row!r} are the same run: leave it out, "
                "or choose rows."
            )
