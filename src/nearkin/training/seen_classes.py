"""Which of the classes that a model is tested on it was trained on."""

from collections.abc import Collection
from typing import NamedTuple


class SeenClasses(NamedTuple):
    """How many classes a model is tested on, and how many of them it was trained on; classes are compared by name."""

    classes: int
    seen: int

    @property
    def title(self) -> str:
        """Return what scores on these classes are called: those of unseen classes only if none was seen."""
        if not self.seen:
            return "Unseen classes"
        many = "all" if self.seen == self.classes else f"{self.seen:,} of {self.classes:,}"
        return f"Test classes, {many} seen in training"

    def __str__(self) -> str:
        return f"{self.seen:,} of them training classes, by name" if self.seen else "none of them a training class"


def seen_classes(tested: Collection[str], trained: Collection[str]) -> SeenClasses:
    """Count the names of test classes that are also names of training classes."""
    return SeenClasses(len(tested), len(set(tested) & set(trained)))
