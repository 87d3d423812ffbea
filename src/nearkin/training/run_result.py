"""The result of a run: what its training came to and what its model scores, in `result.json` and the model card."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nearkin.evaluation import Scores
from nearkin.files import Json, provenance, read_json, write_json
from nearkin.training.gain import Gain
from nearkin.training.images import OpenImages
from nearkin.training.model_card import write_card
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder
from nearkin.training.seen_classes import seen_classes


class Trained(NamedTuple):
    """What a training came to."""

    method: str
    kept_epoch: float
    steps: int
    seconds: float
    images_per_second: float | None  # over whole epochs after warm-up and compilation; None without one
    checks: Sequence[float]  # scores


def write_result(
    run: RunFolder,
    plan: Plan,
    trained: Trained,
    scores: Scores,
    before: Json,
    gain: Gain | None,
    *,
    opened: tuple[OpenImages, OpenImages | None, OpenImages | None],
    seen: Collection[str],
) -> None:
    """Write the result and the card; `before` are scores before training, `opened` training, held-out, test images.

    `seen` are the names of the classes that the network was trained on, here or in runs before.
    """
    *_, test = opened
    unreadable = [image for each in opened if each is not None for image in each.unreadable]
    speed = trained.images_per_second
    result: Json = {
        "scores": scores,
        "before": before,
        "queries": scores.queries,
        "left_out": scores.left_out,
        "test_classes": seen_classes(() if test is None else test.images.names, seen)._asdict(),
        "unreadable": [str(image) for image in unreadable],
        "select": plan.select,
        "kept_epoch": trained.kept_epoch,
        "method": trained.method,
        "seed": plan.seed,
        "steps": trained.steps,
        "seconds": round(trained.seconds, 1),
        "images_per_second": None if speed is None else round(speed, 1),
        **provenance(),
    }
    config = read_json(run.config)
    if expected := config.get("expected"):
        result["expected"] = expected
    if chosen := config.get("resolved", {}).get("test_view"):
        result["test_view"] = chosen
    if gain is not None:
        result["gain"] = gain._asdict()
    if trained.checks:
        result["held_out" if plan.select != "test" else "test_chosen"] = max(trained.checks)
    write_card(run, result)
    write_json(run.result, result)
