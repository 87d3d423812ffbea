"""Suites: what a benchmark trains, with the published numbers beside it, as data. One TOML file per table of a paper.

    base                    another TOML file, relative to this one, whose keys hold where this one does not set them
    title, source           what it is and where the numbers are from
    backbone                the network of the paper (a row may have another), trained unless settings say otherwise
    paper_backbone          the network of the published numbers, if it is not `backbone`
    paper_select            what chose the paper's epoch, in words
    spread                  the second number of a pair [68.04, 0.08]: standard error, standard deviation, …
    seeds                   how many (default 1): 0, 1, …
    baseline                the row that others are tested against, unless a row names another
    sort                    the metric by which the table is sorted (default: the order of the rows)
    note                    a sentence below the table
    why, missing            for docs/claims.md: why we think the claims turn out as they do; what could not be run
    every_method            true: every method without a row of its own gets one, with its default options
    [figure]                for rows that are points of a curve; one figure per data set
        x                   the label of the axis, as "tau"
        metric              what is drawn; every data set must have it
        scale               "log" or "linear" (default)
    [settings]              fields of Plan, for all rows
    [define]                NAME = "text", or NAME.cub = "text" per data set: {NAME} stands for it in a row's method
    [data.NAME]             a data set; its path is given as NAME:PATH when the suite is run
        metrics             what is shown of it; "R@1 at 288 of 320" is measured with test images shown larger
        settings            fields of Plan, for this data set
        read                the data set's spec if it is not NAME, as "glyphs(classes=200)"
    [[row]]                 a row of the table
        each.KEY            a list of values: one row per value, or per combination of several keys; {KEY} is the value
        name
        method              spec, or one per data set: method.cub = "…"; absent: the row is only quoted
        settings            fields of Plan, for this row
        scores              "before": the scores of the network before training
        paper.NAME          metric → percent, or [percent, spread]; "R@1 512-d" is that of joint embeddings
        backbone, dim       of the paper's number, if not the suite's
        note
        baseline            the row it is tested against, if not the suite's
        variant             true: the method without one of its parts; no claim of its paper is tested on it
        x                   position of the row in the figure; a row without it is a horizontal line
        series              the curve it belongs to, if there are several
    [[claim]]               a claim of a paper, and the comparison that tests it (keys: see `suite_claims`)

A row has a method where the paper trained it itself, or where it is the baseline. Settings of a row override those of a
data set, which override those of the suite; a setting given nowhere is the backbone's own, or Plan's default. A base
may describe more data sets than a suite uses: those that the suite does not name are ignored. The package's base files
begin with an underscore.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nearkin.benchmark.suite_claims import Claim, read_claims
from nearkin.benchmark.suite_file import PLACEHOLDER, check_metric, check_table, read_suite_file, type_words
from nearkin.errors import NearkinError
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.spec import fits, nearest, parse

FOLDER = Path(__file__).parent / "suites"
NO_SETTINGS = ("data", "method", "metrics", "seed", "device")  # fields of Plan that [settings] may not hold


class Published(NamedTuple):
    """A published number, in percent."""

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class SuiteData:
    """A data set of a suite."""

    name: str
    read: str
    metrics: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    methods: Mapping[str, str]  # data set → spec; empty if the paper is only quoted
    settings: Mapping[str, Any]
    paper: Mapping[str, Mapping[str, Published]]  # data set → metric → number
    backbone: str  # of the paper's number
    dim: int | None = None
    scores: Literal["after", "before"] = "after"
    note: str = ""
    baseline: str = ""  # the row it is tested against
    variant: bool = False  # the method without one of its parts: no claim is tested on it
    x: float | None = None  # its position in the suite's figure
    series: str = ""


class Axes(NamedTuple):
    """The axes of a suite's figure."""

    x: str
    metric: str
    scale: Literal["log", "linear"]


@dataclass(frozen=True)
class Suite:
    """A checked suite."""

    name: str
    title: str
    source: str
    backbone: str
    settings: Mapping[str, Any]
    data: Mapping[str, SuiteData]
    rows: Mapping[str, Row]
    figure: Axes | None = None
    paper_select: str = ""
    spread: str = ""
    seeds: int = 1
    baseline: str = ""
    sort: str = ""
    note: str = ""
    why: str = ""
    missing: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def headline(self) -> Claim | None:
        """The claim that this suite is made for; None if it names none."""
        return next((claim for claim in self.claims if claim.headline), None)

    @property
    def baselines(self) -> dict[str, str]:
        """Row → the row it is tested against; without rows that have none, or would be their own."""
        named = {row.name: row.baseline or self.baseline for row in self.rows.values()}
        return {name: base for name, base in named.items() if base not in ("", name)}


