"""TODO."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.spec import nearest

Space = Literal["cosine", "ball", "euclidean", "inner"]
SPACES: tuple[Space, ...] = get_args(Space)


def check_space(space: str) -> Space:
    """The space's name, or a sentence that lists the three."""
    for known in SPACES:
        if space == known:
            return known
    raise NearkinError(f"There is no space {space!r}.{nearest(space, SPACES)} There are: {', '.join(SPACES)}.")


def at_least_float32(v: Tensor) -> Tensor:
    """Lower precision is raised to float32, float64 stays: similarities and state are never below float32."""
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def never_lower(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a module's `.half()` or `.bfloat16()` applies to its state, with the precision left: the device follows."""

    def keep(t: Tensor) -> Tensor:
        out = fn(t)
        low = out.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
        return t.to(out.device) if low else out

    return keep


# A vector is divided by its norm, or by this where that is smaller: a zero vector stays zero, with a bounded gradient.
_FLOOR: dict[Space, float] = {"cosine": 1e-6, "ball": 1.0}


def project(v: Tensor, space: Space) -> Tensor:
    """The vectors as points of the space: unit vectors (cosine), v if ‖v‖ ≤ 1 else v/‖v‖ (ball), else v itself."""
    v = at_least_float32(v)
    return v / _norm(v).clamp_min(_FLOOR[space]) if space in _FLOOR else v


def keeps_length(space: Space) -> bool:
    """Whether a vector of any length is a point of the space: there the scale of a network's output matters."""
    return space not in _FLOOR


def _norm(v: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return norm


def pairwise(x: Tensor, v: Tensor, space: Space) -> Tensor:
    """Similarity [B, R] of projected points: x·v (cosine, inner), or 1 − ‖x − v‖²/2, so that d² = 2 − 2s as there."""
    return _similarity(x @ v.T, x, v, space)


def _similarity(products: Tensor, x: Tensor, v: Tensor, space: Space) -> Tensor:
    if space in ("cosine", "inner"):
        return products
    return products + (1 - (x.square().sum(-1)[:, None] + v.square().sum(-1)) / 2)
