"""The one kind of error a user can cause: a sentence that says what was wrong, where, and what to do."""

import math


class NearkinError(ValueError):
    """Wrong input, configuration or data. The command line prints it and exits with code 2."""


def above_zero(what: str, **options: float) -> None:
    """Refuse an option that is no finite number above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:  # NaN is neither
            raise NearkinError(f"{what}: {name} is a number above 0, not {value}.")


def zero_or_more(what: str, **options: float) -> None:
    """Refuse an option that is no finite number of at least 0."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise NearkinError(f"{what}: {name} is a number of at least 0, not {value}.")
