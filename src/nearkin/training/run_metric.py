"""The names of a run's scores: "MAP@R", or "MAP@R 512-d" for the joint embeddings of several models."""

import re
from typing import NamedTuple

_JOINT = re.compile(r"(\S+) (\d+)-d")


class RunMetric(NamedTuple):
    """A metric of a run; with `joint_dim`, of its models' embeddings side by side, which have that dimension."""

    metric: str
    joint_dim: int = 0

    @classmethod
    def parse(cls, text: str) -> "RunMetric":
        """Read a name such as "MAP@R" or "MAP@R 512-d"."""
        found = _JOINT.fullmatch(text)
        return cls(found[1], int(found[2])) if found else cls(text)

    def __str__(self) -> str:
        return f"{self.metric} {self.joint_dim}-d" if self.joint_dim else self.metric
