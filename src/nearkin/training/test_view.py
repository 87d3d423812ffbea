"""The test view `auto`: choose the size at which test images are shown, and the share of them, on held-out classes.

Training crops enlarge what they show, so a network often tells more from test images that are shown larger than in
training. A run with held-out classes chooses by its final model. Any other first trains a model in a third of the
epochs without a quarter of the classes, chooses by that, and then trains on all of them. The test classes are never
looked at: the shorter training does not even have them.
"""

import dataclasses
import math
import shutil
from typing import Protocol

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.data.images import Dataset, counted
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.views import round_side, short_side_for
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json, write_json, write_tensors
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import Trunk, build_trunk, check_size
from nearkin.training.chosen_view import SquareView, describe_view, view_settings
from nearkin.training.defaults import default_batch
from nearkin.training.frozen import pixel_store
from nearkin.training.images import Embedded, OpenImages, embed_images, measure, open_images, training_images
from nearkin.training.model import Model, load
from nearkin.training.plan import Plan
from nearkin.training.run_config import remove_config, write_config
from nearkin.training.run_folder import RunFolder

LARGER = 4
"""Sizes that are tried: 7/7, 8/7, 9/7 and 10/7 of the training size, such as 224, 256, 288 and 320."""

ENLARGED = 5 / 3
"""The largest factor by which half of the held-out images may be enlarged."""

FEWEST = 4
"""The fewest held-out classes that can choose a view."""

PART = 3
"""The training that chooses takes a PART-th of the epochs."""


class TrainModel(Protocol):
    """A function that trains one model into a run folder, or resumes it."""

    def __call__(
        self, run: RunFolder, plan: Plan, *, data: Dataset, resume: bool, reporter: Reporter
    ) -> Embedded | None: ...


def candidate_views(size: int, store: Store, trunk: Trunk) -> list[SquareView]:
    """Return the views to try: that of the training size first, then larger ones, and such without a margin."""
    usual = SquareView(size, short_side_for(size))
    views = [usual]
    for side in _sizes(size):
        if side > size and not _takes(trunk, side):
            return views
        views += [SquareView(side, side + usual.short_side - size), SquareView(side, side)]
    sharp = ENLARGED * float(store.size.amin(1).float().median())
    return [view for view in dict.fromkeys(views) if view == usual or view.short_side <= sharp]


def _sizes(size: int) -> list[int]:
    """The training size and larger ones."""
    return list(dict.fromkeys(round_side(size, (7 + more) / 7) for more in range(LARGER)))


def _takes(trunk: Trunk, size: int) -> bool:
    try:
        check_size(trunk, size)
    except NearkinError:
        return False
    return True


def choose_view(model: Model, opened: OpenImages, by: str, *, reporter: Reporter) -> Json:
    """Show images of held-out classes in every view; leave the model with the best, and return what was found."""
    views = candidate_views(model.size, opened.store, model.embedder.trunk)
    scores = []
    for view in views:
        model.show(**view.settings)
        title = f"trying {view.size} px of {view.short_side}"
        embedded = embed_images(model, opened, reporter=reporter, title=title, over_ranks=True)
        found = measure(embedded, (by,), over_ranks=True)
        scores.append(ranks.broadcast(found[by]))
    best = views[scores.index(max(scores))]  # of equal scores the first, which is nearest to the training's
    model.show(**best.settings)
    tried = [[*view, round(score, 4)] for view, score in zip(views, scores, strict=True)]
    record = {**best._asdict(), "by": by, "classes": opened.images.classes, "scores": tried}
    reporter.note(f"Test images are shown at {describe_view(record)}.")
    return record


