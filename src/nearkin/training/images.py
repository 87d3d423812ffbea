"""The images of a run: which ones train, and how they are opened, embedded and measured."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Dataset, Images
from nearkin.data.pixels.decode import Storage
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.data.pixels.open import GIB, describe_left_out, estimated_bytes, free_memory, open_store
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.views import short_side_for
from nearkin.data.splits import held_out, sample_fraction
from nearkin.evaluation import Scores, evaluate_under, protocol_of
from nearkin.files import cache_dir
from nearkin.networks.backbones import backbone_row
from nearkin.training.model import Model
from nearkin.training.plan import Plan


class OpenImages(NamedTuple):
    """Images that were opened, with their pixels."""

    store: Store
    images: Images  # those that can be read, in the order of the store
    unreadable: list[BadImage]


class Embedded(NamedTuple):
    """Images with their embeddings, and the model that made them."""

    x: Tensor
    images: Images
    model: Model


def plan_dataset(plan: Plan) -> Dataset:
    """Open the data set of a plan, split as the plan says."""
    return load_dataset(plan.data, halves=plan.halves, test=plan.test)


def training_images(plan: Plan, data: Dataset) -> tuple[Images, Images | None]:
    """Return the images a run trains on, and those of its held-out classes if it needs any.

    Held-out classes stand in for the test classes, so their images are as large as those usually are.
    """
    train = sample_fraction(data.train, plan.fraction, seed=plan.seed)
    if not plan.needs_held_out:
        return train, None
    block = (plan.fold - 1, plan.folds) if plan.folds else None
    train, validation = held_out(train, fraction=plan.held_out, fold=block)
    return train, dataclasses.replace(validation, at_most=data.test_short_side)


STORED = 2.0
"""The largest short side at which images are kept, as a multiple of the network's size, if memory allows."""


def with_storage(plan: Plan, data: Dataset, *, reporter: Reporter) -> Plan:
    """Return the plan with the setting `stored` filled in: as large as images are of use, if memory allows."""
    if plan.stored:
        return plan
    row = backbone_row(plan.backbone)
    size = plan.size or row.size
    largest = Storage(round(STORED * size), enlarge=False)
    parts = (data.train, data.test)
    wanted = sum(estimated_bytes(part, storage=largest, channels=row.channels) for part in parts)
    if wanted <= max(free_memory(torch.device(plan.device)), free_memory(torch.device("cpu"))):
        return dataclasses.replace(plan, stored=STORED)
    reporter.note(
        f"Images at a short side of {largest.short_side} would take about {wanted / GIB:,.0f} GiB, more than there is: "
        f"they are kept at {short_side_for(size)} (--stored {STORED:g} reads larger ones from their files every time)."
    )
    return dataclasses.replace(plan, stored=short_side_for(size) / size)


def open_images(model: Model, images: Images, what: str, *, reporter: Reporter) -> OpenImages:
    """Open images at the size a model needs; report those that cannot be read. `what` is "training", "test", …"""
    storage = model.storage
    if images.at_most and not storage.enlarge:
        storage = storage._replace(short_side=min(storage.short_side, images.at_most))
    with reporter.bar(f"reading {what} images") as progress, ranks.first_on_machine():
        store, good, bad = open_store(
            images,
            **storage._asdict(),
            channels=model.embedder.trunk.channels,
            device=model.device,
            cache=cache_dir(),
            progress=progress,
        )
    if bad:
        reporter.note(describe_left_out(bad, images, what))
        reporter.leave_out(image.left_out for image in bad)
    return OpenImages(store, good, bad)


def embed_images(
    model: Model, opened: OpenImages, *, reporter: Reporter, title: str = "embedding", over_ranks: bool = False
) -> Embedded:
    """Embed opened images under a progress bar; with `over_ranks` all processes call it and share the work."""
    with reporter.bar(title) as progress:
        x = model.embed_store(opened.store, progress=progress, over_ranks=over_ranks)
        return Embedded(x, opened.images, model)


def measure(embedded: Embedded, metrics: Sequence[str], *, over_ranks: bool = False) -> Scores:
    """Score embedded images under their protocol, in the space their model is measured in; `over_ranks` as above."""
    x, images, model = embedded
    labels, seed = images.labels.to(x.device), model.plan.seed
    return evaluate_under(
        protocol_of(images), x, labels, metrics=metrics, space=model.space, seed=seed, over_ranks=over_ranks
    )
