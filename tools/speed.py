"""The measured speed of training and embedding in README.md and docs/runs.md, from results files.

A file that does not exist yet, or a part of it that failed, leaves its place empty.
"""

from pathlib import Path

from nearkin.console import markdown_table
from nearkin.files import Json, read_json, short_commit

GPU = Path("benchmarks/results/train_speed_cuda.json")
CPU = Path("benchmarks/results/cpu_speed.json")
METRICS = ("R@1", "MAP@R")
ALIKE = 1.05
"""Steps up to this many times as long as Proxy-Anchor's are not listed."""

REASONS = {
    "moco": "embeds each batch a second time, by the momentum network",
    "proxy_updates": "moves the proxies ten times per batch",
}
"""What methods do more than others by design."""


def _known(path: Path) -> Json:
    return read_json(path) if path.exists() else {}


def _where(known: Json) -> str:
    return f"{known['hardware']}, commit {short_commit(known['commit'])}"


def first_result(root: Path) -> str:
    """A sentence for the README: how long a first result takes on a GPU."""
    known = _known(root / GPU)
    if "seconds" not in known.get("cold", {}):
        return ""
    cold, about = known["cold"], known["settings"]
    return (
        f"On a GPU, training `{about['backbone']}` for {about['epochs']} epochs on CUB-200-2011 takes "
        f"{cold['seconds']:.0f} s from the start of the process to the score, without any flags ({_where(known)})."
    )


def gpu_speed(root: Path) -> str:
    """Tables of whole trainings, of batch sizes, and of the methods whose steps are longer."""
    known = _known(root / GPU)
    parts = [_whole(known), _batches(known.get("batches", {})), _methods(known.get("methods", {}))]
    if not any(parts):
        return ""
    parts.append(f"Measured by `benchmarks/train_speed.py` on {_where(known)}.")
    return "\n\n".join(filter(None, parts))


def _whole(known: Json) -> str:
    names = {
        "cold": "new process, which reads the images",
        "warm": "another seed in the same process",
        "third": "a third seed",
    }
    rows = [(words, known[name]) for name, words in names.items() if "seconds" in known.get(name, {})]
    cells = [
        [words, f"{row['seconds']:.0f} s", _speed(row), *(f"{row['scores'][m]:.1f}" for m in METRICS)]
        for words, row in rows
    ]
    title = f"CUB-200-2011, {known['settings']['epochs']} epochs" if rows else ""
    return markdown_table([title, "to the score", "images/s", *METRICS], cells, text=True) if rows else ""


def _speed(row: Json) -> str:
    return f"{row['images_per_second']:,.0f}" if row.get("images_per_second") else "–"


def _batches(found: Json) -> str:
    sizes = dict.fromkeys(name.partition(",")[0] for name in found)
    cells = [[size, *(_speed(found.get(f"{size}, {how}", {})) for how in ("graph", "eager"))] for size in sizes]
    return markdown_table(["images per batch", "images/s", "with `--no-graph`"], cells) if cells else ""


def _methods(found: Json) -> str:
    rows = {name: row for name, row in found.items() if "ratio" in row and not name.startswith("proxy_anchor")}
    if not rows:
        return ""
    longer = sorted((name for name, row in rows.items() if row["ratio"] > ALIKE), key=lambda name: -rows[name]["ratio"])
    first = found["proxy_anchor"]
    said = (
        f"A step of Proxy-Anchor takes {first['ms']:.1f} ms and {first['operations']:,} operations of PyTorch. "
        f"Steps of {len(rows) - len(longer)} of the {len(rows)} other methods take at most {ALIKE:g} times as long"
    )
    if failed := [f"`{name}`" for name, row in found.items() if "error" in row]:
        said += f"; {', '.join(failed)} could not be timed"
    if not longer:
        return f"{said}."
    cells = [
        [f"`{name}`", f"{row['ratio']:.2f}", str(row["passes"]), f"{row['operations']:,}", REASONS.get(name, "")]
        for name in longer
        for row in [rows[name]]
    ]
    head = ["method", "time", "passes of the network", "operations", "why"]
    return f"{said}. The others:\n\n{markdown_table(head, cells, text=True)}"


def cpu_speed(root: Path) -> str:
    """Tables of training and embedding on a CPU beside plain PyTorch and ONNX Runtime."""
    known = _known(root / CPU)
    tables = []
    for what in ("training", "embedding"):
        rows = known.get(what, {}).get("rows", {})
        cells = [
            [name, f"{row['images_per_second']:.1f}", f"{row['ratio']:.2f}"]
            for name, row in sorted(rows.items(), key=lambda item: -item[1]["images_per_second"])
        ]
        if cells:
            tables.append(markdown_table([what, "images/s", "time of nearkin = 1"], cells, text=True))
    if not tables:
        return ""
    about = f"`{known['backbone']}` at {known['size']} px, batches of {known['batch']}"
    return "\n\n".join([*tables, f"{about}; measured by `benchmarks/cpu_speed.py` on {_where(known)}."])
