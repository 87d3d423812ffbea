"""Pictures of what Proxy-ISA learnt about its training set: decay, hardness of the classes, and filtered images.

An image that is filtered epoch after epoch lies far from its class's proxy: hard, or labelled wrongly.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.files import whole_file
from nearkin.methods.strategies import proxy_isa as isa
from nearkin.methods.strategies.proxy_isa import ProxyISA
from nearkin.report.charts import INK, PALETTE
from nearkin.report.sheets import RIGHT, WRONG, Picture, contact_sheet
from nearkin.space import pairwise, project
from nearkin.studies.proxy_pictures import Part, panels, proxies_of, save, styled
from nearkin.training.checkpoint import Snapshot
from nearkin.training.model import embed_store

NAMED = 5  # classes at either end of the hardness that are picked out
TYPICAL = 3  # images that stand for a class
ROWS = 12  # of the picture sheet


def draw_decay(method: ProxyISA, path: Path) -> Path:
    """σ_n, ν_n and 1/E_n by the number of samples, and how many the classes have come to."""
    V, tau = method.settings["V"], method.settings["tau"]
    n = torch.arange(0, max(int(5 * V), int(method.seen.max()) + 1), max(1, int(V / 50)), dtype=torch.float64)
    E = isa.effective_number(n, V=V)
    nu = isa.lower_bound(E)
    curves = {
        "σ: positives, as proposed": isa.decay(E, nu, V=V, tau=tau),
        "ν: positives, the least": nu,
        "1/E: negatives": 1 / E.clamp_min(1),
    }
    middle = float(method.seen.double().median())
    with styled():
        figure, grid = panels(1, 1, side=4.2)
        axes = grid[0][0]
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(n.numpy(), values.numpy(), label=name, linewidth=1.6, color=PALETTE[number])
        axes.axvline(middle, linestyle=":", linewidth=1, color=INK, label=f"the median class now: {middle:,.0f}")
        axes.set(xlabel="samples of the class seen, n", ylabel="weight", ylim=(0, 1.05))
        axes.set_title(f"Decay functions, V = {V:g}, τ = {tau:g}", fontsize=9)
        axes.legend(fontsize=8)
    return save(figure, path)


def draw_hardness(snapshot: Snapshot, path: Path, *, per_epoch: int) -> Path:
    """1 − h·S_avg of every class over the epochs; the hardest and easiest in the end are named."""
    method = own(snapshot)
    epochs = (method.checks / per_epoch).tolist()
    values = (1 - method.settings["h"] * method.history).cpu()
    order = values[-1].argsort(descending=True).tolist()
    few = min(NAMED, len(order) // 2)
    ends = ((order[:few], PALETTE[1], "hard"), (order[len(order) - few :], PALETTE[0], "easy"))
    with styled():
        figure, grid = panels(1, 1, side=4.2)
        figure.set_size_inches(7.6, 4.2)
        axes = grid[0][0]
        axes.plot(epochs, values.numpy(), linewidth=0.4, color="#bbbbbb")
        axes.plot(epochs, values.median(dim=1).values.numpy(), linewidth=2, color=INK, label="median class")
        for chosen, colour, what in ends:
            for dashes, c in zip(("-", "--", "-.", ":", (0, (1, 3))), chosen, strict=False):
                name = f"{what}: {snapshot.model.names[c]}"
                axes.plot(epochs, values[:, c].numpy(), linewidth=1.1, color=colour, linestyle=dashes, label=name[:44])
        axes.set(xlabel="epoch", ylabel=f"class hardness 1 − h·S_avg, h = {method.settings['h']:g}")
        axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title("Hardness of the training classes", fontsize=9)
    return save(figure, path)


def own(snapshot: Snapshot) -> ProxyISA:
    """The snapshot's method, known to be Proxy-ISA."""
    assert isinstance(snapshot.method, ProxyISA)
    return snapshot.method


class Filtered(NamedTuple):
    """Training images that were filtered, most often first."""

    rows: Tensor  # [F] of the training set
    times: Tensor  # [F] how often
    chances: int  # epochs in which they could be
    s: Tensor  # [F] similarity with the own proxy
    nearest: Tensor  # [F] the class whose proxy is nearest
    s_nearest: Tensor  # [F]


