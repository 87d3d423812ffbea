"""Pictures of how proxies and embeddings move in a training: maps, cosines of both, scores beside a baseline.

They are drawn for the epochs of which the run has snapshots, at least for its last one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.errors import NearkinError
from nearkin.files import read_json, whole_file
from nearkin.methods.proxies import Proxies
from nearkin.report.charts import INK, PALETTE, STYLE, look, rendered
from nearkin.report.maps import layout, some_of_each
from nearkin.space import Space, pairwise, project
from nearkin.training.checkpoint import Snapshot, kept_epochs, open_snapshot
from nearkin.training.loop import training_images
from nearkin.training.measure_run import open_images
from nearkin.training.model import Model, Store, embed_store
from nearkin.training.run_folder import RunFolder

STAR = "#10246b"
PANELS = 4  # epochs side by side, where none are named


class View(NamedTuple):
    """Some images of an epoch as points of the space: of the training set with all proxies, or of unseen classes."""

    epoch: int
    seen: bool  # whether the classes were trained on; the others have no proxies
    x: Tensor  # [P, D]
    labels: Tensor  # [P]
    proxies: Tensor  # [C·K, D]
    owners: Tensor  # [C·K] the class of a proxy
    space: Space


class Part(NamedTuple):
    """The training images of a run, opened."""

    images: Images
    store: Store


def open_training(model: Model, *, reporter: Reporter) -> Part:
    """The images a run was trained on, in the order of its own row numbers."""
    plan = model.plan
    images, _ = training_images(plan, load_dataset(plan.data, halves=plan.halves))
    store, images, _ = open_images(model, images, "training", reporter=reporter)
    return Part(images, store)


def open_test(model: Model, *, reporter: Reporter) -> Part:
    """The images of a run's unseen classes."""
    test = load_dataset(model.plan.data, halves=model.plan.halves).test
    store, images, _ = open_images(model, test, "test", reporter=reporter)
    return Part(images, store)


def proxies_of(snapshot: Snapshot) -> Proxies:
    """The proxies of a snapshot's method."""
    found = next((module for module in snapshot.method.modules() if isinstance(module, Proxies)), None)
    if found is None:
        raise NearkinError(f"{snapshot.method.spec.name} has no proxies, so there are no pictures of them.")
    return found


