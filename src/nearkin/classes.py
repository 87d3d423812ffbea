"""What a method knows of its training classes, kept beside the model: its proxies, and any number it holds a class.

classes.safetensors holds `proxies` [P, D] with their `labels` [P], where the method has some, and a tensor `class.NAME`
[C] for every column of `Method.class_values`. The names of the training classes are in its record.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nearkin.method import Method
from nearkin.proxies import Proxies
from nearkin.runs import read_tensors, write_tensors

COLUMN = "class."


class KnownClasses(NamedTuple):
    """The training classes as a method knows them."""

    names: tuple[str, ...]
    proxies: Tensor | None  # [P, D]
    labels: Tensor | None  # [P] which class a proxy is of
    columns: Mapping[str, Tensor]  # name → [C]


def write_classes(path: Path, method: Method, names: Sequence[str]) -> None:
    """Keep what the method knows now; a method that knows nothing of classes leaves no file."""
    tensors = {f"{COLUMN}{name}": value for name, value in method.class_values().items()}
    proxies = next((module for module in method.modules() if isinstance(module, Proxies)), None)
    if proxies is not None:
        tensors |= {"proxies": proxies.vectors, "labels": proxies.labels}
    if tensors:
        write_tensors(path, tensors, {"names": names})


def read_classes(path: Path) -> KnownClasses | None:
    """What was kept; None where nothing was."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    columns = {name.removeprefix(COLUMN): value for name, value in tensors.items() if name.startswith(COLUMN)}
    return KnownClasses(tuple(about["names"]), tensors.get("proxies"), tensors.get("labels"), columns)