def filtered_images(snapshot: Snapshot, part: Part, *, per_epoch: int) -> Filtered:
    """Which images were outliers, how often, and what else they look like to the model."""
    method = own(snapshot)
    rows = method.filtered.cpu().nonzero().flatten()
    times = method.filtered.cpu()[rows]
    s = similarities(snapshot, part, rows)
    mine = s.gather(1, part.images.labels[rows][:, None]).squeeze(1)
    best = s.max(dim=1)
    order = torch.argsort(times.double() - mine / 4, descending=True)  # of equals the farther first
    chances = max(0, int(method.steps) // per_epoch - (method.filter_from - 1))
    return Filtered(rows[order], times[order], chances, mine[order], best.indices[order], best.values[order])


def similarities(snapshot: Snapshot, part: Part, rows: Tensor) -> Tensor:
    """Of some training images with all proxies [R, C]."""
    model, space = snapshot.model, snapshot.method.space
    vectors = project(proxies_of(snapshot).vectors.detach(), space)
    if not len(rows):
        return torch.empty(0, len(vectors))
    x = embed_store(model.embedder, part.store, model.view, index=rows, precision=model.plan.precision)
    return pairwise(project(x, space), vectors, space).cpu()


def write_filtered(found: Filtered, part: Part, path: Path) -> Path:
    """All filtered images as a table: the file or row, its class, how often, and the class it is nearest to."""
    images = part.images
    header = ("image", "class", "filtered", "of", "similarity", "nearest class", "its similarity")
    with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        columns = (found.rows, found.times, found.s, found.nearest, found.s_nearest)
        for row, times, s, nearest, s_nearest in zip(*(column.tolist() for column in columns), strict=True):
            name = f"row {row}" if isinstance(images.sources, Tensor) else images.sources[row]
            label = images.names[int(images.labels[row])]
            table.writerow((name, label, times, found.chances, f"{s:.3f}", images.names[nearest], f"{s_nearest:.3f}"))
    return path


def draw_filtered(found: Filtered, snapshot: Snapshot, part: Part, path: Path, *, count: int = ROWS) -> Path:
    """The images filtered most often, each beside its own class and, where that is another one, the nearest class."""
    images = part.images
    pictures: list[Picture | None] = []
    captions: list[str] = []
    frames: list[str | None] = []
    labels: list[str] = []
    columns = (found.rows, found.times, found.nearest)
    for row, times, nearest in zip(*(column[:count].tolist() for column in columns), strict=True):
        label = int(images.labels[row])
        pictures.append(images.sources[row])
        captions.append(f"{times} of {found.chances}")
        frames.append(WRONG)
        for c, words, frame in ((label, "its class", None), (nearest, "nearest class", RIGHT)):
            typical = [] if words != "its class" and nearest == label else _typical(snapshot, part, c, without=row)
            blank = TYPICAL - len(typical)
            pictures += [None, *(images.sources[r] for r in typical), *[None] * blank]
            captions += ["", *[words] * len(typical), *[""] * blank]
            frames += [None, *[frame] * len(typical), *[None] * blank]
        beside = "" if nearest == label else f", nearest to {images.names[nearest]}"
        labels.append(f"labelled {images.names[label]}{beside}")
    title = f"Filtered as outliers: {len(found.rows)} of {len(images)} training images; in how many epochs"
    sheet = contact_sheet(
        pictures, captions=captions, frames=frames, row_labels=labels, title=title, columns=1 + 2 * (1 + TYPICAL)
    )
    with whole_file(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def _typical(snapshot: Snapshot, part: Part, c: int, *, without: int) -> list[int]:
    """Rows of the images of a class that lie nearest to its proxy, but for one."""
    rows = (part.images.labels == c).nonzero().flatten()
    rows = rows[rows != without]
    best: list[int] = rows[similarities(snapshot, part, rows)[:, c].argsort(descending=True)[:TYPICAL]].tolist()
    return best


def isa_pictures(snapshot: Snapshot, part: Part, out: Path, *, per_epoch: int) -> list[Path]:
    """All of them into a folder; none where the method is another one, no sheet where nothing was filtered."""
    if not isinstance(snapshot.method, ProxyISA):
        return []
    written = [draw_decay(snapshot.method, out / "decay.png")]
    written.append(draw_hardness(snapshot, out / "hardness.png", per_epoch=per_epoch))
    found = filtered_images(snapshot, part, per_epoch=per_epoch)
    written.append(write_filtered(found, part, out / "filtered.csv"))
    if len(found.rows):
        written.append(draw_filtered(found, snapshot, part, out / "filtered.png"))
    return written
