"""The error and the warning a user can cause: sentences that say what is wrong, where, and what to do."""

import math


class NearkinError(ValueError):
    """Wrong input, configuration or data. The command line prints it and exits with code 2."""


class LoopWarning(UserWarning):
    """A training loop leaves out what a method needs to work as published; the text says what to add."""


def above_zero(what: str, **options: float) -> None:
    """Raise an error unless every option is a finite number above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:  # NaN is neither
            raise NearkinError(f"{what}: {name} must be a number above 0, not {value}.")


def zero_or_more(what: str, **options: float) -> None:
    """Raise an error unless every option is a finite number of at least 0."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise NearkinError(f"{what}: {name} must be a number of at least 0, not {value}.")


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, or its type if it has no text."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
