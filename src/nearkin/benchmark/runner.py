"""A budget of time that ends in a run that can go on."""
# MERGED: Run a suite: every row with every seed in one process, each run once, stopped and gone on with at any moment.

import _thread
import gc
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nearkin.benchmark.planned_runs import Cell, Sheet, expand
from nearkin.benchmark.results import Queries, append_result, query_file, read_results, write_queries
from nearkin.benchmark.suite import Part, Suite, load_suite
from nearkin.console import Reporter
from nearkin.data.datasets import DATASETS
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation import DEFAULT_METRICS
from nearkin.files import Json, provenance, read_json, write_json, write_lock
from nearkin.spec import nearest, parse
from nearkin.training.launch import train
from nearkin.training.measure_run import measure_run, query_values
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric

_UNITS = {"h": 3600, "m": 60, "s": 1}


def seconds_of(budget: str | float) -> float:
    """Seconds of a text such as 25m, 90s, 1h30m; a plain number is seconds."""
    if isinstance(budget, int | float):
        return float(budget)
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", budget.strip())
    if parts is None or not any(parts.groups()):
        raise NearkinError(f"Cannot read the budget {budget!r}: write hours, minutes, seconds as in 1h30m, 25m or 90s.")
    return float(sum(int(number or 0) * unit for number, unit in zip(parts.groups(), _UNITS.values(), strict=True)))


class Clock:
    """A budget of time; without one it never runs out."""

    def __init__(self, budget: str | float | None) -> None:
        self.end = None if budget is None else time.monotonic() + seconds_of(budget)
        self.rang = False

    def allows(self, seconds: float) -> bool:
        """Whether there is so much time left, and any at all."""
        return self.end is None or time.monotonic() + max(seconds, 1e-3) < self.end

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """While this lasts, the end of the budget stops the main thread as Ctrl-C does: training saves itself first."""
        if self.end is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        timer = threading.Timer(max(0.0, self.end - time.monotonic()), self._ring)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        _thread.interrupt_main()


@dataclass(frozen=True)
class Board:
    """What a suite has come to."""

    sheet: Sheet
    results: Mapping[str, Json]  # by run id
    failed: Mapping[str, str]  # run id → sentence
    without_data: tuple[str, ...]  # data sets whose path was not given
    stopped: str  # why before the end; empty: it was not
    out: Path | None = None  # where the values of each query lie, below queries/; None: nowhere


def bench(
    suite: str | Path,
    *,
    data: Sequence[str] | Mapping[str, str | Path] = (),
    seeds: int | Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    budget: str | float | None = None,
    out: str | Path = "bench",
    settings: Mapping[str, Any] | None = None,
    queries: bool = True,
    reporter: Reporter | None = None,
) -> Board:
    """Run what is not finished yet of a suite, as far as the budget goes, and say how it stands.

    `data` is where data sets lie, as "cub:PATH"; `budget` seconds, or a text such as "25m"; `settings` are fields of
    Plan for all rows. Runs and results.jsonl lie in `out`; with `queries` also each query's values.
    """
    clock = Clock(budget)
    sheet = expand(load_suite(suite), seeds=seeds, rows=rows, settings=settings)
    places = _places(sheet.suite, data)
    Path(out).mkdir(parents=True, exist_ok=True)
    with keep_images_open(), write_lock(Path(out)):  # two at once would make every run twice
        return _bench(sheet, _Runner(Path(out), places, queries, reporter or Reporter()), clock)


def _bench(sheet: Sheet, runner: "_Runner", clock: Clock) -> Board:
    todo = runner.todo(sheet)
    failed: dict[str, str] = {}
    stopped = ""
    try:
        for number, cell in enumerate(todo, start=1):
            if not clock.allows(runner.expected(cell)):
                stopped = f"the budget does not hold another run; {len(todo) - number + 1} are left"
                break
            runner.reporter.note(f"[{number}/{len(todo)}] {cell.data}: {cell.row}, seed {cell.seed}")
            try:
                with clock.alarm():
                    runner.run(cell, sheet.suite.parts[cell.data].metrics)
            except (NearkinError, torch.OutOfMemoryError) as error:
                failed[cell.id] = str(error).splitlines()[0]
                runner.reporter.note(f"    failed: {failed[cell.id]}")
    except KeyboardInterrupt:
        if not clock.rang:
            raise
        stopped = f"the budget is spent; {len(todo) - number + 1} runs are left, the first of them begun"
    if failed and not any(cell.id in runner.results for cell in sheet.cells):
        raise NearkinError(f"No run of {sheet.suite.name} could be made. The first says: {next(iter(failed.values()))}")
    without = tuple(name for name in sheet.suite.parts if name not in runner.places)
    return Board(sheet, runner.results, failed, without, stopped, runner.out)


