"""The fixture of an attack, and the file with the counts of all attacks."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torture.campaign import SHARE, Attack

from nearkin.files import provenance, read_json, write_json

RESULTS = os.environ.get("NEARKIN_TORTURE_RESULTS")
seen: dict[str, dict[str, object]] = {}


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    """The cases of this test, and the count of their outcomes."""
    made = Attack(request.node.name)
    yield made
    what = " ".join((request.function.__doc__ or "").split("\n")[0].split()) + made.variant
    room = request.node.path.stem.removeprefix("test_")
    request.node.user_properties.append(("attack", json.dumps({"room": room, "what": what, "seen": made.outcomes})))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the counts, also from other processes."""
    entry = seen.setdefault(report.nodeid, {"failed": False})
    entry["failed"] = entry["failed"] or report.failed
    for name, value in report.user_properties if report.when == "teardown" else ():
        if name == "attack":
            entry |= json.loads(str(value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the counts, where `make torture` asks for them."""
    if not RESULTS or hasattr(session.config, "workerinput"):
        return
    attacks: dict[tuple[str, str], dict[str, object]] = {}
    for entry in seen.values():
        if "what" in entry:
            row = attacks.setdefault((str(entry["room"]), str(entry["what"])), {"failed": 0, "seen": {}})
            row["failed"] = int(str(row["failed"])) + bool(entry["failed"])
            counts = row["seen"]
            assert isinstance(counts, dict)
            for outcome, count in json.loads(json.dumps(entry["seen"])).items():
                counts[outcome] = counts.get(outcome, 0) + count
    about = provenance() | {"command": "make torture" + ("" if SHARE == 1 else f" SHARE={SHARE:g}")}
    known = read_json(Path(RESULTS))["attacks"] if Path(RESULTS).exists() else []
    # Of attacks that this run did not make; one that failed before its first case has no outcome to keep.
    kept = {(row["room"], row["what"]): row for row in known if row["seen"]}
    made = {(room, what): {"room": room, "what": what, **row, **about} for (room, what), row in attacks.items()}
    write_json(Path(RESULTS), {"attacks": [row for _, row in sorted((kept | made).items())]})
