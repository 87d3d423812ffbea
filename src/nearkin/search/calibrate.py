"""The similarity threshold above which two images are taken for the same class, chosen on classes not trained on.

The threshold is the lowest similarity at which the wanted fraction (the precision) of all pairs at least as similar is
of the same class. The precision holds for a collection like the calibration images: with more classes in an index there
are more negatives per positive, and the precision drops.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.data.splits import sample_fraction
from nearkin.errors import NearkinError
from nearkin.files import Json, provenance, write_json
from nearkin.space import Space
from nearkin.training.images import open_images, plan_dataset, training_images
from nearkin.training.model import Model, load
from nearkin.training.moved_data import find_data
from nearkin.training.run_folder import RunFolder

MAX_IMAGES = 4000  # eight million pairs
MIN_PAIRS = 20  # above a threshold; with fewer, its precision is chance
FILE = "threshold.json"

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


class OperatingPoint(NamedTuple):
    """A threshold with its precision and recall."""

    similarity: float
    precision: float  # fraction of the pairs at least as similar that are positive
    recall: float  # fraction of the positive pairs that are at least as similar


def choose(s: Floats, positive: Mask, precision: float) -> OperatingPoint | None:
    """The lowest threshold that reaches the precision on at least MIN_PAIRS pairs, or None."""
    order = np.argsort(-s, kind="stable")
    s, hits = s[order], np.cumsum(positive[order])
    last = np.append(s[1:] != s[:-1], True)  # equally similar pairs count together
    reached = hits / np.arange(1, len(s) + 1)
    fine = np.flatnonzero(last & (reached >= precision))
    fine = fine[fine >= MIN_PAIRS - 1]
    if not len(fine):
        return None
    place = fine[-1]
    return OperatingPoint(float(s[place]), float(reached[place]), float(hits[place] / hits[-1]))


def apply(s: Floats, positive: Mask, similarity: float) -> OperatingPoint:
    """The precision and recall of a given threshold on these pairs."""
    above = s >= similarity
    hits = int(positive[above].sum())
    return OperatingPoint(similarity, hits / max(1, int(above.sum())), hits / max(1, int(positive.sum())))


def pairs(x: Tensor, labels: Tensor, space: Space) -> tuple[Floats, Mask]:
    """The similarity of every pair of embeddings, and whether both are of the same class."""
    points = space.project(x.float()).cpu()
    upper = np.triu_indices(len(points), k=1)
    return space.pairwise(points, points).numpy()[upper], (labels[:, None] == labels).cpu().numpy()[upper]


def calibrate(
    run: str | Path,
    *,
    data: str | None = None,
    precision: float = 0.95,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Json:
    """Choose a run's threshold and store it in the run folder.

    It is chosen on the held-out training classes, or on the classes of `data` that the model was not trained on.
    """
    if not 0 < precision < 1:
        raise NearkinError(f"The precision must be between 0 and 1, such as 0.95, not {precision}.")
    model = load(run, device=device)
    reporter = reporter or Reporter()
    images, source = _calibration_images(RunFolder(run), model, data, reporter)
    x, used = _embed(model, _sample(images), reporter)
    s, positive = pairs(x, used.labels, model.embedder.space)
    found = choose(s, positive, precision)
    if found is None:
        raise NearkinError(
            f"No threshold reaches {precision:.0%} precision on {source}: choose a lower --precision, or train a "
            "better model."
        )
    record: Json = {
        "similarity": found.similarity,
        "precision": precision,
        "reached": found.precision,
        "checked": _cross_checked(x, used.labels, model.embedder.space, precision),
        "recall": found.recall,
        "classes": used.classes,
        "images": len(used),
        "pairs": len(s),
        "positive_pairs": int(positive.sum()),
        "on": source,
        "date": provenance()["date"],
    }
    write_json(Path(run) / FILE, record)
    return record


def _calibration_images(run: RunFolder, model: Model, data: str | None, reporter: Reporter) -> tuple[Images, str]:
    """Images of classes that were not trained on, and a description of them."""
    plan = model.plan
    dataset = load_dataset(data, test="none") if data else plan_dataset(dataclasses.replace(plan, data=find_data(run)))
    reporter.leave_out(dataset.left_out)
    if data is None:
        held = training_images(plan, dataset)[1]
        images = None if held is None else _of_new_classes(held, model)
        use = "chose the epoch that was kept" if plan.select == "validation" else "steered the training"
        what = f"held-out training classes of {plan.data}, which also {use}"
    else:
        images = _of_new_classes(dataset.train, model)
        what = f"classes of {data} that were not trained on"
    if images is None or images.classes < 2 or int(images.counts.max()) < 2:
        hint = f"{data} has none" if data else "the run held none out, so pass other images with --data folder:PATH"
        raise NearkinError(f"A threshold needs at least 2 classes that were not trained on, one with 2 images: {hint}.")
    return images, what


def _of_new_classes(images: Images, model: Model) -> Images | None:
    """The images whose classes the model was not trained on."""
    trained = model.seen
    new = [c for c, name in enumerate(images.names) if name not in trained]
    return images.of_classes(new) if new else None


def _sample(images: Images) -> Images:
    """At most MAX_IMAGES images, always the same ones."""
    return images if len(images) <= MAX_IMAGES else sample_fraction(images, MAX_IMAGES / len(images), seed=0)


def _embed(model: Model, images: Images, reporter: Reporter) -> tuple[Tensor, Images]:
    store, good, _ = open_images(model, images, "calibration", reporter=reporter)
    with reporter.bar("embedding") as progress:
        return model.embed_store(store, progress=progress), good


def _cross_checked(x: Tensor, labels: Tensor, space: Space, precision: float) -> float | None:
    """The precision on one half of the classes of a threshold chosen on the other half; the mean of both ways."""
    halves = [pairs(x[rows], labels[rows], space) for rows in (labels % 2 == 0, labels % 2 == 1)]
    reached = []
    for chosen_on, used_on in (halves, halves[::-1]):
        found = choose(*chosen_on, precision)
        if found is None or not used_on[1].any():
            return None
        reached.append(apply(*used_on, found.similarity).precision)
    return sum(reached) / 2
