"""The names of a run's scores.

"MAP@R"                     in the run's own test view
"MAP@R at 288 of 320"       with test images shown as squares of 288 from a short side of 320
"MAP@R 512-d"               of the joint embeddings of several models
"""

import re
from typing import NamedTuple

from nearkin.training.chosen_view import SquareView

_NAME = re.compile(r"(\S+)(?: (\d+)-d)?(?: at (\d+) of (\d+))?")


class RunMetric(NamedTuple):
    """A metric of a run; with `joint_dim`, of its models' embeddings side by side, which have that dimension."""

    metric: str
    joint_dim: int = 0
    view: SquareView | None = None  # None: the run's own

    @classmethod
    def parse(cls, text: str) -> "RunMetric":
        """Read a name such as "MAP@R", "MAP@R 512-d" or "MAP@R at 288 of 320"."""
        found = _NAME.fullmatch(text)
        if found is None:
            return cls(text)
        view = SquareView(int(found[3]), int(found[4])) if found[3] else None
        return cls(found[1], int(found[2] or 0), view)

    @property
    def plain(self) -> bool:
        """Whether it is of a single model in its own test view."""
        return not self.joint_dim and self.view is None

    def __str__(self) -> str:
        dim = f" {self.joint_dim}-d" if self.joint_dim else ""
        return f"{self.metric}{dim}" + (f" at {self.view.size} of {self.view.short_side}" if self.view else "")
