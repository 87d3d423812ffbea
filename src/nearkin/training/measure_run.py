"""Measure the model of a finished run: on its test classes or on another data set."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.errors import NearkinError
from nearkin.evaluation import Scores, evaluate, evaluate_under, parse_metric, protocol_of
from nearkin.files import Json, read_json
from nearkin.networks.backbones import check_size
from nearkin.training.chosen_view import SquareView
from nearkin.training.images import Embedded, embed_images, measure, open_images
from nearkin.training.model import Model, load
from nearkin.training.moved_data import find_data
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric
from nearkin.training.seen_classes import SeenClasses, seen_classes


class RunScores(Scores):
    """The scores of a run's model, with what is known of the classes it was tested on."""

    tested: SeenClasses

    def __init__(self, values: dict[str, float], *, queries: int, left_out: int, tested: SeenClasses) -> None:
        super().__init__(values, queries=queries, left_out=left_out)
        self.tested = tested


def embed_test(
    run: str | Path,
    *,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
    model: Model | None = None,
    view: SquareView | None = None,
    over_ranks: bool = False,
) -> Embedded:
    """Embed the test images of a run's data set, or of `data`, with its model or `model`, in its view or `view`.

    With `over_ranks` all processes of a group call this and share the work.
    """
    reporter = reporter or Reporter()
    model = model or load(run, device=device)
    if view is not None:
        check_size(model.embedder.trunk, view.size)
        model.show(**view.settings)
    if data is None and model.plan.test == "none":
        raise NearkinError(
            f"{run} trained on all classes of its data, so there is nothing to measure it on: name other images with "
            "--data NAME:PATH."
        )
    found = load_dataset(data or find_data(RunFolder(run)), halves=model.plan.halves)
    reporter.leave_out(found.left_out)
    opened = open_images(model, found.test, "test", reporter=reporter)
    return embed_images(model, opened, reporter=reporter, over_ranks=over_ranks)


def measure_run(
    run: str | Path,
    *,
    data: str | None = None,
    metrics: tuple[str, ...] | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> RunScores:
    """Return the scores of a run's model, in percent. In a process group all processes call this and share the work.

    For a run of folds METRIC is the mean of the scores of its models, METRIC N-d the score of their joint embeddings.
    METRIC at SIZE of SHORT is the score with test images shown as squares of SIZE pixels from a short side of SHORT.
    """
    folder = RunFolder(run)
    names = metrics or _metrics_of(folder)
    open_test = partial(embed_test, data=data, device=device, reporter=reporter, over_ranks=True)
    counts: list[Scores] = []
    tested: list[SeenClasses] = []

    def measured(embedded: Embedded, wanted: Sequence[str]) -> Scores:
        scores = measure(embedded, wanted, over_ranks=True)
        counts.append(scores)
        tested.append(seen_classes(embedded.images.names, embedded.model.seen))
        return scores

    values = _over_views(folder, names, open_test, measured)
    most = max(tested, key=lambda each: each.seen)  # the models of folds have different training classes
    return RunScores(values, queries=counts[0].queries, left_out=counts[0].left_out, tested=most)


def measure_vectors(
    run: str | Path,
    x: Tensor,
    labels: Tensor,
    classes: Collection[str],
    *,
    metrics: Sequence[str] | None = None,
    device: str = "auto",
) -> RunScores:
    """Return the scores of embeddings by the model of a run, each searched among all others; `classes`: names.

    In a process group all processes call this and share the work.
    """
    model, kept = load(run, device=device), read_json(RunFolder(run).config)["plan"]["metrics"]
    names = metrics or list(dict.fromkeys(RunMetric.parse(name).metric for name in kept))
    how: Json = {"space": model.space, "seed": model.plan.seed}
    scores = evaluate(x.to(model.device), labels, metrics=names, over_ranks=True, **how)
    tested = seen_classes(classes, model.seen)
    return RunScores(scores, queries=scores.queries, left_out=scores.left_out, tested=tested)


def query_values(
    run: str | Path,
    *,
    metrics: Sequence[str],
    data: str | None = None,
    device: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the class of each test query, and its values by every retrieval metric; folds as in `measure_run`."""
    open_test = partial(embed_test, data=data, device=device)
    classes: list[Tensor] = []

    def measured(embedded: Embedded, wanted: Sequence[str]) -> dict[str, Tensor]:
        x, images, model = embedded
        protocol, labels = protocol_of(images), images.labels
        classes.append(labels[protocol.query])
        return evaluate_under(
            protocol, x, labels.to(x.device), metrics=wanted, per_query=True, space=model.embedder.space
        )

    names = [name for name in metrics if parse_metric(RunMetric.parse(name).metric).per_query]
    values = _over_views(RunFolder(run), names, open_test, measured)
    return classes[0], values


def _metrics_of(folder: RunFolder) -> tuple[str, ...]:
    plan, parts = read_json(folder.config)["plan"], folder.parts()
    names = tuple(plan["metrics"])
    return names + tuple(str(RunMetric(name, plan["dim"] * len(parts))) for name in names) if parts else names


def _over_views(
    folder: RunFolder,
    names: Sequence[str],
    open_test: Callable[..., Embedded],
    measured: Callable[[Embedded, Sequence[str]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Apply `measured` to the test embeddings of a run in each view that the names ask for."""
    views = dict.fromkeys(RunMetric.parse(name).view for name in names)
    by_view = {view: [name for name in names if RunMetric.parse(name).view == view] for view in views}
    parts = [_over_parts(folder, asked, partial(open_test, view=view), measured) for view, asked in by_view.items()]
    values = {name: value for part in parts for name, value in part.items()}
    return {name: values[name] for name in names}


def _over_parts(
    folder: RunFolder,
    names: Sequence[str],
    open_test: Callable[[Path], Embedded],
    measured: Callable[[Embedded, Sequence[str]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Apply `measured` to the test embeddings of a run; with folds, average over them, and apply it to all joined."""
    parts = folder.parts()
    joint = {name: asked for name in names if parts and (asked := RunMetric.parse(name)).joint_dim}
    alone = {name: RunMetric.parse(name).metric for name in names if name not in joint}
    found = [measured(open_test(part.path), list(alone.values())) for part in parts or [folder] if alone]
    values = {name: sum(each[metric] for each in found) / len(found) for name, metric in alone.items()}
    if joint:
        embedded = open_test(folder.path)
        dim = embedded.x.shape[1]
        if wrong := [name for name, asked in joint.items() if asked.joint_dim != dim]:
            has = ", ".join(str(asked._replace(joint_dim=dim)) for asked in joint.values())
            raise NearkinError(f"{folder.path} has no {wrong[0]!r}: its models together have {has}.")
        together = measured(embedded, [asked.metric for asked in joint.values()])
        values |= {name: together[asked.metric] for name, asked in joint.items()}
    return values
