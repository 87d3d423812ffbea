"""Run a suite: every row with every seed in one process, within a budget of time.

Finished runs are skipped. A run that was interrupted is resumed by the next call.
"""

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

from nearkin.benchmark.planned_runs import PlannedRun, PlannedSuite, plan_suite
from nearkin.benchmark.results import Queries, images_of, query_file, read_results, write_queries
from nearkin.benchmark.suite import Suite, SuiteData, load_suite
from nearkin.console import Reporter
from nearkin.data.datasets import DATASETS, load_dataset
from nearkin.data.image_mark import image_mark
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation import DEFAULT_METRICS
from nearkin.files import Json, append_line, provenance, read_json, write_json, write_lock
from nearkin.spec import Call, nearest, parse
from nearkin.training.launch import train
from nearkin.training.measure_run import measure_run, query_values
from nearkin.training.model_card import write_card
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric

SAME_WORK = ("data", "backbone", "size", "fraction", "folds")
"""Settings that decide most of the time of an epoch."""

_UNITS = {"h": 3600, "m": 60, "s": 1}


def seconds_of(budget: str | float) -> float:
    """The seconds in a text such as 25m, 90s or 1h30m; a plain number is seconds."""
    if isinstance(budget, int | float):
        return float(budget)
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", budget.strip())
    if parts is None or not any(parts.groups()):
        raise NearkinError(f"Cannot read the budget {budget!r}: write hours, minutes, seconds as in 1h30m, 25m or 90s.")
    return float(sum(int(number or 0) * unit for number, unit in zip(parts.groups(), _UNITS.values(), strict=True)))


