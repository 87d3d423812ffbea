"""Every code block of docs/other-trainers.md runs and learns, with a loss and with strategies that keep state.

One process imports the three trainers: that is slow.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "other-trainers.md"
FIRST, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
PACKAGES = ("lightning", "transformers", "accelerate")
METHODS = ("proxy_anchor", "vcpa", "proxy_updates", "xbm(contrastive, size=50, start=0)")

SCRIPT = """
import json, sys
import torch
import nearkin as nk
from nearkin.networks.timm_models import import_timm

import_timm()  # Lightning imports torchvision, which may not fit torch


class Blobs(torch.utils.data.Dataset):
    def __init__(self, count=400):
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.arange(count) % 10
        centres = torch.randn(10, 12, generator=generator)
        self.images = centres[self.targets] + 0.8 * torch.randn(count, 12, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        return self.images[row], int(self.targets[row])


def score(names):
    model = names["model"].eval()
    with torch.no_grad():
        return nk.evaluate(model(names["dataset"].images), names["dataset"].targets, metrics=("P@R",))["P@R"]


def numbers(method):
    return {name: t.clone() for name, t in method.state_dict().items() if t.is_floating_point()}


def outcome(first, block):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    names = {"dataset": Blobs(), "model": model}
    before = score(names)
    names["model"].train()
    exec(first, names)
    state = numbers(names["method"])
    exec(block, names)
    moved = numbers(names["method"])
    return {"before": before, "after": score(names), "still": [n for n in state if state[n].equal(moved[n])]}


first, blocks, methods, place = json.load(sys.stdin)
found = {
    f"{name}, {spec}": outcome(first.replace("proxy_anchor", spec), block)
    for name, block in blocks.items()
    for spec in methods
}
with open(place, "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each block whose package is installed did to the score and the proxies."""
    blocks = {name: block for name, block in zip(PACKAGES, BLOCKS, strict=True) if importlib.util.find_spec(name)}
    place = tmp_path_factory.mktemp("trainers")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([FIRST, blocks, METHODS, str(place / "found.json")]),
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((place / "found.json").read_text())


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("name", PACKAGES)
def test_a_block_of_the_page_runs_and_learns(name: str, spec: str, found: dict[str, dict[str, Any]]) -> None:
    if f"{name}, {spec}" not in found:
        pytest.skip(f"{name} is not installed.")
    result = found[f"{name}, {spec}"]
    assert result["after"] > result["before"] + 5
    assert result["still"] == [], "the state of the method moves"
