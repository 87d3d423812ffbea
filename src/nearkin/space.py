"""The spaces embeddings can live in, and the precision that similarities never fall below."""

import math
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.spec import nearest


class Space(StrEnum):
    """A geometry for embeddings, made from its name: `Space("cosine")`. It is a string, so files store the name.

    `norm_floor`: a vector is divided by its norm, or by this if the norm is smaller, so a zero vector stays zero with a
    bounded gradient; None leaves vectors unchanged. `by_distance`: the similarity is 1 − ‖x − v‖²/2, else x·v.
    `initial_norm`: mean embedding norm a network starts training with; None where the space fixes the norm.
    """

    norm_floor: float | None
    by_distance: bool
    initial_norm: float | None

    COSINE = "cosine", 1e-6, False, None
    BALL = "ball", 1.0, True, None
    BALL_INNER = "ball_inner", 1.0, False, None  # what CCP's authors call the cosine
    EUCLIDEAN = "euclidean", None, True, 11.0
    INNER = "inner", None, False, 4.0

    def __new__(
        cls, name: str, norm_floor: float | None = None, by_distance: bool = False, initial_norm: float | None = None
    ) -> Self:
        space = str.__new__(cls, name)
        space._value_ = name
        space.norm_floor, space.by_distance, space.initial_norm = norm_floor, by_distance, initial_norm
        return space

    @classmethod
    def _missing_(cls, value: object) -> None:
        names = [space.value for space in cls]
        raise NearkinError(f"There is no space {value!r}.{nearest(str(value), names)} There are: {', '.join(names)}.")

    @property
    def has_unit_norm(self) -> bool:
        """Whether all points have norm 1."""
        return self is Space.COSINE

    @property
    def is_monotone_in_distance(self) -> bool:
        """Whether d² = 2 − 2s, so that similarity and Euclidean distance give the same order."""
        return self.by_distance or self.has_unit_norm

    @property
    def ranked_in(self) -> "Space":
        """The space to measure and search in: by inner products the longest vectors would be near to everything."""
        return {Space.INNER: Space.COSINE, Space.BALL_INNER: Space.BALL}.get(self, self)

    def norm_limit(self, dtype: torch.dtype, *, factors: int) -> float:
        """Norm below which products of that many norms, and sums of them, do not overflow; infinite if projected."""
        dtype = dtype if dtype == torch.float64 else torch.float32
        limit: float = torch.finfo(dtype).max ** (0.8 / factors)
        return limit if self.norm_floor is None else math.inf

    def project(self, v: Tensor) -> Tensor:
        """Vectors as points of the space: unit vectors (cosine), v if ‖v‖ ≤ 1 else v/‖v‖ (both balls), or v itself."""
        v = at_least_float32(v)
        return v if self.norm_floor is None else v / norm(v).clamp_min(self.norm_floor)

    def pairwise(self, x: Tensor, v: Tensor) -> Tensor:
        """Similarity [B, R] of projected points x [B, D] and v [R, D]."""
        return self.similarity(x @ v.T, x, v)

    def similarity(self, products: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """Similarity [B, R] of projected points whose products x·v are known."""
        if not self.by_distance:
            return products
        return products + (1 - (x.square().sum(-1)[:, None] + v.square().sum(-1)) / 2)

    def rowwise(self, x: Tensor, v: Tensor) -> Tensor:
        """Similarity [N] of each projected point x [N, D] with the point v of the same row."""
        return 1 - (x - v).square().sum(-1) / 2 if self.by_distance else (x * v).sum(-1)


def norm(v: Tensor) -> Tensor:
    """Euclidean norms [..., 1] of vectors [..., D]."""
    out: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return out


def at_least_float32(v: Tensor) -> Tensor:
    """Raise lower precision to float32; float64 stays."""
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def full_precision(v: Tensor) -> torch.autocast:
    """A context in which products of matrices keep their precision, also inside a user's autocast."""
    return torch.autocast(v.device.type, enabled=False)