class Budget:
    """A budget of time; None is unlimited."""

    def __init__(self, budget: str | float | None) -> None:
        self.end = None if budget is None else time.monotonic() + seconds_of(budget)
        self.expired = False

    def allows(self, seconds: float) -> bool:
        """Whether more than this many seconds are left."""
        return self.end is None or time.monotonic() + max(seconds, 1e-3) < self.end

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Interrupt the main thread at the end of the budget, as Ctrl-C does: training saves itself first."""
        if self.end is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        timer = threading.Timer(max(0.0, self.end - time.monotonic()), self._interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _interrupt(self) -> None:
        self.expired = True
        _thread.interrupt_main()


@dataclass(frozen=True)
class SuiteResults:
    """A suite with its results so far."""

    planned: PlannedSuite
    runs: Mapping[str, Json]  # finished runs by id
    failed: Mapping[str, str]  # run id → error message
    without_data: tuple[str, ...]  # data sets whose path was not given
    stopped: str  # why it stopped before the end; empty if it did not
    out: Path | None = None  # folder with the values of each query, below queries/; None: they are not kept


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
) -> SuiteResults:
    """Run the unfinished runs of a suite, as far as the budget allows, and return its results so far.

    `data` gives the paths of data sets, as "cub:PATH"; `budget` is seconds, or a text such as "25m", and runs quick
    rows first; `settings` are fields of Plan for all rows. Run folders and results.jsonl are written to `out`; with
    `queries` also the values of each query.
    """
    time_left = Budget(budget)
    planned = plan_suite(load_suite(suite), seeds=seeds, rows=rows, settings=settings)
    specs = _data_specs(planned.suite, data)
    Path(out).mkdir(parents=True, exist_ok=True)
    with keep_images_open(), write_lock(Path(out)):  # two processes would make every run twice
        return _bench(planned, _Runner(Path(out), specs, queries, reporter or Reporter()), time_left)


def _bench(planned: PlannedSuite, runner: "_Runner", budget: Budget) -> SuiteResults:
    todo = runner.todo(planned)
    runner.check_images(planned, todo)
    if budget.end is not None:
        todo = runner.quick_first(todo)
    failed: dict[str, str] = {}
    stopped = ""
    try:
        for number, run in enumerate(todo, start=1):
            if not budget.allows(runner.expected_seconds(run)):
                stopped = f"the budget is too short for another run; {len(todo) - number + 1} are left"
                break
            runner.reporter.note(f"[{number}/{len(todo)}] {run.data}: {run.row}, seed {run.seed}")
            try:
                with budget.alarm():
                    runner.run(run, planned.suite.data[run.data].metrics)
            except (NearkinError, torch.OutOfMemoryError) as error:
                failed[run.id] = str(error).splitlines()[0]
                runner.reporter.note(f"    failed: {failed[run.id]}")
    except KeyboardInterrupt:
        if not budget.expired:
            raise
        stopped = f"the budget is spent; {len(todo) - number + 1} runs are left, the first of them started"
    if failed and not any(run.id in runner.results for run in planned.runs):
        first = next(iter(failed.values()))
        raise NearkinError(f"Every run of {planned.suite.name} failed. The first error: {first}")
    without = tuple(name for name in planned.suite.data if name not in runner.data_specs)
    return SuiteResults(planned, runner.results, failed, without, stopped, runner.out)


def suite_results(
    suite: str | Path,
    *,
    out: str | Path = "bench",
    seeds: int | Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SuiteResults:
    """The results of a suite so far, without running anything."""
    planned = plan_suite(load_suite(suite), seeds=seeds, rows=rows, settings=settings)
    return SuiteResults(planned, read_results(Path(out) / "results.jsonl"), {}, (), "", Path(out))


class _Runner:
    """Makes runs and keeps their results; one per call of `bench`."""

    def __init__(self, out: Path, data_specs: Mapping[str, str], queries: bool, reporter: Reporter) -> None:
        self.out, self.data_specs, self.queries, self.reporter = out, data_specs, queries, reporter
        self.file = out / "results.jsonl"
        self.results = read_results(self.file)
        self.hardware = provenance()["hardware"]

    def folder(self, run: PlannedRun) -> RunFolder:
        return RunFolder(self.out / "runs" / run.id)

    def todo(self, planned: PlannedSuite) -> list[PlannedRun]:
        """Runs without a result, and runs whose result lacks a metric that can still be measured."""
        found: dict[str, PlannedRun] = {}
        for run in planned.runs:
            done = self.results.get(run.id)
            lacks = done and set(planned.suite.data[run.data].metrics) - set(done["scores"])
            measurable = lacks and self.folder(run).result.exists()
            if run.data in self.data_specs and (done is None or measurable):
                found.setdefault(run.id, run)
        return list(found.values())

    def check_images(self, planned: PlannedSuite, todo: Sequence[PlannedRun]) -> None:
        """Refuse to add runs to those that were made with other images of a data set.

        Data sets without a path are made by nearkin, whose commit every run records.
        """
        for name in {run.data for run in todo if needs_path(planned.suite.data[run.data])}:
            read = planned.suite.data[name].read
            done = {images_of(run) for run in self.results.values() if run["settings"]["data"] == read}
            if done and done != {image_mark(load_dataset(self.data_specs[name])).digest}:
                raise NearkinError(
                    f"{self.file} has runs that were made with other images of {name} than those of "
                    f"{self.data_specs[name]}: choose another --out."
                )

    def quick_first(self, todo: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Seed by seed as planned, but in each seed the runs that are likely to be quick before the others.

        How long a row takes is known from its other seeds. Otherwise a strategy takes longer than a loss: it works on
        a loss, and often embeds images besides.
        """
        seeds = list(dict.fromkeys(run.seed for run in todo))

        def likely(run: PlannedRun) -> float:
            left = self._epochs_left(run)
            own = self._seconds_per_epoch(run, [name for name in run.description if name != "seed"])
            alike = self._seconds_per_epoch(run, SAME_WORK)
            return left * (own or (alike or 1.0) * _depth(parse(run.description["method"])))

        return sorted(todo, key=lambda run: (seeds.index(run.seed), likely(run)))

    def expected_seconds(self, run: PlannedRun) -> float:
        """The seconds a run needs, by the fastest run so far with the same data and network; 0 if there is none.

        The fastest, since the first run also reads images and compiles. A run that needs longer than the budget is
        interrupted and resumed by the next call.
        """
        return self._seconds_per_epoch(run, SAME_WORK) * self._epochs_left(run)

    def _seconds_per_epoch(self, run: PlannedRun, same: Sequence[str]) -> float:
        """Of the fastest run so far on this machine with the same of these settings; 0 if there is none."""
        rates = [
            float(record["wall"]) / int(record["settings"]["epochs"])
            for record in self.results.values()
            if record.get("wall")
            and record["settings"]["epochs"]
            and record["hardware"] == self.hardware
            and all(record["settings"].get(name) == run.description.get(name) for name in same)
        ]
        return min(rates, default=0.0)

    def _epochs_left(self, run: PlannedRun) -> float:
        folder = self.folder(run)
        if folder.result.exists():
            return 0.0
        done = max((e["epoch"] for e in folder.events() if e["event"] == "epoch"), default=0)
        return float(run.description["epochs"] - done)

    def run(self, run: PlannedRun, metrics: Sequence[str]) -> None:
        """Make a run, or resume it, and append it to the results."""
        folder, data = self.folder(run), self.data_specs[run.data]
        watcher = self.reporter if self.reporter.watched else Reporter()
        began, new = time.monotonic(), not folder.config.exists()
        if new:
            wanted = tuple(dict.fromkeys([*(RunMetric.parse(m).metric for m in metrics), *DEFAULT_METRICS]))
            train(out=folder.path, reporter=watcher, **run.settings, data=data, metrics=wanted)
        elif not folder.result.exists():
            device = run.settings.get("device", "auto")  # the run may have been started on another machine
            train(out=folder.path, resume=True, reporter=watcher, data=data, device=device)
        wall = round(time.monotonic() - began, 1) if new else None
        result, plan = folder.read_result(), read_json(folder.config)["plan"]
        if lacks := tuple(m for m in metrics if m not in result["scores"]):
            where: Json = {"data": data, "device": plan["device"], "reporter": watcher}
            result["scores"] |= measure_run(folder.path, metrics=lacks, **where)
            write_card(folder, result)
            write_json(folder.result, result)
        if self.queries and not (path := query_file(self.out, run.id)).exists():
            asked = tuple(result["scores"])
            write_queries(path, Queries(*query_values(folder.path, metrics=asked, data=data, device=plan["device"])))
        record = {
            "id": run.id,
            "data": run.data,
            **result,
            "wall": wall or self.results.get(run.id, {}).get("wall"),
            "precision": plan["precision"],
            "compile": plan["compile"],
            "settings": run.description,
        }
        resolved = read_json((folder.parts() or [folder])[0].config).get("resolved", {})
        if mark := resolved.get("images"):
            record["images"] = mark | {"kept": plan["stored"]}
        append_line(self.file, record)
        self.results[run.id] = record
        folder.checkpoint.unlink(missing_ok=True)  # three times the size of the model, and no longer needed
        gc.collect()  # frees images and network before the next run asks for the free memory