def choose_after_training(
    run: RunFolder, model: Model, held_out: OpenImages | None, by: str, *, about: Json, reporter: Reporter
) -> bool:
    """Choose the view by the final model of a run on its held-out classes; write it into the model's file and the run.

    Return whether there was a choice. `about` is what the model's file says besides.
    """
    if held_out is None or held_out.images.classes < FEWEST:
        reporter.note("Test images are shown as in training: too few classes are held out to choose a view.")
        return False
    record = choose_view(model, held_out._replace(store=pixel_store(held_out)), by, reporter=reporter)
    if ranks.is_first():
        write_tensors(run.model, model.embedder.state_dict(), about | model.record())
        config = read_json(run.config)
        shown = {"test_size": model.test_size, "test_short_side": model.short_side, "test_view": record}
        write_json(run.config, config | {"resolved": config.get("resolved", {}) | shown})
    ranks.barrier()  # others read the files
    return True


def choose_before_training(
    run: RunFolder, plan: Plan, data: Dataset, train_model: TrainModel, *, reporter: Reporter
) -> Plan:
    """Choose the view by a shorter training without a quarter of the classes; return the plan with that view.

    The choice is written into the settings of the run. If it was interrupted, it is continued.
    """
    if why := _no_choice(plan, data):
        reporter.note(f"Test images are shown as in training: {why}.")
        return dataclasses.replace(plan, test_view="given")
    kept, held = training_images(dataclasses.replace(plan, select="validation", fraction=1.0), data)
    assert held is not None
    part = RunFolder(run.path / "test-view")
    shorter = shorter_plan(plan, kept.classes, len(kept))
    example = method(plan.method, classes=2, dim=2, space=plan.space or None)
    about = {"method": str(example.spec), "space": example.ranked_in}
    if ranks.is_first():
        write_config(run, plan, **about)
    share = shorter.epochs * len(kept) / max(plan.last_epoch * len(data.train), 1)
    reporter.note(
        f"The test view is chosen first, by {counted(shorter.epochs, 'epoch', 'epochs')} without {held.classes} of "
        f"{data.train.classes} classes: about {share:.0%} of the training that follows."
    )
    own = dataclasses.replace(data, train=kept, test=held, notes=(), left_out=())
    try:
        if not ranks.broadcast(part.result.exists()):
            resume = ranks.broadcast(part.config.exists())
            part.path.mkdir(exist_ok=True)
            train_model(part, shorter, data=own, resume=resume, reporter=reporter)
    except NearkinError:
        if ranks.is_first() and not part.config.exists():
            remove_config(run)  # settings that cannot work leave no run behind
            shutil.rmtree(part.path)
        raise
    ranks.barrier()  # others read the files
    model = load(part.path, device=plan.device)
    record = choose_view(
        model, open_images(model, held, "held-out", reporter=reporter), plan.select_by, reporter=reporter
    )
    record["seconds"] = read_json(part.result)["seconds"]
    plan = dataclasses.replace(plan, **view_settings(record))
    if ranks.is_first():
        write_config(run, plan, **about, resolved={"test_view": record})
        shutil.rmtree(part.path)
    return plan


def _no_choice(plan: Plan, data: Dataset) -> str:
    """Why there is nothing to choose; empty if there is."""
    if round(plan.held_out * data.train.classes) < FEWEST:
        return f"{plan.held_out:.0%} of {counted(data.train.classes, 'class', 'classes')} are too few to choose a view"
    trunk = build_trunk(plan.backbone, weights="none", size=plan.size or None)
    if not any(_takes(trunk, size) for size in _sizes(trunk.size) if size > trunk.size):
        return "the network takes one size only"
    return ""


def shorter_plan(plan: Plan, classes: int, images: int) -> Plan:
    """Return the plan of the training that chooses: the same schedule in a third of the epochs."""
    epochs = math.ceil(plan.last_epoch / PART)
    return dataclasses.replace(
        plan,
        test_view="given",
        test="split",
        select="last",
        epochs=epochs,
        stop_after=0,
        decay_every=max(1, round(plan.decay_every / PART)),
        decay_at=",".join(str(min(math.ceil(epoch / PART), epochs)) for epoch in plan.decay_epochs),
        warmup=min(plan.warmup, epochs // 2),
        ramp=round(plan.ramp / PART),
        average_from=min(round(plan.average_from / PART), max(epochs - 1, 0)),
        batch=default_batch(plan, images, classes),
        evaluate_every=0,
        snapshots="",
        tensorboard=False,
    )
