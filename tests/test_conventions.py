"""Conventions of the source that ruff, mypy and import-linter do not check."""

import ast
from pathlib import Path

import pytest

import nearkin
from nearkin.data.datasets import DATASETS
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES

ROOT = Path(nearkin.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = {*LOSSES, *STRATEGIES, *DATASETS}
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))

LAZY_IMPORTS: dict[str, set[str]] = {}
"""Imports inside functions that load an optional package: file → modules of nearkin."""


def room(path: Path) -> str:
    """The first folder of a file, or its name: `methods` for methods/losses/triplet.py, `spec` for spec.py."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@every_file
def test_files_say_what_they_do(path):
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


def imports_in_functions(tree: ast.AST) -> set[str]:
    """Modules of nearkin that are imported inside a function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [node for function in functions for node in ast.walk(function)]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in names if name.split(".")[0] == "nearkin"}


def test_the_check_sees_imports_in_functions():
    source = "import nearkin.a\ndef f():\n    import nearkin.b, torch\n    if f:\n        from nearkin.c import d\n"
    assert imports_in_functions(ast.parse(source)) == {"nearkin.b", "nearkin.c"}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) != "cli"], ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stand_at_the_top(path):
    """The command line imports late to start fast; elsewhere an import in a function would hide a cycle."""
    allowed = LAZY_IMPORTS.get(str(path.relative_to(ROOT)), set())
    assert imports_in_functions(ast.parse(path.read_text())) == allowed


def compared_strings(tree: ast.AST):
    """String literals in a comparison, a `match` case, or a call such as `startswith`, with their lines."""
    for node in ast.walk(tree):
        inside: list[ast.AST] = []
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


def test_the_check_sees_comparisons():
    source = "a == 'x'\nb in ('y', 'z')\nmatch c:\n    case 'w': pass\nd.startswith('v')\nprint('u')"
    assert {text for text, _ in compared_strings(ast.parse(source))} == {"x", "y", "z", "w", "v"}


@every_file
def test_no_name_of_a_table_is_compared(path):
    """A special case belongs to the entry of the table, not to the code that all entries share."""
    for text, line in compared_strings(ast.parse(path.read_text())):
        assert text not in NAMES, f"{path.relative_to(ROOT)}:{line} compares with {text!r}"


def test_no_two_test_files_share_a_name():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
