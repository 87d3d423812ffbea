"""Finished runs measured for a report: settings, log, embedded test set, scores per query, nearest neighbours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.benchmark.planned_runs import NEUTRAL
from nearkin.console import Reporter
from nearkin.data.images import Images
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.evaluation import evaluate_under, parse_metric, protocol_of
from nearkin.files import Json, read_json
from nearkin.report.picture_sheets import nearest_rows
from nearkin.space import Space
from nearkin.training.checkpoint import KnownClasses, read_classes
from nearkin.training.images import Embedded
from nearkin.training.measure_run import embed_test
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric
from nearkin.training.seen_classes import SeenClasses, seen_classes

NEIGHBOURS = 8
MAIN_METRICS = ("MAP@R", "R@1")
"""Metrics that models are compared by, measured even if the run did not ask for them; the first one sorts."""


class Label(NamedTuple):
    """Names of a run: seeds of one method share the method's name."""

    method: str
    run: str


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A finished run with its embedded test set."""

    label: Label
    folder: RunFolder
    config: Json
    result: Json
    events: Sequence[Json]
    images: Images
    points: Tensor  # [N, D] embeddings, projected to the space
    space: Space
    size: int  # pixels: side of the network's input image
    query: Tensor  # [Q] rows of the queries
    gallery: Tensor  # [G] rows of the gallery
    values: Mapping[str, Tensor]  # metric → [Q] percent, NaN for a query without a relevant item
    nearest: Tensor  # [Q, k] rows of the nearest gallery images
    similarity: Tensor  # [Q, k]
    training_classes: frozenset[str]  # names
    class_records: KnownClasses | None  # what the method stored about its training classes

    @property
    def labels(self) -> Tensor:
        """The class of each query [Q]."""
        return self.images.labels[self.query]

    @property
    def tested(self) -> SeenClasses:
        """The test classes, and how many of them the model was trained on."""
        return seen_classes(self.images.names, self.training_classes)

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.result["seed"])

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, clustering included, without those of several models measured as one."""
        asked = [name for name in self.result["scores"] if RunMetric.parse(name).plain]
        return list(dict.fromkeys([*asked, *self.values]))

    def score(self, metric: str) -> float:
        """The score measured for this report; for a clustering metric, the score the run stored."""
        if metric in self.values:
            return float(self.values[metric].nanmean())
        return float(self.result["scores"].get(metric, torch.nan))


@keep_images_open()
def open_runs(
    paths: Sequence[str | Path], *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> list[MeasuredRun]:
    """Open finished runs and embed their test set, which must be the same for all of them."""
    folders = [RunFolder(path) for path in paths]
    if not folders:
        raise NearkinError("There is nothing to report: name at least one run folder.")
    configs = [read_json(folder.config) for folder in folders]
    results = [folder.read_result() for folder in folders]
    labels = label_runs(configs, [folder.path.name for folder in folders])
    runs: list[MeasuredRun] = []
    for folder, config, result, label in zip(folders, configs, results, labels, strict=True):
        if reporter is not None and len(folders) > 1:
            reporter.note(f"Embedding with {label.run}")
        embedded = embed_test(folder.path, data=data, device=device, reporter=reporter)
        run = _measure(label, folder, config, result, embedded)
        if runs and not _same_test(runs[0].images, run.images):
            raise NearkinError(
                f"{runs[0].folder.path} and {folder.path} were tested on different images "
                f"({runs[0].config['plan']['data']} and {config['plan']['data']}), so their scores cannot be compared. "
                "Write one report for each, or give one test set with --data."
            )
        runs.append(run)
    return runs


def _measure(label: Label, folder: RunFolder, config: Json, result: Json, embedded: Embedded) -> MeasuredRun:
    x, images, model = embedded
    space, protocol = model.embedder.space, protocol_of(images)
    asked = dict.fromkeys([*result["scores"], *MAIN_METRICS])
    values = evaluate_under(
        protocol,
        x,
        images.labels.to(x.device),
        metrics=[name for name in asked if RunMetric.parse(name).plain and parse_metric(name).per_query],
        per_query=True,
        space=space,
    )
    points = space.project(x).cpu()
    found = [nearest_rows(points, images, rows, NEIGHBOURS, space) for rows in torch.split(protocol.query, 256)]
    return MeasuredRun(
        label=label,
        folder=folder,
        config=config,
        result=result,
        events=folder.events(),
        images=images,
        points=points,
        space=space,
        size=model.test_size,
        query=protocol.query,
        gallery=protocol.gallery,
        values=values,
        nearest=torch.cat([rows for rows, _ in found]),
        similarity=torch.cat([s for _, s in found]),
        training_classes=model.seen,
        class_records=read_classes(folder.classes),
    )


def _same_test(a: Images, b: Images) -> bool:
    """Whether two test sets hold the same images in the same order; files are compared by name, not by folder."""
    if a.names != b.names or not torch.equal(a.labels, b.labels):
        return False
    if isinstance(a.sources, Tensor) or isinstance(b.sources, Tensor):
        both = isinstance(a.sources, Tensor) and isinstance(b.sources, Tensor)
        return both and torch.equal(torch.as_tensor(a.sources), torch.as_tensor(b.sources))
    return [path.name for path in a.sources] == [path.name for path in b.sources]


def label_runs(configs: Sequence[Json], folders: Sequence[str]) -> list[Label]:
    """Names of runs: the method, the settings that differ between runs of it, and the seed if there are several."""
    settings = [_outcome_settings(config) for config in configs]
    seeds = [config["plan"]["seed"] for config in configs]
    names: dict[str, str] = {}  # settings → name of the method
    for config, setting in zip(configs, settings, strict=True):
        alike = [other for other in settings if other["method"] == setting["method"] and other != setting]
        differing = [name for name in setting if any(other.get(name) != setting[name] for other in alike)]
        extra = ", ".join(f"{name} {setting[name]}" for name in differing)
        names[str(setting)] = config["plan"]["method"] + (f" ({extra})" if extra else "")
    labels: list[Label] = []
    seen: set[tuple[str, int]] = set()
    for setting, seed, folder in zip(settings, seeds, folders, strict=True):
        name = names[str(setting)]
        if (name, seed) in seen:  # the same training twice, for example on another machine or commit
            name = f"{name} [{folder}]"
        seen.add((name, seed))
        several = sum(other == setting for other in settings) > 1
        labels.append(Label(name, f"{name}, seed {seed}" if several else name))
    return labels


def _outcome_settings(config: Json) -> Json:
    plan = {name: value for name, value in config["plan"].items() if name not in (*NEUTRAL, "seed")}
    return plan | {"method": config["method"], "data": plan["data"].partition(":")[0]}


def by_method(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """The runs of each method, sorted by seed."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(run.label.method, []).append(run)
    return {name: sorted(group, key=lambda run: run.seed) for name, group in groups.items()}


def score_curve(events: Sequence[Json], result: Json, metric: str) -> tuple[list[float], list[float]]:
    """Epochs and test scores of a metric, from a run's log and its result."""
    points = {float(e["epoch"]): e["scores"][metric] for e in events if e["event"] == "test" and metric in e["scores"]}
    if metric in result.get("scores", {}):
        points[float(result["kept_epoch"])] = result["scores"][metric]
    epochs = sorted(points)
    return epochs, [points[epoch] for epoch in epochs]