def board(
    suite: str | Path,
    *,
    out: str | Path = "bench",
    seeds: int | Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Board:
    """How a suite stands by its results so far; nothing is run."""
    sheet = expand(load_suite(suite), seeds=seeds, rows=rows, settings=settings)
    return Board(sheet, read_results(Path(out) / "results.jsonl"), {}, (), "", Path(out))


class _Runner:
    """One sitting: where things lie, and what is finished."""

    def __init__(self, out: Path, places: Mapping[str, str], queries: bool, reporter: Reporter) -> None:
        self.out, self.places, self.queries, self.reporter = out, places, queries, reporter
        self.file = out / "results.jsonl"
        self.results = read_results(self.file)
        self.hardware = provenance()["hardware"]

    def folder(self, cell: Cell) -> RunFolder:
        return RunFolder(self.out / "runs" / cell.id)

    def todo(self, sheet: Sheet) -> list[Cell]:
        """Runs without a result, and those whose result lacks a metric and that can be measured again."""
        found: dict[str, Cell] = {}
        for cell in sheet.cells:
            done = self.results.get(cell.id)
            lacks = done and set(sheet.suite.parts[cell.data].metrics) - set(done["scores"])
            again = lacks and self.folder(cell).result.exists()
            if cell.data in self.places and (done is None or again):
                found.setdefault(cell.id, cell)
        return list(found.values())

    def expected(self, cell: Cell) -> float:
        """The least seconds a run will take, by those made here with the same data and network; 0: nobody knows.

        The least, since the first run of a sitting also reads images and compiles; one that needs longer than the
        budget holds is stopped in time and gone on with.
        """
        alike = ("data", "backbone", "size", "fraction", "folds")

        def rate(record: Json) -> float:
            return float(record["wall"]) / int(record["settings"]["epochs"])

        rates = [
            rate(record)
            for record in self.results.values()
            if record.get("wall")
            and record["settings"]["epochs"]
            and record["hardware"] == self.hardware
            and all(record["settings"].get(name) == cell.description.get(name) for name in alike)
        ]
        if not rates or self.folder(cell).result.exists():
            return 0.0
        epochs = int(cell.description["epochs"])
        done = max((e["epoch"] for e in self.folder(cell).events() if e["event"] == "epoch"), default=0)
        return min(rates) * (epochs - done)

    def run(self, cell: Cell, metrics: Sequence[str]) -> None:
        """Make a run, or go on with it, and put it into the results."""
        folder, text = self.folder(cell), self.places[cell.data]
        watcher = self.reporter if self.reporter.watched else Reporter()
        began, whole = time.monotonic(), not folder.config.exists()
        if not folder.config.exists():
            wanted = tuple(dict.fromkeys([*(RunMetric.parse(m).metric for m in metrics), *DEFAULT_METRICS]))
            train(out=folder.path, reporter=watcher, **cell.settings, data=text, metrics=wanted)
        elif not folder.result.exists():
            _move(folder, text, cell.settings)
            train(out=folder.path, resume=True, reporter=watcher)
        wall = round(time.monotonic() - began, 1) if whole else None
        result, plan = read_json(folder.result), read_json(folder.config)["plan"]
        if lacks := tuple(m for m in metrics if m not in result["scores"]):
            where: Json = {"data": text, "device": plan["device"], "reporter": watcher}
            more = measure_run(folder.path, metrics=lacks, **where)
            result["scores"] |= more
            write_json(folder.result, result)
        if self.queries and not (place := query_file(self.out, cell.id)).exists():
            write_queries(place, self.query_values(folder, text, tuple(result["scores"]), plan["device"]))
        record = {
            "id": cell.id,
            "data": cell.data,
            **result,
            "wall": wall or self.results.get(cell.id, {}).get("wall"),
            "precision": plan["precision"],
            "compile": plan["compile"],
            "settings": cell.description,
        }
        append_result(self.file, record)
        self.results[cell.id] = record
        folder.checkpoint.unlink(missing_ok=True)  # three times the size of the model, and of no more use
        gc.collect()  # images and network of this run, before the next one asks how much memory is free

    def query_values(self, folder: RunFolder, text: str, metrics: Sequence[str], device: str) -> Queries:
        """Each test query's value by every retrieval metric."""
        return Queries(*query_values(folder.path, metrics=metrics, data=text, device=device))


def _move(folder: RunFolder, text: str, settings: Json) -> None:
    """Let a run that was begun elsewhere go on here: its data may lie at another place, its device be another."""
    config = read_json(folder.config)
    config["plan"] |= {"data": text, "device": settings.get("device", "auto")}
    write_json(folder.config, config)


def _places(suite: Suite, given: Sequence[str] | Mapping[str, str | Path]) -> dict[str, str]:
    """Data set → text for `train`, of those that can be read."""
    pairs = given.items() if isinstance(given, Mapping) else [_pair(text) for text in given]
    paths = dict(pairs)
    for name in paths:
        if name not in suite.parts:
            raise NearkinError(
                f"{suite.name} has no data set {name!r}.{nearest(name, suite.parts)} It has: {', '.join(suite.parts)}."
            )
    places = {name: f"{part.read}:{paths[name]}" for name, part in suite.parts.items() if name in paths}
    places |= {name: part.read for name, part in suite.parts.items() if name not in paths and not needs_path(part)}
    if not places:
        forms = ", ".join(f"{name}:PATH" for name in suite.parts)
        raise NearkinError(f"Say where the data of {suite.name} lie: --data with one or more of {forms}.")
    return places


def _pair(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    if not (colon and path):
        raise NearkinError(f"Cannot read where the data lie in {text!r}: write NAME:PATH, as in cub:data/CUB_200_2011.")
    return name, path


def needs_path(part: Part) -> bool:
    """Whether one has to say where a data set lies."""
    name = parse(part.read.partition(":")[0]).name
    return name in DATASETS and DATASETS[name].path and ":" not in part.read
