"""Run a suite: every row with every seed in one process, within a budget of time.

Finished runs are skipped. A run that was interrupted is resumed by the next call.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.benchmark.budget import Budget
from nearkin.benchmark.costs import ROUGH, alike_per_epoch, images_per_epoch, seconds_per_epoch
from nearkin.benchmark.planned_runs import PlannedRun, PlannedSuite, plan_suite
from nearkin.benchmark.results import Merged, Queries, images_of, merge, query_file, read_results, write_queries
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
    speed: float = 0.0,
    reporter: Reporter | None = None,
) -> SuiteResults:
    """Run the unfinished runs of a suite, as far as the budget allows, and return its results so far.

    `data` gives the paths of data sets, as "cub:PATH"; `budget` is seconds, or a text such as "25m", and runs quick
    rows first; `settings` are fields of Plan for all rows; `speed` is the images per second that this machine trains,
    for estimates before its first run. Run folders and results.jsonl are written to `out`; with `queries` also the
    values of each query.
    """
    time_left = Budget(budget)
    planned = plan_suite(load_suite(suite), seeds=seeds, rows=rows, settings=settings)
    with open_runner(out, queries=queries, speed=speed, reporter=reporter) as runner:
        jobs = runner.jobs(planned, data)
        if time_left.end is not None:
            jobs = runner.quick_first(jobs)
        made = runner.make([[job] for job in jobs], lambda: len(jobs), time_left)
        if made.failed and not any(run.id in runner.results for run in planned.runs):
            first = next(iter(made.failed.values()))
            raise NearkinError(f"Every run of {planned.suite.name} failed. The first error: {first}")
        return runner.suite_results(planned, made, data)


def merge_suite(paths: Sequence[str | Path], suite: str, folder: str | Path) -> Merged:
    """Merge the runs of one suite, made as it says, into its file below `folder`, with those that are there."""
    target = Path(folder) / suite / "results.jsonl"
    files = [*([target] if target.exists() else []), *map(Path, paths)]
    if lost := [path for path in files if not path.exists()]:
        raise NearkinError(f"There is no results file {lost[0]}.")
    seeds = sorted({run["seed"] for path in files for run in read_results(path).values()})
    ids = {run.id for run in plan_suite(load_suite(suite), seeds=seeds).runs} if seeds else set()
    if not any(ids & read_results(path).keys() for path in map(Path, paths)):
        raise NearkinError(f"The files have no run of {suite} with its own settings: were they changed by --set?")
    target.parent.mkdir(parents=True, exist_ok=True)
    return merge(files, target, only=ids, queries=False)


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


class Job(NamedTuple):
    """A run to make, with its data set and the spec of that for `train`."""

    run: PlannedRun
    dataset: SuiteData
    data: str


class Made(NamedTuple):
    """How the making of runs ended."""

    failed: Mapping[str, str]  # run id → error message
    stopped: str  # why it stopped before the end; empty if it did not


@contextmanager
def open_runner(
    out: str | Path, *, queries: bool = True, speed: float = 0.0, reporter: Reporter | None = None
) -> Iterator["Runner"]:
    """A runner that is alone in its folder, with images kept open between runs."""
    Path(out).mkdir(parents=True, exist_ok=True)
    with keep_images_open(), write_lock(Path(out)):  # two processes would make every run twice
        yield Runner(Path(out), queries=queries, speed=speed, reporter=reporter or Reporter())


class Runner:
    """Makes runs and keeps their results; one per call of `bench`."""

    def __init__(self, out: Path, *, queries: bool, speed: float, reporter: Reporter) -> None:
        self.out, self.queries, self.speed, self.reporter = out, queries, speed, reporter
        self.file = out / "results.jsonl"
        self.results = read_results(self.file)
        self.failed: dict[str, str] = {}  # run id → error message
        self.hardware = provenance()["hardware"]
        self._images = cache(lambda spec: len(load_dataset(spec).train.labels))

    def folder(self, run: PlannedRun) -> RunFolder:
        return RunFolder(self.out / "runs" / run.id)

    def jobs(self, planned: PlannedSuite, data: Sequence[str] | Mapping[str, str | Path]) -> list[Job]:
        """Runs without a result, and runs whose result lacks a metric that can still be measured."""
        specs = _data_specs(planned.suite, data)
        found: dict[str, Job] = {}
        for run in planned.runs:
            dataset, done = planned.suite.data[run.data], self.results.get(run.id)
            lacks = done and set(dataset.metrics) - set(done["scores"])
            measurable = lacks and self.folder(run).result.exists()
            if run.data in specs and (done is None or measurable):
                found.setdefault(run.id, Job(run, dataset, specs[run.data]))
        self._check_images(list(found.values()))
        return list(found.values())

    def suite_results(
        self, planned: PlannedSuite, made: Made, data: Sequence[str] | Mapping[str, str | Path]
    ) -> SuiteResults:
        """The results of a suite after runs were made."""
        specs = _data_specs(planned.suite, data)
        without = tuple(name for name in planned.suite.data if name not in specs)
        return SuiteResults(planned, self.results, made.failed, without, made.stopped, self.out)

    def make(self, groups: Iterable[Sequence[Job]], total: Callable[[], int], budget: Budget) -> Made:
        """Make runs, group by group; none of a group is started that is unlikely to finish within the budget.

        A run that fails ends its group, and the next group follows. `total` is the number of runs as far as known.
        """
        failed = self.failed
        number = 0
        try:
            for group in groups:
                if not budget.allows(sum(map(self.expected_seconds, group))):
                    return Made(failed, f"the budget is too short for another run; {total() - number} are left")
                for job in group:
                    run, number = job.run, number + 1
                    self.reporter.note(f"[{number}/{total()}] {run.data}: {run.row}, seed {run.seed}")
                    try:
                        with budget.alarm():
                            self.run(job)
                    except (NearkinError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
                        failed[run.id] = (str(error).strip() or type(error).__name__).splitlines()[0]
                        self.reporter.note(f"    failed: {failed[run.id]}")
                        break
        except KeyboardInterrupt:
            if not budget.expired:
                raise
            left = total() - number + 1
            return Made(failed, f"the budget is spent; {left} runs are left, the first of them started")
        return Made(failed, "")

    def _check_images(self, jobs: Sequence[Job]) -> None:
        """Refuse to add runs to those that were made with other images of a data set.

        Data sets without a path are made by nearkin, whose commit every run records.
        """
        for job in {job.run.data: job for job in jobs if needs_path(job.dataset)}.values():
            done = {images_of(run) for run in self.results.values() if run["settings"]["data"] == job.dataset.read}
            if done and done != {image_mark(load_dataset(job.data)).digest}:
                raise NearkinError(
                    f"{self.file} has runs that were made with other images of {job.run.data} than those of "
                    f"{job.data}: choose another --out."
                )

    def quick_first(self, jobs: Sequence[Job]) -> list[Job]:
        """Seed by seed as planned, but in each seed the runs that are likely to be quick before the others.

        How long a row takes is known from its other seeds. Otherwise a strategy takes longer than a loss: it works on
        a loss, and often embeds images besides.
        """
        seeds = list(dict.fromkeys(job.run.seed for job in jobs))

        def likely(job: Job) -> float:
            own = self._own_per_epoch(job.run)
            alike = seconds_per_epoch(self.results.values(), job.run.description, ROUGH, hardware=self.hardware)
            each = own or (alike or 1.0) * _depth(parse(job.run.description["method"]))
            return self._epochs_left(job.run) * each

        return sorted(jobs, key=lambda job: (seeds.index(job.run.seed), likely(job)))

    def expected_seconds(self, job: Job) -> float:
        """The seconds a run needs, by the runs so far that are most like it, or by `speed`; 0 if neither is known.

        A run that needs longer than the budget is interrupted and resumed by the next call.
        """
        left, settings = self._epochs_left(job.run), job.run.description
        if each := alike_per_epoch(self.results, settings, hardware=self.hardware):
            return left * each
        if not self.speed or not left:
            return 0.0
        return left * images_per_epoch(settings, self._images(job.data)) / self.speed

    def _own_per_epoch(self, run: PlannedRun) -> float:
        own = [name for name in run.description if name != "seed"]
        return seconds_per_epoch(self.results.values(), run.description, own, hardware=self.hardware)

    def _epochs_left(self, run: PlannedRun) -> float:
        folder = self.folder(run)
        if folder.result.exists():
            return 0.0
        done = max((e["epoch"] for e in folder.events() if e["event"] == "epoch"), default=0)
        return float(run.description["epochs"] - done)

    def run(self, job: Job) -> None:
        """Make a run, or resume it, and append it to the results."""
        run, data, metrics = job.run, job.data, job.dataset.metrics
        folder = self.folder(run)
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
