"""What a batch and its references must be: shapes, types, and values where reading them costs no device sync."""

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.relation import EMPTY, References
from nearkin.space import Space, at_least_float32, norm


def check_batch(
    x: Tensor, y: Tensor, classes: int | None = None, dim: int | None = None, space: Space = Space.COSINE
) -> None:
    """Check shapes and types of a batch, and the values of labels and norms if that needs no device sync."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise NearkinError(f"A method takes tensors; got {type(x).__name__} and {type(y).__name__}.")
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
        raise NearkinError(f"A method takes embeddings [B, D] and labels [B]; got {list(x.shape)} and {list(y.shape)}.")
    if dim is not None and x.shape[1] != dim:
        raise NearkinError(
            f"This method takes embeddings of {dim} dimensions, not {x.shape[1]}: build it with dim={x.shape[1]}."
        )
    if x.device != y.device:
        raise NearkinError(f"Embeddings are on {x.device} and labels on {y.device}: move them to one device.")
    if y.is_floating_point() or y.dtype == torch.bool:
        raise NearkinError(f"Labels are integers; got {y.dtype}: call labels.long().")
    if torch.compiler.is_compiling():  # the values would break the graph
        return
    if y.device.type == "cpu":
        first, last = (int(label) for label in y.long().aminmax())  # uint16 has no minimum
        if not 0 <= first <= last < (classes or float("inf")):
            limit = "" if classes is None else f" to {classes - 1} here"
            raise NearkinError(f"Labels run from 0{limit}; got {first} to {last}.")
    if x.device.type == "cpu" and space.norm_floor is None:
        longest, most = float(norm(at_least_float32(x.detach())).max()), space.norm_limit(x.dtype, factors=4)
        if not longest < most:  # nor is NaN
            raise NearkinError(
                f"In space {space.value} embedding norms must be below {most:.0e}; got {longest:.0e}: "
                "lower the learning rate, or use space=cosine."
            )


def check_references(references: References | tuple[Tensor, Tensor], x: Tensor) -> References:
    """References from a pair of vectors and labels, after a check of their shapes and types."""
    refs = references if isinstance(references, References) else References(*references)
    if refs.vectors.ndim != 2 or refs.labels.shape != refs.vectors.shape[:1] or refs.vectors.shape[1] != x.shape[1]:
        raise NearkinError(
            f"references are vectors [R, {x.shape[1]}] and labels [R]; got {list(refs.vectors.shape)} and "
            f"{list(refs.labels.shape)}."
        )
    if refs.labels.is_floating_point() or refs.labels.dtype == torch.bool:
        raise NearkinError(f"The labels of references are integers; got {refs.labels.dtype}.")
    if not len(refs.labels):  # one empty slot, since nothing has no largest value
        return References(refs.vectors.new_zeros(1, x.shape[1]), refs.labels.new_full((1,), EMPTY, dtype=torch.int64))
    return refs
