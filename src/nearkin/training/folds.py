"""Cross-validation over classes: each model holds out another block of the training classes.

The protocol of Musgrave, Belongie, Lim: A Metric Learning Reality Check (ECCV 2020), as CCP uses it. The training
classes are cut into n contiguous blocks. Model i trains on all blocks but i, whose MAP@R selects its epoch. All models
are tested on the classes of the other half. The folder is a run folder whose scores are of two kinds:

    "MAP@R"         the mean of the scores of the n models
    "MAP@R 512-d"   the score of their embeddings side by side
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from nearkin import ranks
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.files import Json, provenance, write_json
from nearkin.methods.catalogue import method
from nearkin.training.images import Embedded, measure
from nearkin.training.measure_run import embed_test
from nearkin.training.model_card import write_card
from nearkin.training.plan import Plan
from nearkin.training.run_config import remove_config, write_config
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric
from nearkin.training.seen_classes import seen_classes


def train_folds(
    run: RunFolder, plan: Plan, train_model: Callable[[RunFolder, Plan], Embedded | None], *, reporter: Reporter
) -> Embedded:
    """Train the model of every unfinished fold, measure all, and return the test set as they embed it together.

    `train_model(run, plan)` trains one model into a run folder, or resumes it.
    """
    parts = [RunFolder(run.path / f"fold-{number}") for number in range(1, plan.folds + 1)]
    example = method(plan.method, classes=2, dim=plan.dim, space=plan.space or None)
    names = [part.path.name for part in parts]
    if ranks.is_first():
        write_config(run, plan, method=str(example.spec), space=example.ranked_in, parts=names)
    try:
        for number, part in enumerate(parts, start=1):
            reporter.note(f"Fold {number} of {plan.folds}")
            if not ranks.broadcast(part.result.exists()):
                train_model(part, dataclasses.replace(plan, fold=number))
            if ranks.is_first():
                part.checkpoint.unlink(missing_ok=True)  # three times the size of the model, and no longer needed
    except NearkinError:
        if ranks.is_first() and not parts[0].config.exists():
            remove_config(run)  # settings that cannot work leave no run behind
        raise
    ranks.barrier()  # others read the files
    results = [part.read_result() for part in parts]
    embedded = embed_test(run.path, device=plan.device, reporter=reporter, over_ranks=True)
    scores = measure(embedded, plan.metrics, over_ranks=True)
    joint = {str(RunMetric(name, plan.dim * plan.folds)): value for name, value in scores.items()}
    tested = seen_classes(embedded.images.names, embedded.model.seen)  # by any of the models
    result = _combine(results, joint, plan) | {"test_classes": tested._asdict()}
    if ranks.is_first():
        write_card(run, result)
        write_json(run.result, result)
    return embedded


def _combine(results: Sequence[Json], joint: Mapping[str, float], plan: Plan) -> Json:
    """Combine the results of the folds into one, in the form of a single run's."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    def scores(which: str) -> dict[str, float]:
        return {name: mean([result[which][name] for result in results]) for name in results[0][which]}

    first, speeds = results[0], [r["images_per_second"] for r in results if r["images_per_second"]]
    per_fold = ("scores", "kept_epoch", "held_out", "steps", "seconds")
    return {
        "scores": scores("scores") | dict(joint),
        "before": scores("before"),
        **{name: first[name] for name in ("queries", "left_out", "unreadable", "select", "method")},
        "kept_epoch": mean([result["kept_epoch"] for result in results]),
        **({"held_out": mean([result["held_out"] for result in results])} if "held_out" in first else {}),
        "seed": plan.seed,
        "steps": round(mean([result["steps"] for result in results])),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "images_per_second": round(mean(speeds), 1) if speeds else None,
        "folds": [{name: result[name] for name in per_fold if name in result} for result in results],
        **provenance(),
    }
