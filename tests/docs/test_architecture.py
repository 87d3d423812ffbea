"""What docs/architecture.md names exists, and its recipe for a loss works as written."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nearkin"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FENCES = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
PROSE = FENCES.sub("", PAGE)
PATHS = re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|js))(?::([\w.]+))?`", PROSE)
BLOCKS = {kind: [text for name, text in FENCES.findall(PAGE) if name == kind] for kind in ("text", "python", "diff")}
NEW_FILE = "src/nearkin/methods/losses/dcl.py"

USE_IT = """
import torch, nearkin as nk
from pathlib import Path
assert Path(nk.__file__).is_relative_to(Path.cwd()), nk.__file__
method = nk.method("dcl(temperature=0.2)", classes=4, dim=8)
model = torch.nn.Linear(8, 8)
optimiser = torch.optim.SGD([{"params": model.parameters(), "lr": 0.1}, *method.groups(lr=0.1)])
x, y = torch.randn(32, 8), torch.arange(32) % 4
before = model.weight.detach().clone()
loss = method(model(x), y)
loss.backward()
optimiser.step()
assert loss.isfinite() and not torch.equal(before, model.weight)
assert 0 <= nk.evaluate(model(x).detach(), y, metrics=("R@1",))["R@1"] <= 100
nk.train(data="glyphs(classes=16, samples=6)", method="dcl", epochs=1, batch=16, dim=16, device="cpu", out="run")
assert nk.load("run").embed(torch.zeros(2, 1, 32, 32, dtype=torch.uint8)).shape == (2, 16)
"""


@pytest.mark.parametrize(("path", "name"), sorted(set(PATHS)))
def test_every_module_and_function_that_is_named_exists(path, name):
    if path == NEW_FILE:
        assert not (ROOT / path).exists(), "the page's example has become a loss of the package: choose another one"
        return
    file = ROOT / path if path.startswith(("tests/", "tools/")) else PACKAGE / path
    assert file.exists(), f"docs/architecture.md names {path}, which does not exist"
    if name:
        found = importlib.import_module(".".join(["nearkin", *Path(path).with_suffix("").parts]))
        for attribute in name.split("."):
            assert hasattr(found, attribute), f"docs/architecture.md names {path}:{name}, which does not exist"
            found = getattr(found, attribute)


def test_the_drawing_has_every_room():
    drawing = BLOCKS["text"][0]
    rooms = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    modules = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(rooms) > 8
    for name in (*rooms, *modules):
        assert re.search(rf"\b{name}\b", drawing), f"the drawing in docs/architecture.md lacks {name}"


def apply(root: Path, diff: str) -> int:
    """Apply the hunks of a diff, each to the file it names; return how many lines they add."""
    added = 0
    for hunk in diff.split("@@ ")[1:]:
        file, *lines = hunk.splitlines()
        text = (root / file).read_text()
        old = "\n".join(line[1:] for line in lines if not line.startswith("+")) + "\n"
        new = "\n".join(line[1:] for line in lines) + "\n"
        assert text.count(old) == 1, f"docs/architecture.md edits {file} where it does not have {old!r} once"
        (root / file).write_text(text.replace(old, new))
        added += sum(line.startswith("+") for line in lines)
    return added


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the project in which the recipe for a loss was followed."""
    place = tmp_path_factory.mktemp("recipe")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", place / "src", ignore=ignore)
    shutil.copytree(ROOT / "tests" / "contract", place / "tests" / "contract", ignore=ignore)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/oracles.py"):
        shutil.copy(ROOT / file, place / file)
    assert f"`{NEW_FILE}`" in PROSE
    (place / NEW_FILE).write_text(BLOCKS["python"][0])
    table, oracle = BLOCKS["diff"]
    assert apply(place, table) == 2, "the page says: two lines in a table"
    apply(place, oracle)
    return place


def run(place: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "NEARKIN_CACHE": str(place / "cache")}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_new_loss_trains_and_is_measured(copy):
    run(copy, "-c", USE_IT)


def test_the_new_loss_passes_the_contract(copy):
    run(copy, "-m", "pytest", "-q", "tests/contract", "-k", "dcl")
