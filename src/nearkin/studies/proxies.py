"""Pictures of a run's proxies over training: t-SNE maps, similarities with images, test scores, outliers.

`nearkin proxies RUN` draws the epochs that have a snapshot, at least the last one, beside baselines if any are given.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.methods.proxies import Proxies
from nearkin.report.charts import INK, PALETTE, curve_style, figure_style, panels, save_figure
from nearkin.report.maps import sample_per_class, tsne
from nearkin.report.measured_runs import score_curve
from nearkin.space import Space
from nearkin.spec import parse
from nearkin.studies.outliers import draw_outliers
from nearkin.training.checkpoint import Snapshot, kept_epochs, open_snapshot
from nearkin.training.images import OpenImages, open_images, plan_dataset, training_images
from nearkin.training.model import Model, embed_store
from nearkin.training.run_folder import RunFolder

STAR_COLOUR = "#10246b"
PANELS = 4  # epochs side by side, if none are named


@keep_images_open()
def draw_proxies(
    run: str | Path,
    *,
    out: str | Path | None = None,
    baselines: Sequence[str | Path] = (),
    epochs: Sequence[int] | None = None,
    points: int = 1000,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> list[Path]:
    """Write all pictures of a run, beside baselines if any are given, into a folder (default: RUN/pictures)."""
    reporter = reporter or Reporter()
    folder = RunFolder(run)
    where = Path(out) if out else folder.path / "pictures"
    runs = _by_name([folder, *map(RunFolder, baselines)])
    views = {
        name: embed_epochs(each, epochs=epochs, points=points, data=data, device=device, reporter=reporter)
        for name, each in runs.items()
    }
    written = [draw_maps(views, where / "tsne.png"), draw_similarities(views, where / "cosines.png")]
    if scores := draw_scores(runs, where / "scores.png"):
        written.append(scores)
    last = open_snapshot(folder, max(kept_epochs(folder)), data=data, device=device)
    opened = open_training(last.model, reporter=reporter)
    steps_per_epoch = read_json(folder.config)["resolved"]["steps_per_epoch"]
    return written + draw_outliers(last, opened, where, steps_per_epoch=steps_per_epoch)


def _by_name(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Runs by the name of their method, followed by the folder if two names are equal."""
    names = [parse(read_json(run.config)["plan"]["method"]).name for run in runs]
    alike = len(set(names)) < len(names)
    return {f"{name}, {run.path.name}" if alike else name: run for name, run in zip(names, runs, strict=True)}


def open_training(model: Model, *, reporter: Reporter) -> OpenImages:
    """Open the training images of a run, in the order of its row numbers."""
    plan = model.plan
    data = plan_dataset(plan)
    reporter.leave_out(data.left_out)
    images, _ = training_images(plan, data)
    return open_images(model, images, "training", reporter=reporter)


class EpochView(NamedTuple):
    """Some images after an epoch, as points of the space: training images with all proxies, or test images."""

    epoch: int
    trained: bool  # whether the classes are training classes; test classes have no proxies
    x: Tensor  # [P, D]
    labels: Tensor  # [P]
    proxies: Tensor  # [C·K, D]
    proxy_labels: Tensor  # [C·K]
    space: Space


