"""The table in the README that compares nearkin with pytorch-metric-learning (PML), from results files."""

from pathlib import Path

from nearkin.console import markdown_table
from nearkin.files import read_json, short_commit

RESULTS = Path("benchmarks/results")


def pml_table(root: Path) -> str:
    """Return the table and a line that says where its numbers come from."""
    evaluation, against = (read_json(root / RESULTS / f"{name}.json") for name in ("evaluate_speed", "against_pml"))
    ours, theirs = evaluation["ours"], evaluation["pml"]
    triple, resumed = against["soft_triple"], against["resume"]
    differ = resumed["pml"]
    cells = [
        [
            f"evaluate {evaluation['items']:,} embeddings, {evaluation['dim']}-d, {evaluation['classes']:,} classes",
            f"{len(ours['scores'])} metrics in {ours['seconds']:.0f} s, {_size(ours['extra_memory_mb'])} extra",
            f"{len(theirs['scores'])} metrics in {theirs['seconds']:.0f} s, {_size(theirs['extra_memory_mb'])} extra",
        ],
        [
            f"SoftTriple with its regulariser, {triple['classes']:,} classes × {triple['per_class']} centres "
            "(Stanford Online Products)",
            f"{_size(triple['ours']['peak_mb'])} at peak",
            f"{_size(triple['pml']['peak_mb'])} at peak, same loss",
        ],
        [
            "XBM, saved and loaded after half of the steps",
            _resumed(resumed["ours"]["steps_that_differ"]),
            f"{differ['steps_that_differ']} of {resumed['steps_after']} losses differ, by up to "
            f"{differ['largest_difference_percent']:.1f} %: the queue position is not saved",
        ],
        [
            "is A better than B?",
            "paired t-tests over seeds with Holm's correction, bootstrap over classes, Friedman and Nemenyi",
            "–",
        ],
        [
            "search",
            "index on disk, in PostgreSQL or in Qdrant; calibrated threshold; web page; JSON API",
            "nearest neighbours in memory (`InferenceModel`)",
        ],
        ["MPA, VCPA, Proxy-ISA, CCP, PROFS", "all five, with their tables as suites", "–"],
    ]
    table = markdown_table(
        ["", "nearkin", f"pytorch-metric-learning {against['pml_version']}"],
        cells,
        text=True,
    )
    commits = " and ".join(short_commit(record["commit"]) for record in (evaluation, against))
    scripts = "`benchmarks/evaluate_speed.py` and `benchmarks/against_pml.py`"
    return f"{table}\n\nMeasured by {scripts} on {against['hardware']}, commits {commits}."


def _size(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes:.0f} MB"


def _resumed(steps_that_differ: int) -> str:
    return f"{steps_that_differ} losses differ" if steps_that_differ else "the same losses, bit for bit"
