"""The table in docs/data.md of what training on a frozen trunk takes and reaches, from results files."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from nearkin.benchmark.results import read_results
from nearkin.console import markdown_table
from nearkin.files import Json, read_json, short_commit

RESULTS = Path("benchmarks/results")
FULL = ("cub_lite0", "cub_256/cub_lite0")
"""Where trainings of the whole network are: those on the newest images first."""

METRICS = ("R@1", "MAP@R")


def frozen_table(root: Path) -> str:
    """Return the table and a line that says where its numbers come from; nothing if there are none yet."""
    path = root / RESULTS / "frozen_trunk.json"
    if not path.exists():
        return ""
    known = read_json(path)
    runs, about = known["runs"], known["settings"]
    cells = [["not trained", "–", "–", *_scores(runs[:1], "before")]]
    for views in dict.fromkeys(run["views"] for run in runs):
        of_views = [run for run in runs if run["views"] == views]
        later = [run["seconds"] for run in of_views[1:]]
        again = f"{statistics.median(later):.0f} s" if later else "–"
        cells.append([f"frozen, {views} views", f"{of_views[0]['seconds']:.0f} s", again, *_scores(of_views, "scores")])
    told = ""
    if full := _full_trainings(root):
        cells.append([f"all trained, {full[0]['settings']['epochs']} epochs", "–", "–", *_scores(full, "scores")])
        told = f" All of it was trained on {full[0]['hardware']}, commit {short_commit(full[0]['commit'])}."
    table = markdown_table([f"`{about['backbone']}`", "new images", "another seed", *METRICS], cells, text=True)
    return (
        f"{table}\n\nProxy-Anchor on CUB-200-2011: from start to score after decoding, and scores of {len(runs)} seeds "
        f"(mean, and standard deviation). Measured by `benchmarks/frozen_trunk.py` on {known['hardware']}, commit "
        f"{short_commit(known['commit'])}.{told}"
    )


def _full_trainings(root: Path) -> list[Json]:
    """The trainings of all of the network by Proxy-Anchor, one per seed."""
    for name in FULL:
        path = root / RESULTS / name / "results.jsonl"
        runs = list(read_results(path).values()) if path.exists() else []
        if found := [run for run in runs if run["method"].startswith("proxy_anchor(")]:
            return found
    return []


def _scores(runs: Sequence[Json], name: str) -> list[str]:
    return [_mean([run[name][metric] for run in runs]) for metric in METRICS]


def _mean(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean
