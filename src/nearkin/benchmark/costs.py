"""What a run costs, estimated from finished runs, or from the images per second that a machine trains."""

from collections.abc import Iterable, Mapping, Sequence

from nearkin.files import Json

EXACT = ("data", "backbone", "size", "fraction", "folds", "batch", "check_every")
ROUGH = EXACT[:5]
"""Settings that decide most of the time of an epoch, and those of them that decide most of it."""

EMBEDDING = 1 / 3
"""The time to embed an image, as a part of that to train on it."""


def seconds_per_epoch(records: Iterable[Json], settings: Json, same: Sequence[str], *, hardware: str = "") -> float:
    """Of the fastest of these runs with the same of these settings, on this machine if it is named; 0 without any.

    The fastest, since the first run of a process also reads images and compiles.
    """
    rates = [
        float(record["wall"]) / int(record["settings"]["epochs"])
        for record in records
        if record.get("wall")
        and record["settings"]["epochs"]
        and hardware in ("", record["hardware"])
        and all(record["settings"].get(name) == settings.get(name) for name in same)
    ]
    return min(rates, default=0.0)


def alike_per_epoch(records: Mapping[str, Json], settings: Json, *, hardware: str = "") -> float:
    """The seconds per epoch of the runs that are most like this one; 0 without any."""
    found = (seconds_per_epoch(records.values(), settings, same, hardware=hardware) for same in (EXACT, ROUGH))
    return next((seconds for seconds in found if seconds), 0.0)


def images_per_epoch(settings: Json, train: int) -> float:
    """The work of an epoch, in images trained on, given the size of the training set; checks are counted as well."""
    folds, held_out = int(settings["folds"]), 0.0
    if folds:
        held_out = 1 / folds
    elif settings["select"] == "validation" or settings["patience"] or settings["schedule"] == "plateau":
        held_out = float(settings["held_out"])
    used = train * float(settings["fraction"]) * (1 - held_out)
    steps = used / settings["batch"]
    checks = steps / settings["check_every"] if settings["check_every"] else 1.0
    return max(folds, 1) * (used + checks * train * held_out * EMBEDDING)
