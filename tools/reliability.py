"""The table of docs/reliability.md: what the campaign against faults did, and what it saw."""

from pathlib import Path

from nearkin.console import markdown_table
from nearkin.files import Json, read_json, short_commit

RESULTS = Path("benchmarks/results/torture.json")
ROOMS = {
    "byte_flips": "damaged files",
    "full_disk": "full disk",
    "image_fuzz": "pictures",
    "kills": "kills",
    "method_fuzz": "methods",
    "server_probes": "server",
    "databases": "databases",
}


def torture_table(root: Path) -> str:
    """Every attack with its cases and outcomes, and where it ran."""
    rows = read_json(root / RESULTS)["attacks"]
    cells = [[ROOMS[row["room"]], row["what"], f"{cases(row):,}", outcomes(row)] for row in rows]
    table = markdown_table(["on", "attack", "cases", "outcomes"], cells, text=True)
    failed = sum(row["failed"] for row in rows)
    held = "All held." if not failed else f"{failed} did not hold."
    runs = sorted({(row["date"][:10], short_commit(row["commit"]), row["command"], row["hardware"]) for row in rows})
    where = "; ".join(f"`{command}` at {commit}, {hardware}, {date}" for date, commit, command, hardware in runs)
    return f"{table}\n\n{sum(map(cases, rows)):,} cases. {held} Last run of each attack: {where}."


def cases(row: Json) -> int:
    """The number of outcomes of an attack."""
    return sum(int(count) for count in row["seen"].values())


def outcomes(row: Json) -> str:
    """The outcomes with their counts, the most frequent first."""
    ranked = sorted(row["seen"].items(), key=lambda pair: -int(pair[1]))
    return ", ".join(f"{name} {count:,}" for name, count in ranked)
