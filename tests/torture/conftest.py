"""The fixture of an attack, and the file with the counts of all attacks."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torture.campaign import FULL, Attack

from nearkin.files import provenance, write_json

RESULTS = os.environ.get("NEARKIN_TORTURE_RESULTS")
seen: dict[str, dict[str, object]] = {}


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    """The cases of this test, and the count of their outcomes."""
    made = Attack(request.node.name)
    yield made
    what = " ".join((request.function.__doc__ or "").split("\n")[0].split())
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
    rows = [{"room": room, "what": what, **row} for (room, what), row in sorted(attacks.items())]
    about = {"command": "make torture" if FULL else "NEARKIN_TORTURE_RESULTS=… pytest tests/torture"}
    write_json(Path(RESULTS), {**about, "attacks": rows, **provenance()})
