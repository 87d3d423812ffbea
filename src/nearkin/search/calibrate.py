"""The similarity from which two images may be taken for one class, chosen on classes that were not trained on.

All pairs of calibration images are ordered by similarity, and the threshold is the lowest one at which, of the pairs at
least as similar, the part asked for (the precision) is of one class. That part holds for a collection like the
calibration images: the more classes an index has, the more strangers there are for every kin, and the lower it gets.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.data.splits import sample_fraction
from nearkin.errors import NearkinError
from nearkin.files import Json, provenance, write_json
from nearkin.space import Space
from nearkin.training.images import open_images
from nearkin.training.model import Model, load

MOST = 4000  # images: eight million pairs
EVIDENCE = 20  # pairs above a threshold, below which its precision is luck
FILE = "threshold.json"

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


class Operating(NamedTuple):
    """What a threshold does to some pairs."""

    similarity: float
    precision: float  # of the pairs at least as similar, the part of one class
    recall: float  # of the pairs of one class, the part at least as similar


def choose(s: Floats, kin: Mask, precision: float) -> Operating | None:
    """The lowest similarity of some pair at which the precision is reached, by pairs enough; None where it never is."""
    order = np.argsort(-s, kind="stable")
    s, hits = s[order], np.cumsum(kin[order])
    last = np.append(s[1:] != s[:-1], True)  # of equally similar pairs all count or none does
    reached = hits / np.arange(1, len(s) + 1)
    fine = np.flatnonzero(last & (reached >= precision))
    fine = fine[fine >= EVIDENCE - 1]
    if not len(fine):
        return None
    place = fine[-1]
    return Operating(float(s[place]), float(reached[place]), float(hits[place] / hits[-1]))


def apply(s: Floats, kin: Mask, similarity: float) -> Operating:
    """What a threshold that was chosen elsewhere does to these pairs."""
    above = s >= similarity
    hits = int(kin[above].sum())
    return Operating(similarity, hits / max(1, int(above.sum())), hits / max(1, int(kin.sum())))


def pairs(x: Tensor, labels: Tensor, space: Space) -> tuple[Floats, Mask]:
    """Similarity of every pair of embeddings, and whether the two are of one class."""
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
    """Choose a run's threshold and keep it in the run folder: on its held-out training classes, or on a data set.

    Of a data set all classes count whose names are not among those the model was trained on.
    """
    if not 0 < precision < 1:
        raise NearkinError(f"A precision is between 0 and 1, as 0.95, not {precision}.")
    model = load(run, device=device)
    images, source = _unseen(model, data)
    x, used = _embed(model, _sample(images), reporter or Reporter())
    s, kin = pairs(x, used.labels, model.embedder.space)
    found = choose(s, kin, precision)
    if found is None:
        raise NearkinError(
            f"No similarity makes {precision:.0%} of the pairs above it kin, on {source}: choose a lower --precision, "
            "or train a better model."
        )
    record: Json = {
        "similarity": found.similarity,
        "precision": precision,
        "reached": found.precision,
        "checked": _checked(x, used.labels, model.embedder.space, precision),
        "recall": found.recall,
        "classes": used.classes,
        "images": len(used),
        "pairs": len(s),
        "kin_pairs": int(kin.sum()),
        "on": source,
        "date": provenance()["date"],
    }
    write_json(Path(run) / FILE, record)
    return record


def _unseen(model: Model, data: str | None) -> tuple[Images, str]:
    """Images of classes that were not trained on, and what they are in words."""
    from nearkin.training.images import training_images

    plan = model.plan
    dataset = load_dataset(data or plan.data, halves=plan.halves)
    if data is None:
        held = training_images(plan, dataset)[1]
        images = None if held is None else _strangers([held], model)
        part = "chose the epoch that was kept" if plan.select == "validation" else "steered the training"
        what = f"held-out training classes of {plan.data}, which also {part}"
    else:
        images = _strangers([dataset.train, dataset.test], model)
        what = f"classes of {data} that were not trained on"
    if images is None or images.classes < 2 or int(images.counts.max()) < 2:
        hint = f"{data} has none" if data else "the run held none out, so name other images by --data folder:PATH"
        raise NearkinError(f"A threshold needs at least 2 classes that were not trained on, with kin in them: {hint}.")
    return images, what


def _strangers(parts: list[Images], model: Model) -> Images | None:
    """The images of all parts together whose classes the model was not trained on."""
    known = set(model.names)
    kept = [part.of_classes([c for c, name in enumerate(part.names) if name not in known]) for part in parts]
    kept = [part for part in kept if len(part)]
    if len(kept) < 2:
        return kept[0] if kept else None
    names = tuple(dict.fromkeys(name for part in kept for name in part.names))
    labels = [torch.tensor([names.index(name) for name in part.names])[part.labels] for part in kept]
    sources = [part.sources for part in kept]
    if isinstance(sources[0], Tensor):
        return Images(torch.cat([pixels for pixels in sources if isinstance(pixels, Tensor)]), torch.cat(labels), names)
    return Images([path for paths in sources for path in paths], torch.cat(labels), names)


def _sample(images: Images) -> Images:
    """All images, or so many of them as give pairs that can be counted, always the same ones."""
    if len(images) <= MOST:
        return images
    return sample_fraction(images, MOST / len(images), seed=0)


def _embed(model: Model, images: Images, reporter: Reporter) -> tuple[Tensor, Images]:
    store, good, _ = open_images(model, images, "calibration", reporter=reporter)
    with reporter.bar("embedding") as progress:
        return model.embed_store(store, progress=progress), good


def _checked(x: Tensor, labels: Tensor, space: Space, precision: float) -> float | None:
    """The precision on one half of the classes of the threshold that the other half chooses: the mean of both ways."""
    halves = [pairs(x[rows], labels[rows], space) for rows in (labels % 2 == 0, labels % 2 == 1)]
    reached = []
    for chosen_on, used_on in (halves, halves[::-1]):
        found = choose(*chosen_on, precision)
        if found is None or not used_on[1].any():
            return None
        reached.append(apply(*used_on, found.similarity).precision)
    return sum(reached) / 2
