"""The measured tables in docs/scale.md, and its figures on paper, from results files and stated arithmetic.

What has not been measured yet is left out.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearkin.console import markdown_table
from nearkin.files import Json, read_json, short_commit

CLASSES = Path("benchmarks/results/many_classes.json")
INDEX = Path("benchmarks/results/index_million.json")
OPEN = Path("benchmarks/results/open_million.json")
DATA = {
    "accuracy_letters": "letters",
    "accuracy_cub": "CUB-200-2011, frozen trunk",
    "accuracy_made": "20,000 made classes",
}
METRICS = ("R@1", "MAP@R")

GB, TERA = 1e9, 1e12
FLOAT = 4  # bytes
GPU = {"memory": 141 * GB, "bytes": 4.8 * TERA, "float32": 67 * TERA, "TF32": 495 * TERA}
"""Of an H200, from its data sheet: bytes of memory, bytes per second, operations per second."""

STATE = 4  # of the size of the proxies: themselves, gradient, two moments
PRODUCTS = 2  # of the size [B, C]: similarities and their gradient
PASSES = 21  # over the proxies in a step: see docs/scale.md


def _known(path: Path) -> Json:
    return read_json(path) if path.exists() else {}


def _where(known: Json, script: str) -> str:
    return f"Measured by `benchmarks/{script}` on {known['hardware']}, commit {short_commit(known['commit'])}."


def scale_page(text: str, root: Path, fill: Callable[[str, str, str], str]) -> str:
    """docs/scale.md with its tables up to date."""
    tables = {"steps": steps(root), "accuracy": accuracy(root), "open": opened(root), "indexes": indexes(root)}
    tables["paper"] = paper()
    for name, table in tables.items():
        text = fill(text, name, table)
    return text


def steps(root: Path) -> str:
    """Milliseconds and memory of a step with very many classes."""
    known = _known(root / CLASSES).get("steps", {})
    rows = [row for row in known.get("rows", []) if "milliseconds" in row and row["classes"] >= 100_000]
    if not rows or known["tiny"]:
        return ""
    cells = [
        [
            f"`{row['spec']}`{', compiled' * row['compiled']}{', TF32' * row['tf32']}",
            f"{row['classes']:,} × {row['dim']}",
            f"{row['milliseconds']:.0f} ms",
            f"{row['peak_gib']:.1f} GiB" if "peak_gib" in row else "–",
        ]
        for row in rows
    ]
    table = markdown_table(["method", "proxies", "a step", "peak memory"], cells, text=True)
    return f"{table}\n\nA batch has {rows[0]['batch']} samples. {_where(known, 'many_classes.py')}"


def accuracy(root: Path) -> str:
    """Scores with a sample of the classes and with all."""
    known, cells = _known(root / CLASSES), list[list[str]]()
    measured = [part for part in DATA if part in known and not known[part]["tiny"]]
    for part in measured:
        rows = known[part]["rows"]
        for name, rate in dict.fromkeys((row["method"], row["rate"]) for row in rows):
            found = [row["scores"] for row in rows if (row["method"], row["rate"]) == (name, rate)]
            cells.append([DATA[part], f"`{name}`", f"{rate:g}", *(_spread([s[m] for s in found]) for m in METRICS)])
    if not cells:
        return ""
    table = markdown_table(["data", "method", "`sample_rate`", *METRICS], cells, text=True)
    seeds = max(len({row["seed"] for row in known[part]["rows"]}) for part in measured)
    commits = " and ".join(dict.fromkeys(short_commit(known[part]["commit"]) for part in measured))
    where = f"on {known[measured[0]]['hardware']}, commit {commits}"
    return f"{table}\n\nMean ± standard deviation over {seeds} seeds. Measured by `benchmarks/many_classes.py` {where}."


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def opened(root: Path) -> str:
    """Seconds and memory to open a data set of a million images."""
    known = _known(root / OPEN)
    if not (rows := known.get("rows", [])):
        return ""
    cells = [
        [
            f"`{row['data']}:`",
            f"{row['images']:,}",
            f"{row['open_s']:.1f} s",
            f"{row['open_mb']:.0f} MB",
            f"{row['first_s']:.0f} s, {row['index_mb']:.0f} MB" if row["index_mb"] else "no index",
        ]
        for row in rows
    ]
    head = ["data set", "images", "opens in", "memory that opening adds", "index, made once"]
    return f"{markdown_table(head, cells)}\n\n{_where(known, OPEN.with_suffix('.py').name)}"


def indexes(root: Path) -> str:
    """An index of a million embeddings in a folder and in Lance."""
    known = _known(root / INDEX)
    if not known or known["small"]:
        return ""
    rows = known["rows"]
    lines: dict[str, Callable[[Json], Any]] = {
        "opens in": lambda r: f"{1e3 * r['open_s']:.0f} ms",
        "memory that opening adds": lambda r: f"{r['open_mb']:.0f} MB",
        "memory after the first search, files included": lambda r: f"{r['searched_mb']:.0f} MB",
        "first search": lambda r: f"{1e3 * r['first_search_s']:.0f} ms",
        "a search": lambda r: f"{r['search_ms']:.1f} ms",
        "an exact search, 64 at once, each": lambda r: f"{r['exact_64_at_once_ms_each']:.1f} ms",
        "recall@10 of queries that are not in it": lambda r: f"{r['recall_new_queries']:.3f}",
        "commit of 512 items at a tenth of the items": lambda r: _commit(r["commit_ms_early"]),
        "the same at all items": lambda r: _commit(r["commit_ms_late"]),
        "filling": lambda r: f"{r['fill_s']:.0f} s",
        "building": lambda r: f"{r['build_s']:.0f} s" if r["recall"] else "–",
        "on disk": lambda r: f"{r['disk_gb']:.2f} GB",
        "search page: first answer": lambda r: f"{r['page_s']:.1f} s",
        "search page: first search, then the map": lambda r: f"{r['page_search_s']:.1f} s, {r['map_s']:.1f} s",
        "points on the map": lambda r: f"{r['map_points']:,}",
    }
    cells = [[what, *(cell(row) for row in rows)] for what, cell in lines.items()]
    table = markdown_table([f"{rows[0]['items']:,} × {known['size']['dim']}", *(r["store"] for r in rows)], cells)
    return f"{table}\n\nCommits: median, mean and longest. {_where(known, 'index_million.py')}"


def _commit(found: Json) -> str:
    return f"{found['median']:.0f} / {found['mean']:.0f} / {found['longest']:.0f} ms"


def paper() -> str:
    """What ten million classes take, by counting bytes and operations."""
    cells = []
    for classes, dim, batch, rate, gpus in (
        (10**6, 512, 180, 1.0, 1),
        (10**7, 256, 180, 1.0, 1),
        (10**7, 256, 180, 0.1, 1),
        (10**7, 512, 1024, 1.0, 8),
        (10**7, 512, 1024, 0.1, 8),
    ):
        proxies, used = FLOAT * classes * dim / gpus, rate * classes / gpus
        memory = STATE * proxies + PRODUCTS * FLOAT * batch * used
        work, moved = 6 * batch * used * dim, (PASSES * rate + (rate < 1)) * proxies  # a gradient of zeros first
        times = [1e3 * (work / GPU[kind] + moved / GPU["bytes"]) for kind in ("float32", "TF32")]
        cells.append(
            [
                f"{classes:,} × {dim}",
                f"{batch:,}",
                f"{rate:g}",
                f"{gpus}",
                f"{memory / GB:.0f} GB",
                *(f"{ms:.0f} ms" for ms in times),
            ]
        )
    header = ["proxies", "batch", "`sample_rate`", "GPUs", "memory per GPU", "at least, float32", "at least, TF32"]
    return markdown_table(header, cells)