def view(snapshot: Snapshot, part: Part, *, points: int, seen: bool = True) -> View:
    """Embed some images of as many classes as there is room for, as they were after an epoch."""
    model, proxies, space = snapshot.model, proxies_of(snapshot), snapshot.method.space
    rows = some_of_each(part.images.labels, points=points, classes=max(1, points // 3), seed=0)
    x = embed_store(model.embedder, part.store, model.view, index=rows, precision=model.plan.precision)
    count = len(proxies.labels) if seen else 0
    vectors, owners = project(proxies.vectors.detach()[:count], space).cpu(), proxies.labels[:count].cpu()
    return View(snapshot.epoch, seen, project(x, space).cpu(), part.images.labels[rows], vectors, owners, space)


def chosen_epochs(run: RunFolder, wanted: Sequence[int] | None) -> list[int]:
    """The epochs to draw: those named, or a few of the run's own spread over it."""
    there = list(kept_epochs(run))
    if not there:
        raise NearkinError(
            f"{run.path} keeps no epoch to draw: finish it by nearkin train --resume, or train with --snapshots."
        )
    if wanted is None:
        places = np.linspace(0, len(there) - 1, min(PANELS, len(there))).round().astype(int)
        return [there[place] for place in places]
    for epoch in wanted:
        if epoch not in there:
            raise NearkinError(
                f"{run.path} has no snapshot of epoch {epoch}: it has {', '.join(map(str, there))}; "
                "name those, or train with --snapshots."
            )
    return list(wanted)


def views_of(
    run: RunFolder,
    *,
    epochs: Sequence[int] | None,
    points: int,
    data: str | None,
    device: str,
    reporter: Reporter,
) -> list[View]:
    """A run at the chosen epochs, always on the same training images; at the last one on unseen classes, too."""
    views: list[View] = []
    for epoch in chosen_epochs(run, epochs):
        snapshot = open_snapshot(run, epoch, data=data, device=device)
        reporter.note(f"Embedding images as of epoch {epoch}")
        views.append(view(snapshot, open_training(snapshot.model, reporter=reporter), points=points))
    test = open_test(snapshot.model, reporter=reporter)
    return [*views, view(snapshot, test, points=points, seen=False)]


# Drawing.


def styled() -> AbstractContextManager[None]:
    """Within it figures look like the others."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole."""
    with whole_file(path) as temporary:
        temporary.write_bytes(rendered(figure, "png"))
    return path


def panels(rows: int, columns: int, *, side: float) -> tuple[Any, Any]:
    """A figure of square panels, [rows][columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(side * columns, side * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _grid(runs: dict[str, list[View]], *, side: float, heading: str) -> tuple[Any, Any, list[tuple[Any, View]]]:
    """A row a run and a column an epoch, each with its words; the figure, all panels, and those to be drawn in."""
    figure, grid = panels(len(runs), max(map(len, runs.values())), side=side)
    figure.suptitle(heading, fontsize=9, color=INK)
    pairs = []
    for row, (name, views) in zip(grid, runs.items(), strict=True):
        row[0].set_ylabel(name)
        for axes in row[len(views) :]:
            axes.axis("off")
        for axes, view in zip(row, views, strict=False):
            when = "before training" if view.epoch == 0 else f"epoch {view.epoch}"
            axes.set_title(when if view.seen else f"{when}, unseen classes", fontsize=8)
            axes.set(xticks=(), yticks=())
            axes.grid(visible=False)
            pairs.append((axes, view))
    return figure, grid, pairs


def draw_maps(runs: dict[str, list[View]], path: Path) -> Path:
    """t-SNE of images and proxies together."""
    heading = "t-SNE of images (dots, coloured by class) and proxies (stars)"
    with styled():
        figure, _, pairs = _grid(runs, side=3.2, heading=heading)
        for axes, seen in pairs:
            shown = torch.isin(seen.owners, seen.labels)
            places = layout(torch.cat([seen.x, seen.proxies[shown]]).double().numpy())
            count = len(seen.x)
            colours = [PALETTE[c % len(PALETTE)] for c in seen.labels.tolist()]
            axes.scatter(*places[:count].T, s=5, c=colours, linewidths=0)
            axes.scatter(*places[count:].T, s=30, marker="*", c=STAR, edgecolors="white", linewidths=0.4)
    return save(figure, path)


def cosines(seen: View, *, each: int = 3, classes: int = 100) -> Tensor:
    """Similarities of `each` images of every class with the proxies, both in the order of the classes."""
    kept = torch.unique(seen.labels)[:classes]
    rows = torch.cat([(seen.labels == c).nonzero().flatten()[:each] for c in kept])
    return pairwise(seen.x[rows], seen.proxies[torch.isin(seen.owners, kept)], seen.space)


def draw_cosines(runs: dict[str, list[View]], path: Path) -> Path:
    """Heat maps of the similarity of training images and proxies."""
    heading = "Similarity of training images (down, three a class) and proxies (across), by class"
    trained = {name: [view for view in views if view.seen] for name, views in runs.items()}
    with styled():
        figure, grid, pairs = _grid(trained, side=2.6, heading=heading)
        for axes, seen in pairs:
            drawn = axes.imshow(
                cosines(seen).numpy(), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
            )
        figure.colorbar(drawn, ax=grid, shrink=0.8)
    return save(figure, path)


def score_curve(run: RunFolder, metric: str) -> tuple[list[float], list[float]]:
    """Epochs and test scores that a run's log and result tell, without looking at the test set again."""
    points = {
        float(e["epoch"]): e["scores"][metric] for e in run.events() if e["event"] == "test" and metric in e["scores"]
    }
    if run.result.exists() and metric in (result := read_json(run.result))["scores"]:
        points[float(result["kept_epoch"])] = result["scores"][metric]
    epochs = sorted(points)
    return epochs, [points[epoch] for epoch in epochs]


def draw_scores(runs: dict[str, RunFolder], path: Path, metrics: Sequence[str] = ("R@1", "MAP@R")) -> Path | None:
    """Test scores over epochs, a curve a run; None where no run has any of the metrics."""
    curves = {m: {name: score_curve(run, m) for name, run in runs.items()} for m in metrics}
    shown = [m for m in metrics if any(epochs for epochs, _ in curves[m].values())]
    if not shown:
        return None
    few = all(len(epochs) < 3 for epochs, _ in curves[shown[0]].values())
    hint = " (train with --evaluate-every 1 for more points)" if few else ""
    with styled():
        figure, grid = panels(1, len(shown), side=3.6)
        figure.suptitle(f"Test score over epochs{hint}", fontsize=9, color=INK)
        for axes, metric in zip(grid[0], shown, strict=True):
            for number, (name, (epochs, values)) in enumerate(curves[metric].items()):
                axes.plot(epochs, values, label=name, markersize=4, linewidth=1.3, **look(number))
            axes.set(xlabel="epoch", ylabel=f"{metric} on unseen classes, percent")
            axes.legend(fontsize=8, loc="lower right")
    return save(figure, path)