def _depth(call: Call) -> int:
    """1 for a loss, 2 for a strategy with a loss, and so on."""
    return 1 + max(map(_depth, call.args), default=0)


def _data_specs(suite: Suite, data: Sequence[str] | Mapping[str, str | Path]) -> dict[str, str]:
    """Data set → spec for `train`, for the data sets that can be read."""
    paths = dict(data.items() if isinstance(data, Mapping) else [_split_data(text) for text in data])
    for name in paths:
        if name not in suite.data:
            raise NearkinError(
                f"{suite.name} has no data set {name!r}.{nearest(name, suite.data)} It has: {', '.join(suite.data)}."
            )
    specs = {}
    for name, dataset in suite.data.items():
        if name in paths:
            specs[name] = f"{dataset.read}:{paths[name]}"
        elif not needs_path(dataset):
            specs[name] = dataset.read
    if not specs:
        forms = ", ".join(f"{name}:PATH" for name in suite.data)
        raise NearkinError(f"No path to the data of {suite.name}: give --data with one or more of {forms}.")
    return specs


def _split_data(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    if not (colon and path):
        raise NearkinError(f"Cannot read the data set in {text!r}: write NAME:PATH, as in cub:data/CUB_200_2011.")
    return name, path


def needs_path(dataset: SuiteData) -> bool:
    """Whether the path of a data set must be given."""
    name = parse(dataset.read.partition(":")[0]).name
    return name in DATASETS and DATASETS[name].path and ":" not in dataset.read
