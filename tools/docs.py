"""The generated parts of README.md and docs/: tables from headers and result files.

python -m tools.docs          write them
"""

import re
from pathlib import Path

from nearkin.benchmark.suite import load_suite, suite_names
from nearkin.console import markdown_table, score_cells
from nearkin.data.datasets import DATASETS
from nearkin.data.pixels.views import AUGMENTS
from nearkin.files import read_json, short_commit
from nearkin.methods.catalogue import citation, kind, method_page, method_rows
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.networks.backbones import BACKBONES
from nearkin.spec import Call, resolve_options
from tools.claims_page import claims_page
from tools.frozen_table import frozen_table
from tools.gradients import draw
from tools.pml_table import pml_table
from tools.reliability import torture_table
from tools.scale import scale_page
from tools.speed import cpu_speed, first_result, gpu_speed

DEMO = Path("benchmarks/results/demo.json")
PICTURES = Path("docs/pictures/gradients")


def fill(text: str, name: str, content: str) -> str:
    """Put content between the markers `<!-- name -->` and `<!-- /name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}{content}\n{m[2]}", text)


def first_sentence(text: str) -> str:
    """The text up to and including its first full stop or question mark."""
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0]


def methods_list() -> str:
    """Every method with its kind and what it does, for the README."""
    rows = sorted(method_rows(), key=lambda row: (row[1], row[0]))
    return markdown_table(
        ["method", "kind", "what it does"],
        [[f"`{name}`", what, first_sentence(text)] for name, what, text in rows],
        text=True,
    )


def methods_table() -> str:
    """Every method with its kind and paper, for docs/methods.md."""
    entries = sorted({**LOSSES, **STRATEGIES}.items(), key=lambda item: (kind(item[1]), item[0]))
    return markdown_table(
        ["method", "kind", "paper"], [[f"`{n}`", kind(e), citation(e)] for n, e in entries], text=True
    )


def demo_table(root: Path) -> str:
    """What the demo measured, and on what."""
    record = read_json(root / DEMO)
    result = record["result"]
    table = markdown_table(*score_cells({"before training": result["before"], "after": result["scores"]}))
    queries = f"{result['queries']:,} queries of unseen classes, percent"
    where = f"{result['hardware']}, commit {short_commit(result['commit'])}, seed {result['seed']}"
    return f"{table}\n\n{queries}; {result['seconds']:.0f} s of training on {where}."


def suites_table() -> str:
    """The suites of the package, for docs/benchmark.md."""
    suites = [load_suite(name) for name in suite_names()]
    cells = [[f"`{s.name}`", s.title, ", ".join(s.data), str(len(s.rows)), str(s.seeds)] for s in suites]
    return markdown_table(["suite", "what it is", "data", "rows", "seeds"], cells, text=True)


def data_page(text: str, root: Path) -> str:
    """docs/data.md with its tables up to date."""
    datasets = [
        [f"`{name}:PATH`" if r.path else f"`{name}`", r.help.removeprefix(f"{name}:PATH, ")]
        for name, r in DATASETS.items()
    ]
    views = [[f"`{name}`", _options(name), " ".join((entry.__doc__ or "").split())] for name, entry in AUGMENTS.items()]
    networks = [[f"`{name}`", f"{row.size} px", row.help] for name, row in BACKBONES.items()]
    text = fill(text, "datasets", markdown_table(["data", "what it is"], datasets, text=True))
    text = fill(text, "augmentations", markdown_table(["view", "options", "what it is"], views, text=True))
    text = fill(text, "backbones", markdown_table(["network", "images", "what it is"], networks, text=True))
    return fill(text, "frozen", frozen_table(root))


def _options(name: str) -> str:
    """The options of an augmentation with their defaults."""
    options = resolve_options(Call(name), AUGMENTS[name], reserved=("size", "short_side"))
    return ", ".join(f"`{option}={_brief(value)}`" for option, value in options.items())


def _brief(value: object) -> str:
    return f"({', '.join(f'{v:.4g}' for v in value)})" if isinstance(value, tuple) else str(value)


def methods_page() -> str:
    """docs/methods.md: every header, with its options and, for a loss, the picture of its gradients."""
    parts = [
        "# Methods",
        "Generated from the headers of the files beside the papers by `python -m tools.docs`. The picture of a "
        "loss shows how strongly it pulls a positive at similarity s⁺ and pushes a negative at s⁻ of one sample.",
        methods_table(),
    ]
    for name in sorted({**LOSSES, **STRATEGIES}):
        parts.append(f"## {name}")
        if name in LOSSES:
            parts.append(f"![How hard {name} pulls and pushes]({PICTURES.relative_to('docs')}/{name}.png)")
        parts.append(f"```text\n{method_page(name)}\n```")
    return "\n\n".join(parts) + "\n"


def readme(text: str, root: Path) -> str:
    """README.md with its generated parts up to date."""
    text = fill(fill(text, "methods", methods_list()), "demo", demo_table(root))
    text = fill(text, "speed", first_result(root))
    return fill(text, "pml", pml_table(root))


def runs_page(text: str, root: Path) -> str:
    """docs/runs.md with its measured tables up to date."""
    return fill(fill(text, "gpu speed", gpu_speed(root)), "cpu speed", cpu_speed(root))


def main(root: Path) -> None:
    """Write the generated parts below `root`."""
    path = root / "README.md"
    path.write_text(readme(path.read_text(), root))
    (root / "docs" / "methods.md").write_text(methods_page())
    data = root / "docs" / "data.md"
    data.write_text(data_page(data.read_text(), root))
    bench = root / "docs" / "benchmark.md"
    bench.write_text(fill(bench.read_text(), "suites", suites_table()))
    reliability = root / "docs" / "reliability.md"
    reliability.write_text(fill(reliability.read_text(), "torture", torture_table(root)))
    runs = root / "docs" / "runs.md"
    runs.write_text(runs_page(runs.read_text(), root))
    scale = root / "docs" / "scale.md"
    scale.write_text(scale_page(scale.read_text(), root, fill))
    pictures = root / "docs" / "pictures" / "claims"
    text = claims_page(root / "benchmarks" / "results", pictures=pictures, link="pictures/claims/")
    (root / "docs" / "claims.md").write_text(text)
    for name in LOSSES:
        draw(name, root / PICTURES / f"{name}.png")


if __name__ == "__main__":
    main(Path())
