"""Print how large the package is: modules, lines, the longest chain of imports.

python tools/layout.py [SOURCE]    SOURCE is a folder that holds the package; src by default
"""

import ast
import functools
import sys
from pathlib import Path


def imports(path: Path, names: set[str]) -> set[str]:
    """Modules of the package that a file imports at its top level."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
            found |= inner or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names - {"nearkin"}


def main() -> None:
    """Print the figures of the package below the folder that the command line names."""
    source = Path(sys.argv[1] if len(sys.argv) > 1 else "src")
    paths = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(source.rglob("*.py"))
    }
    graph = {name: imports(path, set(paths)) - {name} for name, path in paths.items()}

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max((chain(other) for other in graph[name]), key=len, default=()))

    longest = max(map(chain, graph), key=len)
    packages = sum(path.name == "__init__.py" for path in paths.values())
    top = len(list((source / "nearkin").glob("*.py")))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths.values())
    print(f"{len(paths)} Python files: {len(paths) - packages} modules and {packages} packages; {top} at the top level")
    print(f"{lines:,} lines of Python")
    print(f"longest chain of imports: {len(longest)} modules: {' → '.join(longest)}")


if __name__ == "__main__":
    main()
