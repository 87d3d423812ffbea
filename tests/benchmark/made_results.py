"""Results files with made-up scores."""

import json
from pathlib import Path

from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import load_suite


def line(run, scores, **more):
    record = {
        "id": run.id, "data": run.data, "method": run.description["method"], "seed": run.seed, "scores": scores,
        "before": scores, "select": "last", "seconds": 70.0, "wall": 75.0, "images_per_second": 8000.0,
        "commit": "0123456789abcdef", "hardware": "One GPU", "precision": "bf16", "compile": True,
        "versions": {"torch": "2.11"},
        "settings": run.description,
    }  # fmt: skip
    return json.dumps(record | more) + "\n"


def fill(folder, suite, values, *, settings=None, metrics=("R@1", "MAP@R"), file="results.jsonl", data=None, more=None):
    """Results of rows (row → scores by seed) as a suite's file."""
    seeds = max(len(v) for v in values.values())
    planned = plan_suite(load_suite(suite), seeds=seeds, settings=settings)
    path = folder / Path(suite).stem / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for run in planned.runs:
            own = values.get(run.row, ())
            if run.seed < len(own) and data in (None, run.data):
                out.write(line(run, {m: own[run.seed] - (40 if m == "MAP@R" else 0) for m in metrics}, **(more or {})))
    return planned
