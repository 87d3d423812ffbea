"""docs/ccp.md: the command that it calls the paper's protocol has the settings of the suite."""

import re
import shlex
from pathlib import Path

import nearkin
from nearkin.benchmark.planned_runs import describe, plan_suite
from nearkin.benchmark.suite import load_suite
from nearkin.cli.benchmark import _parse_setting

PAGE = Path(nearkin.__file__).parents[2] / "docs" / "ccp.md"
ELSEWHERE = ("data", "weights", "repeats", "out")


def test_the_protocol_on_the_page_is_that_of_table_2():
    suite = load_suite("ccp_table2")
    (run,) = (r for r in plan_suite(suite, seeds=1).runs if (r.row, r.data) == ("C2-CCP-L", "cub"))
    command = re.search(r"^nearkin cv (--data .*)$", PAGE.read_text(), re.MULTILINE)[1]
    words, settings = shlex.split(command), {}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            settings[name.removeprefix("no_")] = False
        else:
            name, value = _parse_setting(f"{name}={words.pop(0)}")
            settings[name] = value
    settings = {name: value for name, value in settings.items() if name not in ELSEWHERE}
    described = describe({"select": "validation", "select_by": "MAP@R", "seed": 0, **settings}, data="cub")
    assert described == run.description
