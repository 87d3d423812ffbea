"""Finished runs as a report sees them: settings, log, and the test set embedded once, with everyone's neighbours."""

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
from nearkin.evaluation import CLUSTERING, evaluate_under, protocol_of
from nearkin.files import Json, read_json
from nearkin.report.sheets import nearest_rows
from nearkin.space import Space, project
from nearkin.training.checkpoint import KnownClasses, read_classes
from nearkin.training.measure_run import Embedded, embed_test
from nearkin.training.run_folder import RunFolder

NEIGHBOURS = 8
MAIN = ("MAP@R", "R@1")
"""What models are compared by, measured whether the run asked for it or not; the first decides where one must."""


class Label(NamedTuple):
    """What a run is called: seeds of one method share its name."""

    method: str
    run: str


@dataclass(frozen=True, eq=False)
class Study:
    """One run with its test set."""

    label: Label
    folder: RunFolder
    config: Json
    result: Json
    events: Sequence[Json]
    images: Images
    points: Tensor  # [N, D] the embeddings as points of the space
    space: Space
    size: int  # pixels: the side of the image the network sees
    query: Tensor  # [Q] rows of the queries
    gallery: Tensor  # [G] rows of the gallery
    values: Mapping[str, Tensor]  # metric → [Q] percent, NaN where a query has no relevant item
    near: Tensor  # [Q, k] rows of the nearest gallery images
    similarity: Tensor  # [Q, k]
    trained_on: frozenset[str]  # names of the training classes
    known: KnownClasses | None

    @property
    def labels(self) -> Tensor:
        """The class of each query [Q]."""
        return self.images.labels[self.query]

    @property
    def right(self) -> Tensor:
        """Whether a neighbour is kin [Q, k]."""
        return self.images.labels[self.near] == self.labels[:, None]

    @property
    def seed(self) -> int:
        """The seed it was trained with."""
        return int(self.result["seed"])

    @property
    def metrics(self) -> list[str]:
        """What was measured, as it was asked for, with clustering metrics; of a model of several parts, as one."""
        asked = [name for name in self.result["scores"] if " " not in name]
        return list(dict.fromkeys([*asked, *self.values]))

    def score(self, metric: str) -> float:
        """The score as measured for this report; of clustering metrics, as the run measured it."""
        if metric in self.values:
            return float(self.values[metric].nanmean())
        return float(self.result["scores"].get(metric, torch.nan))


@keep_images_open()
def open_studies(
    runs: Sequence[str | Path], *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> list[Study]:
    """Open finished runs and embed their test set; runs that were tested on different images are refused."""
    folders = [RunFolder(run) for run in runs]
    if not folders:
        raise NearkinError("There is nothing to report: name at least one run folder.")
    configs = [read_json(folder.config) for folder in folders]
    results = [_finished(folder) for folder in folders]
    labels = label_runs(configs, [folder.path.name for folder in folders])
    studies: list[Study] = []
    for folder, config, result, label in zip(folders, configs, results, labels, strict=True):
        if reporter is not None and len(folders) > 1:
            reporter.note(f"Embedding with {label.run}")
        embedded = embed_test(folder.path, data=data, device=device, reporter=reporter)
        study = _study(label, folder, config, result, embedded)
        if studies and not _same_test(studies[0].images, study.images):
            raise NearkinError(
                f"{studies[0].folder.path} and {folder.path} were tested on different images "
                f"({studies[0].config['plan']['data']} and {config['plan']['data']}): "
                "their scores cannot be compared; write a report for each, or give one test set with --data."
            )
        studies.append(study)
    return studies


def _finished(folder: RunFolder) -> Json:
    if not folder.result.exists():
        raise NearkinError(
            f"{folder.path} is not finished: go on with it by nearkin train --resume --out {folder.path}."
        )
    return read_json(folder.result)


def _study(label: Label, folder: RunFolder, config: Json, result: Json, embedded: Embedded) -> Study:
    x, images, model = embedded
    space, protocol = model.embedder.space, protocol_of(images)
    asked = dict.fromkeys([*result["scores"], *MAIN])
    values = evaluate_under(
        protocol,
        x,
        images.labels.to(x.device),
        metrics=[name for name in asked if name not in CLUSTERING and " " not in name],  # words: as one of several
        per_query=True,
        space=space,
    )
    points = project(x, space).cpu()
    found = [nearest_rows(points, images, rows, NEIGHBOURS, space) for rows in torch.split(protocol.query, 256)]
    return Study(
        label=label,
        folder=folder,
        config=config,
        result=result,
        events=folder.events(),
        images=images,
        points=points,
        space=space,
        size=model.size,
        query=protocol.query,
        gallery=protocol.gallery,
        values=values,
        near=torch.cat([rows for rows, _ in found]),
        similarity=torch.cat([s for _, s in found]),
        trained_on=frozenset(model.names),
        known=read_classes(folder.classes),
    )


def _same_test(a: Images, b: Images) -> bool:
    """Whether two test sets are the same images in the same order; files count by their names, wherever they lie."""
    if a.names != b.names or not torch.equal(a.labels, b.labels):
        return False
    if isinstance(a.sources, Tensor) or isinstance(b.sources, Tensor):
        both = isinstance(a.sources, Tensor) and isinstance(b.sources, Tensor)
        return both and torch.equal(torch.as_tensor(a.sources), torch.as_tensor(b.sources))
    return [path.name for path in a.sources] == [path.name for path in b.sources]


def label_runs(configs: Sequence[Json], folders: Sequence[str]) -> list[Label]:
    """Names that tell methods apart by what differs between them, and runs of a method by their seed."""
    settings = [_deciding(config) for config in configs]
    seeds = [config["plan"]["seed"] for config in configs]
    names: dict[str, str] = {}  # what decides the outcome → what it is called
    for config, own in zip(configs, settings, strict=True):
        alike = [other for other in settings if other["method"] == own["method"] and other != own]
        apart = [name for name in own if any(other.get(name) != own[name] for other in alike)]
        extra = ", ".join(f"{name} {own[name]}" for name in apart)
        names[str(own)] = config["plan"]["method"] + (f" ({extra})" if extra else "")
    labels: list[Label] = []
    seen: set[tuple[str, int]] = set()
    for own, seed, folder in zip(settings, seeds, folders, strict=True):
        name = names[str(own)]
        if (name, seed) in seen:  # the same training twice: another machine, or another commit
            name = f"{name} [{folder}]"
        seen.add((name, seed))
        several = sum(other == own for other in settings) > 1
        labels.append(Label(name, f"{name}, seed {seed}" if several else name))
    return labels


def _deciding(config: Json) -> Json:
    plan = {name: value for name, value in config["plan"].items() if name not in (*NEUTRAL, "seed")}
    return plan | {"method": config["method"], "data": plan["data"].partition(":")[0]}


def by_method(studies: Sequence[Study]) -> dict[str, list[Study]]:
    """The runs of each method, by seed."""
    groups: dict[str, list[Study]] = {}
    for study in studies:
        groups.setdefault(study.label.method, []).append(study)
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in groups.items()}
