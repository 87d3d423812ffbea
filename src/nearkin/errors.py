"""The one kind of error a user can cause: a sentence that says what was wrong, where, and what to do."""


class NearkinError(ValueError):
    """Wrong input, configuration or data. The command line prints it and exits with code 2."""
