"""Dependencies point one way, and shared code knows no method or data set by name."""

import ast
from pathlib import Path

import pytest

import nearkin
from nearkin.data.datasets import DATASETS
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES

ROOT = Path(nearkin.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Each layer may import those to its left. What stands in no layer is below all of them (errors, spec).
LAYERS = ["similarity", "proxies memory", "method", "losses", "strategies", "train", "cli"]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.split()}
ABOUT_METHODS = {"proxies", "memory", "method", "losses", "strategies", "train", "cli"}
KNOW_NO_METHODS = {"errors", "spec", "similarity", "data", "evaluate", "index", "backbones"}
SHARED = {"train", "plan", "runs", "evaluate", "cli", "method", "similarity", "proxies", "memory", "spec", "backbones"}


def part(path):
    """Which part of the package a file is: `losses` for losses/triplet.py, `train` for train.py."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path):
    """The parts of the package a file imports, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            steps = name.split(".")
            if steps[0] == "nearkin" and len(steps) > 1:
                yield steps[1], node.lineno


def test_the_walk_sees_imports():
    """A check of the checker: it sees both forms, and imports inside functions."""
    seen = {name for name, _ in imported(ROOT / "method.py")}
    assert {"data", "proxies", "similarity", "spec", "losses", "strategies"} <= seen
    assert {part(path) for path in FILES} >= {"similarity", "losses", "strategies", "data"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependencies_point_one_way(path):
    here = part(path)
    for there, line in imported(path):
        if here == "method" and there in ("losses", "strategies"):
            continue  # the builder reads the tables; test_the_builder_reads_the_tables_late holds it to a function
        where = f"{path.relative_to(ROOT)}:{line}"
        if here in RANK and there in RANK:
            assert RANK[there] <= RANK[here], f"{where}: {here} may not import {there}"
        if here in KNOW_NO_METHODS:
            assert there not in ABOUT_METHODS, f"{where}: {here} knows nothing of methods, yet imports {there}"


def test_the_builder_reads_the_tables_late():
    """The one way back: `method.py` looks into the tables inside a function, when both sides are there."""
    top = ast.parse((ROOT / "method.py").read_text()).body
    late = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert not late & {"nearkin.methods.losses", "nearkin.methods.strategies"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_say_what_they_do(path):
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")
    assert path.name == "__main__.py" or ast.get_docstring(ast.parse(path.read_text())), (
        f"{path.name} wants a docstring"
    )


def compared_strings(tree):
    """String literals that stand in a comparison, a `match` case, or a call such as `startswith`."""
    for node in ast.walk(tree):
        inside = []
        if isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            inside = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inside = node.args if node.func.attr in ("startswith", "endswith", "removeprefix", "__eq__") else []
        for side in inside:
            for leaf in ast.walk(side):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                    yield leaf.value, leaf.lineno


def test_the_walk_sees_comparisons():
    source = "a == 'x'\nb in ('y', 'z')\nmatch c:\n    case 'w': pass\nd.startswith('v')\nprint('u')"
    assert {text for text, _ in compared_strings(ast.parse(source))} == {"x", "y", "z", "w", "v"}


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in SHARED], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_name_of_a_table_is_compared_in_shared_code(path):
    names = {*LOSSES, *STRATEGIES, *DATASETS}
    for text, line in compared_strings(ast.parse(path.read_text())):
        assert text not in names, f"{path.relative_to(ROOT)}:{line} compares with {text!r}: let the entry itself say it"
