"""The scores that are expected of a model trained on all classes: those of an evaluated run with the same settings."""

from collections.abc import Mapping
from typing import Any

from nearkin.console import markdown_table, score_cells
from nearkin.data.images import counted
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_metric import RunMetric
from nearkin.training.seen_classes import SeenClasses


def expected_of(run: RunFolder) -> Json:
    """Return what an evaluated run lets expect of a model that is trained again on all classes."""
    result = run.read_result()
    if not result["scores"]:
        raise NearkinError(
            f"{run.path} has no scores of its own, since it trained on all classes: name a run that was evaluated."
        )
    first = (run.parts() or [run])[0]  # without the joint scores of several models: one is trained again
    return {
        "run": run.path.resolve().name,
        "scores": {name: value for name, value in result["scores"].items() if RunMetric.parse(name).plain},
        **{name: result[name] for name in ("queries", "left_out", "select", "kept_epoch")},
        "test_classes": result.get("test_classes"),
        "training_classes": read_json(first.config).get("resolved", {}).get("training_classes"),
    }


def describe_expected(expected: Mapping[str, Any]) -> str:
    """Say whose scores these are, in a few sentences."""
    trained = f" on {counted(expected['training_classes'], 'class', 'classes')}" if expected["training_classes"] else ""
    tested = SeenClasses(**expected["test_classes"]).title if expected["test_classes"] else "Test classes"
    chosen = " Its epoch was chosen on the test set, so they are too high." if expected["select"] == "test" else ""
    return (
        f"Expected, not measured on this model, which trained on all classes: the scores of the run {expected['run']}, "
        f"trained{trained} with the same settings. {tested}, percent; "
        f"{counted(expected['queries'], 'query', 'queries')}.{chosen}"
    )


def expected_table(expected: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of a table of the expected scores."""
    return score_cells({f"expected, of {expected['run']}": expected["scores"]})


def expected_markdown(expected: Mapping[str, Any]) -> str:
    """Return the expected scores with a description, in Markdown."""
    return f"{describe_expected(expected)}\n\n{markdown_table(*expected_table(expected))}\n"