_PLAIN: dict[str, Any] = {
    "title": str,
    "source": str,
    "backbone": str,
    "paper_select": str,
    "spread": str,
    "seeds": int,
    "baseline": str,
    "sort": str,
    "note": str,
    "why": str,
    "missing": str,
}  # fields of Suite that are keys of its file
_SUITE: dict[str, Any] = _PLAIN | {
    "paper_backbone": str,
    "every_method": bool,
    "settings": dict,
    "data": dict,
    "row": list,
    "figure": dict,
    "claim": list,
}
_DATA: dict[str, Any] = {"metrics": list, "settings": dict, "read": str}
_ROW: dict[str, Any] = {
    "name": str,
    "method": str | dict,
    "settings": dict,
    "scores": Literal["after", "before"],
    "paper": dict,
    "backbone": str,
    "dim": int,
    "note": str,
    "baseline": str,
    "variant": bool,
    "x": float,
    "series": str,
}
_FIGURE: dict[str, Any] = {"x": str, "metric": str, "scale": Literal["log", "linear"]}


def suite_names() -> list[str]:
    """The suites that come with the package."""
    return sorted(_files())


def _files() -> dict[str, Path]:
    return {path.stem: path for path in FOLDER.glob("*/[!_]*.toml")}


def load_suite(suite: str | Path) -> Suite:
    """A suite of the package by its name, or one of your own by the path of its .toml file."""
    path = _files().get(str(suite), Path(suite))
    if path.suffix != ".toml" or not path.is_file():
        names = suite_names()
        raise NearkinError(
            f"There is no suite {str(suite)!r}.{nearest(str(suite), names)} There are: {', '.join(names)}; "
            "or give the path of a .toml file."
        )
    return _suite(read_suite_file(path), path.stem)


def _suite(table: dict[str, Any], name: str) -> Suite:
    where = f"suite {name}"
    check_table(table, _SUITE, where, needed=("title", "source", "backbone", "data"))
    settings = {"backbone": table["backbone"], **_settings(table, where)}
    data = {name: _data(name, entry, where) for name, entry in table["data"].items()}
    if not data:
        raise NearkinError(f"In {where} there is no data set: write [data.NAME] with its metrics.")
    rows: dict[str, Row] = {}
    published_with = table.get("paper_backbone", table["backbone"])
    for entry in table.get("row", []):
        row = _row(entry, published_with, data, where)
        if row.name in rows:
            raise NearkinError(f"In {where} two rows are called {row.name!r}: rename one.")
        rows[row.name] = row
    if table.get("every_method", False):
        rows |= _other_methods(rows, data, table["backbone"])
    figure = _figure(table["figure"], data, where) if "figure" in table else None
    plain = {key: table[key] for key in _PLAIN if key in table}
    claims = read_claims(table.get("claim", []), rows, where)
    suite = Suite(name=name, settings=settings, data=data, rows=rows, figure=figure, claims=claims, **plain)
    _check_whole(suite, where)
    _check_points(suite, where)
    return suite


def _check_whole(suite: Suite, where: str) -> None:
    if suite.seeds < 1:
        raise NearkinError(f"In {where} seeds must be at least 1, not {suite.seeds}.")
    if not suite.rows:
        raise NearkinError(f"In {where} there is no row: write [[row]] with a name.")
    for base in (suite.baseline, *(row.baseline for row in suite.rows.values())):
        if base and base not in suite.rows:
            raise NearkinError(f"In {where} the baseline {base!r} is not a row.{nearest(base, suite.rows)}")
    if suite.sort:
        check_metric(suite.sort, where)
    spreads = any(n.spread is not None for r in suite.rows.values() for m in r.paper.values() for n in m.values())
    if spreads and not suite.spread:
        raise NearkinError(f"In {where} numbers have a spread of unknown kind: write spread = 'standard error'.")


