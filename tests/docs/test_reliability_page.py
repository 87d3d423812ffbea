"""The page on reliability shows the counts of the last campaign, and names every room of attacks."""

from pathlib import Path

from nearkin.files import read_json
from tools.docs import fill
from tools.reliability import RESULTS, ROOMS, outcomes, torture_table

ROOT = Path(__file__).parents[2]


def test_the_table_is_up_to_date_and_every_attack_held():
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert fill(page, "torture", torture_table(ROOT)) == page
    rows = read_json(ROOT / RESULTS)["attacks"]
    assert [row["what"] for row in rows if row["failed"]] == []
    assert all(row["command"].startswith("make torture") for row in rows)


def test_every_attack_is_in_the_table():
    rooms = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "torture").glob("test_*.py")}
    assert rooms == set(ROOMS) == {row["room"] for row in read_json(ROOT / RESULTS)["attacks"]}


def test_outcomes_are_shown_by_their_number():
    assert outcomes({"seen": {"read": 2, "refused": 1200}}) == "refused 1,200, read 2"
