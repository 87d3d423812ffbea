"""Shared by the scripts that choose settings: train without a quarter of the training classes, measure on that quarter.

The test half is not read. This is what `--test-view auto` does before a training.
"""

import dataclasses
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from nearkin.console import Reporter
from nearkin.data.images import Dataset
from nearkin.files import Json
from nearkin.training.images import embed_images, measure, open_images, training_images
from nearkin.training.launch import train_model
from nearkin.training.model import load
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.test_view import choose_view, shorter_plan


def train_held_out(
    plan: Plan,
    data: Dataset,
    *,
    by: str,
    metrics: Sequence[str] = (),
    shorter: bool = False,
    block: tuple[int, int] = (3, 4),
    reporter: Reporter,
) -> Json:
    """Train once; return the test view that is best by a metric, and the metrics in the training's view and in that.

    `shorter` trains a third of the epochs; `block` is the part of the classes to hold out, and of how many.
    """
    fold, folds = block
    kept, held = training_images(dataclasses.replace(plan, select="validation", fold=fold + 1, folds=folds), data)
    assert held is not None
    plan = dataclasses.replace(plan, select="last", test_view="given", fraction=1.0)
    if shorter:
        plan = shorter_plan(plan, kept.classes, len(kept))
    plan = dataclasses.replace(plan, warmup=min(plan.warmup, plan.epochs // 2))
    own = dataclasses.replace(data, train=kept, test=held, notes=(), left_out=())
    with TemporaryDirectory() as folder:
        run = RunFolder(folder)
        train_model(run, plan, data=own, resume=False, reporter=reporter)
        model, speed = load(run, device=plan.device), run.read_result()["images_per_second"]
        opened = open_images(model, held, "held-out", reporter=reporter)
        scores = {}
        usual = model.test_size, model.short_side
        if metrics:
            scores |= _scores(measure(embed_images(model, opened, reporter=reporter), metrics), usual)
        view = choose_view(model, opened, by, reporter=reporter)
        chosen = model.test_size, model.short_side
        if metrics and chosen != usual:
            scores |= _scores(measure(embed_images(model, opened, reporter=reporter), metrics), chosen)
    about = {"epochs": plan.epochs, "images": len(held), "images_per_second": speed}
    return {"view": view, "scores": scores, "best": f"{chosen[0]} of {chosen[1]}"} | about


def _scores(scores: Json, view: tuple[int, int]) -> Json:
    return {f"{name} at {view[0]} of {view[1]}": round(value, 3) for name, value in scores.items()}