def _figure(table: Any, data: Mapping[str, SuiteData], where: str) -> Axes:
    where = f"{where}, figure"
    check_table(table, _FIGURE, where, needed=("x", "metric"))
    metric = table["metric"]
    for dataset in data.values():
        if metric not in dataset.metrics:
            raise NearkinError(f"In {where} data.{dataset.name} has no {metric!r}.{nearest(metric, dataset.metrics)}")
    return Axes(table["x"], metric, table.get("scale", "linear"))


def _check_points(suite: Suite, where: str) -> None:
    """Check that rows with x have a figure, that a figure has such rows, and that no two share a position."""
    seen: dict[tuple[str, float], str] = {}
    for row in suite.rows.values():
        if suite.figure is None and (row.x is not None or row.series):
            raise NearkinError(f"In {where}, row {row.name!r} has x or series without a [figure]: write one.")
        if row.x is None and row.series:
            raise NearkinError(f"In {where}, row {row.name!r} has a series but no x: give its position on the curve.")
        if suite.figure and row.x is not None:
            if not math.isfinite(row.x) or (suite.figure.scale == "log" and row.x <= 0):
                raise NearkinError(f"In {where}, row {row.name!r} cannot be drawn at x = {row.x:g} on this axis.")
            other = seen.setdefault((row.series, row.x), row.name)
            if other != row.name:
                raise NearkinError(
                    f"In {where}, rows {other!r} and {row.name!r} have the same x in one series: change a series."
                )
    if suite.figure and not seen:
        raise NearkinError(f"In {where} there is a figure but no row has x: write x = number in the rows of its curve.")


def _data(name: str, table: Any, where: str) -> SuiteData:
    where = f"{where}, data.{name}"
    check_table(table, _DATA, where, needed=("metrics",))
    if not table["metrics"]:
        raise NearkinError(f'In {where} metrics is empty: name what to show, as in ["R@1", "MAP@R"].')
    for metric in table["metrics"]:
        check_metric(metric, where)
    return SuiteData(name, table.get("read", name), tuple(table["metrics"]), _settings(table, where))


def _row(table: Any, backbone: str, data: Mapping[str, SuiteData], where: str) -> Row:
    where = f"{where}, row {table.get('name', '?')!r}" if isinstance(table, dict) else where
    check_table(table, _ROW, where, needed=("name",))
    methods = table.get("method", {})
    for what, by_data in (("method", methods), ("paper", table.get("paper", {}))):
        for name in by_data:
            if name not in data:
                raise NearkinError(f"In {where} {what}.{name} names no data set of the suite.{nearest(name, data)}")
    for spec in methods.values():
        if not isinstance(spec, str):
            raise NearkinError(f"In {where} method must be {type_words(_ROW['method'])}, not {spec!r}.")
        if unknown := PLACEHOLDER.search(spec):
            raise NearkinError(f"In {where} nothing defines {unknown[0]}: write it in [define] or in each.")
        parse(spec)
    paper = {name: _numbers(numbers, f"{where}, paper.{name}") for name, numbers in table.get("paper", {}).items()}
    plain = {key: value for key, value in table.items() if key not in ("method", "settings", "paper")}
    return Row(methods=methods, settings=_settings(table, where), paper=paper, **{"backbone": backbone, **plain})


def _numbers(table: Any, where: str) -> dict[str, Published]:
    check_table(table, dict.fromkeys(table if isinstance(table, dict) else (), object), where)
    numbers = {}
    for name, value in table.items():
        check_metric(name, where)
        pair = value if isinstance(value, list) else [value]
        if len(pair) not in (1, 2) or not all(fits(v, float) for v in pair):
            raise NearkinError(f"In {where} {name} must be a percentage, or [percentage, spread], not {value!r}.")
        numbers[name] = Published(*map(float, pair))
    return numbers


def _other_methods(rows: Mapping[str, Row], data: Mapping[str, SuiteData], backbone: str) -> dict[str, Row]:
    known = {parse(spec).name for row in rows.values() for spec in row.methods.values()}
    others = [name for name in sorted({**LOSSES, **STRATEGIES}) if name not in known]
    return {name: Row(name, dict.fromkeys(data, name), {}, {}, backbone) for name in others}


def _settings(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings: dict[str, Any] = table.get("settings", {})
    for name in NO_SETTINGS:
        if name in settings:
            raise NearkinError(f"In {where} {name} is not a setting: a suite has rows, data sets, metrics and seeds.")
    return settings