def embed_view(snapshot: Snapshot, opened: OpenImages, *, points: int, trained: bool = True) -> EpochView:
    """Embed some images with the model of a snapshot, at least three per class."""
    model, proxies, space = snapshot.model, _proxies(snapshot), snapshot.method.space
    rows = sample_per_class(opened.images.labels, points=points, classes=max(1, points // 3), seed=0)
    x = embed_store(model.embedder, opened.store, model.view, index=rows, precision=model.plan.precision)
    count = len(proxies.labels) if trained else 0
    vectors, proxy_labels = space.project(proxies.vectors.detach()[:count]).cpu(), proxies.labels[:count].cpu()
    labels = opened.images.labels[rows]
    return EpochView(snapshot.epoch, trained, space.project(x).cpu(), labels, vectors, proxy_labels, space)


def _proxies(snapshot: Snapshot) -> Proxies:
    found = next((module for module in snapshot.method.modules() if isinstance(module, Proxies)), None)
    if found is None:
        raise NearkinError(f"{snapshot.method.spec.name} has no proxies to draw.")
    return found


def choose_epochs(run: RunFolder, wanted: Sequence[int] | None) -> list[int]:
    """The epochs to draw: those named, or a few spread evenly over the snapshots."""
    available = list(kept_epochs(run))
    if not available:
        raise NearkinError(
            f"{run.path} has no snapshot to draw: finish it with nearkin train --resume, or train with --snapshots."
        )
    if wanted is None:
        places = np.linspace(0, len(available) - 1, min(PANELS, len(available))).round().astype(int)
        return [available[place] for place in places]
    for epoch in wanted:
        if epoch not in available:
            raise NearkinError(
                f"{run.path} has no snapshot of epoch {epoch}: it has {', '.join(map(str, available))}. "
                "Name one of these, or train with --snapshots."
            )
    return list(wanted)


def embed_epochs(
    run: RunFolder, *, epochs: Sequence[int] | None, points: int, data: str | None, device: str, reporter: Reporter
) -> list[EpochView]:
    """Embed the same training images at each of the chosen epochs, and test images at the last one."""
    views: list[EpochView] = []
    for epoch in choose_epochs(run, epochs):
        snapshot = open_snapshot(run, epoch, data=data, device=device)
        reporter.note(f"Embedding images with the snapshot of epoch {epoch}")
        views.append(embed_view(snapshot, open_training(snapshot.model, reporter=reporter), points=points))
    plan = snapshot.model.plan
    test = plan_dataset(plan).test
    if not len(test):
        return views
    opened = open_images(snapshot.model, test, "test", reporter=reporter)
    return [*views, embed_view(snapshot, opened, points=points, trained=False)]


def _grid(
    runs: dict[str, list[EpochView]], *, side: float, heading: str
) -> tuple[Any, Any, list[tuple[Any, EpochView]]]:
    """One row of panels per run, one column per epoch: the figure, all panels, and the panels to draw in."""
    figure, grid = panels(len(runs), max(map(len, runs.values())), side=side)
    figure.suptitle(heading, fontsize=9, color=INK)
    pairs = []
    for row, (name, views) in zip(grid, runs.items(), strict=True):
        row[0].set_ylabel(name)
        for axes in row[len(views) :]:
            axes.axis("off")
        for axes, view in zip(row, views, strict=False):
            when = "before training" if view.epoch == 0 else f"epoch {view.epoch}"
            axes.set_title(when if view.trained else f"{when}, test classes", fontsize=8)
            axes.set(xticks=(), yticks=())
            axes.grid(visible=False)
            pairs.append((axes, view))
    return figure, grid, pairs


def draw_maps(runs: dict[str, list[EpochView]], path: Path) -> Path:
    """t-SNE of images together with the proxies of their classes."""
    heading = "t-SNE of images (dots, coloured by class) and proxies (stars)"
    with figure_style():
        figure, _, pairs = _grid(runs, side=3.2, heading=heading)
        for axes, view in pairs:
            shown = torch.isin(view.proxy_labels, view.labels)
            positions = tsne(torch.cat([view.x, view.proxies[shown]]).double().numpy())
            count = len(view.x)
            colours = [PALETTE[c % len(PALETTE)] for c in view.labels.tolist()]
            axes.scatter(*positions[:count].T, s=5, c=colours, linewidths=0)
            axes.scatter(*positions[count:].T, s=30, marker="*", c=STAR_COLOUR, edgecolors="white", linewidths=0.4)
    return save_figure(figure, path)


def proxy_similarities(view: EpochView, *, per_class: int = 3, classes: int = 100) -> Tensor:
    """Similarities of some images of each class (rows) with the proxies (columns), both sorted by class."""
    kept = torch.unique(view.labels)[:classes]
    rows = torch.cat([(view.labels == c).nonzero().flatten()[:per_class] for c in kept])
    return view.space.pairwise(view.x[rows], view.proxies[torch.isin(view.proxy_labels, kept)])


def draw_similarities(runs: dict[str, list[EpochView]], path: Path) -> Path:
    """Heat maps of the similarities of training images with proxies."""
    heading = "Similarity of training images (rows, three per class) with proxies (columns), sorted by class"
    trained = {name: [view for view in views if view.trained] for name, views in runs.items()}
    with figure_style():
        figure, grid, pairs = _grid(trained, side=2.6, heading=heading)
        for axes, view in pairs:
            drawn = axes.imshow(
                proxy_similarities(view).numpy(), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
            )
        figure.colorbar(drawn, ax=grid, shrink=0.8)
    return save_figure(figure, path)


def draw_scores(runs: dict[str, RunFolder], path: Path, metrics: Sequence[str] = ("R@1", "MAP@R")) -> Path | None:
    """Test scores over epochs, one curve per run; None if no run has any of the metrics."""
    results = {name: run.read_result() if run.result.exists() else {} for name, run in runs.items()}
    curves = {m: {name: score_curve(run.events(), results[name], m) for name, run in runs.items()} for m in metrics}
    shown = [m for m in metrics if any(epochs for epochs, _ in curves[m].values())]
    if not shown:
        return None
    few = all(len(epochs) < 3 for epochs, _ in curves[shown[0]].values())
    hint = " (train with --evaluate-every 1 for more points)" if few else ""
    with figure_style():
        figure, grid = panels(1, len(shown), side=3.6)
        figure.suptitle(f"Test score over epochs{hint}", fontsize=9, color=INK)
        for axes, metric in zip(grid[0], shown, strict=True):
            for number, (name, (epochs, values)) in enumerate(curves[metric].items()):
                axes.plot(epochs, values, label=name, markersize=4, linewidth=1.3, **curve_style(number))
            axes.set(xlabel="epoch", ylabel=f"{metric} on test classes, percent")
            axes.legend(fontsize=8, loc="lower right")
    return save_figure(figure, path)
