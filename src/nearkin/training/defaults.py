"""Defaults that depend on the data: the network for its images, and a batch that its images can fill."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from nearkin.data.images import Dataset
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import backbone_settings, default_backbone
from nearkin.training.images import training_images
from nearkin.training.plan import Plan, make_plan

FEWEST = 16
"""The smallest default batch, if there are twice as many images."""


class FittedPlan(NamedTuple):
    """A plan whose defaults fit the data, and sentences on what was chosen."""

    plan: Plan
    notes: tuple[str, ...]


def fit_plan(settings: Mapping[str, Any], data: Dataset) -> FittedPlan:
    """Return the checked plan; a backbone or a batch that the settings leave out is chosen by the data."""
    notes = []
    name = settings.get("backbone", default_backbone(small_grey=data.small_grey))
    plan = make_plan(settings, {"backbone": name, **backbone_settings(name)})
    if "backbone" not in settings and name != Plan.backbone:
        notes.append(f"The network is {name}, because the images are photographs; backbone chooses another.")
    if "batch" not in settings:
        images, classes = _fewest_training_images(plan, data)
        batch = default_batch(plan, images, classes)
        if batch < plan.batch:
            notes.append(f"Batches of {batch} images instead of {plan.batch}, because {images} train.")
            plan = dataclasses.replace(plan, batch=batch)
    return FittedPlan(plan, tuple(notes))


def default_batch(plan: Plan, images: int, classes: int) -> int:
    """Return the default batch, or the largest smaller one with which an epoch has four steps, but not below FEWEST.

    It has at least two classes, and whole ones if the method needs several images of each.
    """
    most = max(images // 4, min(FEWEST, images // 2), 1)
    if plan.batch <= most:
        return plan.batch
    built = method(plan.method, classes=2, dim=2, space=plan.space or None)
    each = built.images_per_class if plan.images_per_class < 0 else plan.images_per_class
    return min(max(most // each, 2), classes) * each if each else most


def _fewest_training_images(plan: Plan, data: Dataset) -> tuple[int, int]:
    """Return the number of images that train, and of their classes; with folds, of the smallest one."""
    folds = range(1, plan.folds + 1) if plan.folds and not plan.fold else (plan.fold,)
    trained = [training_images(dataclasses.replace(plan, fold=fold), data)[0] for fold in folds]
    return min(len(images) for images in trained), min(images.classes for images in trained)
