"""Pictures of Proxy-ISA's view of its training set: decay functions, class hardness, images filtered as outliers.

An image that is filtered in many epochs lies far from the proxy of its class: it is hard, or its label is wrong.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.files import atomic_file
from nearkin.methods.strategies import proxy_isa as isa
from nearkin.methods.strategies.proxy_isa import ProxyISA
from nearkin.report.charts import INK, PALETTE, figure_style, panels, save_figure
from nearkin.report.picture_sheets import RIGHT, WRONG, Frame, Picture, contact_sheet, save_sheet
from nearkin.training.checkpoint import Snapshot
from nearkin.training.images import OpenImages
from nearkin.training.model import embed_store

NAMED = 5  # hardest and easiest classes that are named
EXAMPLES = 3  # images shown of a class
ROWS = 12  # of the picture sheet


def draw_outliers(snapshot: Snapshot, opened: OpenImages, out: Path, *, steps_per_epoch: int) -> list[Path]:
    """Write all pictures into a folder; none for another method, no sheet if no image was filtered."""
    if not isinstance(snapshot.method, ProxyISA):
        return []
    written = [draw_decay(snapshot.method, out / "decay.png")]
    written.append(
        draw_hardness(snapshot.method, snapshot.model.names, out / "hardness.png", steps_per_epoch=steps_per_epoch)
    )
    found = filtered_images(snapshot, opened, steps_per_epoch=steps_per_epoch)
    written.append(write_filtered(found, opened, out / "filtered.csv"))
    if len(found.rows):
        written.append(draw_filtered(found, snapshot, opened, out / "filtered.png"))
    return written


def draw_decay(method: ProxyISA, path: Path) -> Path:
    """σ_n, ν_n and 1/E_n over the number of samples, with the median number that classes have reached."""
    V, tau = method.settings["V"], method.settings["tau"]
    n = torch.arange(0, max(int(5 * V), int(method.seen.max()) + 1), max(1, int(V / 50)), dtype=torch.float64)
    E = isa.effective_number(n, V=V)
    nu = isa.lower_bound(E)
    curves = {
        "σ: positives, as proposed": isa.decay(E, nu, V=V, tau=tau),
        "ν: positives, lower bound": nu,
        "1/E: negatives": 1 / E.clamp_min(1),
    }
    median = float(method.seen.double().median())
    with figure_style():
        figure, grid = panels(1, 1, side=4.2)
        axes = grid[0][0]
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(n.numpy(), values.numpy(), label=name, linewidth=1.6, color=PALETTE[number])
        axes.axvline(median, linestyle=":", linewidth=1, color=INK, label=f"median class now: {median:,.0f}")
        axes.set(xlabel="samples of the class seen, n", ylabel="weight", ylim=(0, 1.05))
        axes.set_title(f"Decay functions, V = {V:g}, τ = {tau:g}", fontsize=9)
        axes.legend(fontsize=8)
    return save_figure(figure, path)


def draw_hardness(method: ProxyISA, names: tuple[str, ...], path: Path, *, steps_per_epoch: int) -> Path:
    """1 − h·S_avg of every class over the epochs; the classes that end hardest and easiest are named."""
    epochs = (method.checks / steps_per_epoch).tolist()
    values = (1 - method.settings["h"] * method.history).cpu()
    order = values[-1].argsort(descending=True).tolist()
    few = min(NAMED, len(order) // 2)
    ends = ((order[:few], PALETTE[1], "hard"), (order[len(order) - few :], PALETTE[0], "easy"))
    with figure_style():
        figure, grid = panels(1, 1, side=4.2)
        figure.set_size_inches(7.6, 4.2)
        axes = grid[0][0]
        axes.plot(epochs, values.numpy(), linewidth=0.4, color="#bbbbbb")
        axes.plot(epochs, values.median(dim=1).values.numpy(), linewidth=2, color=INK, label="median class")
        for chosen, colour, what in ends:
            for dashes, c in zip(("-", "--", "-.", ":", (0, (1, 3))), chosen, strict=False):
                name = f"{what}: {names[c]}"
                axes.plot(epochs, values[:, c].numpy(), linewidth=1.1, color=colour, linestyle=dashes, label=name[:44])
        axes.set(xlabel="epoch", ylabel=f"class hardness 1 − h·S_avg, h = {method.settings['h']:g}")
        axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title("Hardness of the training classes", fontsize=9)
    return save_figure(figure, path)


class Filtered(NamedTuple):
    """Training images that were filtered, most often first."""

    rows: Tensor  # [F] of the training set
    times: Tensor  # [F] epochs in which an image was filtered
    epochs: int  # in which images could be filtered
    s: Tensor  # [F] similarity with the proxy of its class
    nearest: Tensor  # [F] class of the nearest proxy
    s_nearest: Tensor  # [F]


def filtered_images(snapshot: Snapshot, opened: OpenImages, *, steps_per_epoch: int) -> Filtered:
    """The images that Proxy-ISA filtered, how often, and the class whose proxy is nearest to each."""
    method = snapshot.method
    assert isinstance(method, ProxyISA)
    rows = method.filtered.cpu().nonzero().flatten()
    times = method.filtered.cpu()[rows]
    s = _similarities(snapshot, opened, rows)
    own_class = s.gather(1, opened.images.labels[rows][:, None]).squeeze(1)
    best = s.max(dim=1)
    order = torch.argsort(times.double() - own_class / 4, descending=True)  # among equals the farthest first
    epochs = max(0, int(method.steps) // steps_per_epoch - (method.filter_from - 1))
    return Filtered(rows[order], times[order], epochs, own_class[order], best.indices[order], best.values[order])


def _similarities(snapshot: Snapshot, opened: OpenImages, rows: Tensor) -> Tensor:
    """Similarities of some training images with all proxies [R, C]."""
    model, method = snapshot.model, snapshot.method
    assert isinstance(method, ProxyISA)
    vectors = method.space.project(method.proxies.vectors.detach())
    if not len(rows):
        return torch.empty(0, len(vectors))
    x = embed_store(model.embedder, opened.store, model.view, index=rows, precision=model.plan.precision)
    return method.space.pairwise(method.space.project(x), vectors).cpu()


def write_filtered(found: Filtered, opened: OpenImages, path: Path) -> Path:
    """Write all filtered images as CSV: the file or row, its class, how often, and the nearest class."""
    images = opened.images
    header = ("image", "class", "filtered", "of", "similarity", "nearest class", "its similarity")
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        columns = (found.rows, found.times, found.s, found.nearest, found.s_nearest)
        for row, times, s, nearest, s_nearest in zip(*(column.tolist() for column in columns), strict=True):
            name = f"row {row}" if isinstance(images.sources, Tensor) else images.sources[row]
            label = images.names[int(images.labels[row])]
            table.writerow((name, label, times, found.epochs, f"{s:.3f}", images.names[nearest], f"{s_nearest:.3f}"))
    return path


def draw_filtered(found: Filtered, snapshot: Snapshot, opened: OpenImages, path: Path, *, count: int = ROWS) -> Path:
    """The images filtered most often, each beside its class and, if it is another one, the nearest class."""
    images = opened.images
    pictures: list[Picture | None] = []
    captions: list[str] = []
    frames: list[Frame | None] = []
    labels: list[str] = []
    columns = (found.rows, found.times, found.nearest)
    for row, times, nearest in zip(*(column[:count].tolist() for column in columns), strict=True):
        label = int(images.labels[row])
        pictures.append(images.sources[row])
        captions.append(f"{times} of {found.epochs}")
        frames.append(WRONG)
        for c, words, frame in ((label, "its class", None), (nearest, "nearest class", RIGHT)):
            skip = words != "its class" and nearest == label
            examples = [] if skip else _examples(snapshot, opened, c, without=row)
            blank = EXAMPLES - len(examples)
            pictures += [None, *(images.sources[r] for r in examples), *[None] * blank]
            captions += ["", *[words] * len(examples), *[""] * blank]
            frames += [None, *[frame] * len(examples), *[None] * blank]
        beside = "" if nearest == label else f", nearest to {images.names[nearest]}"
        labels.append(f"labelled {images.names[label]}{beside}")
    title = f"Filtered as outliers: {len(found.rows)} of {len(images)} training images; in how many epochs"
    sheet = contact_sheet(
        pictures, captions=captions, frames=frames, row_labels=labels, title=title, columns=1 + 2 * (1 + EXAMPLES)
    )
    return save_sheet(sheet, path)


def _examples(snapshot: Snapshot, opened: OpenImages, c: int, *, without: int) -> list[int]:
    """Rows of the images of a class that lie nearest to its proxy, except `without`."""
    rows = (opened.images.labels == c).nonzero().flatten()
    rows = rows[rows != without]
    best: list[int] = rows[_similarities(snapshot, opened, rows)[:, c].argsort(descending=True)[:EXAMPLES]].tolist()
    return best
