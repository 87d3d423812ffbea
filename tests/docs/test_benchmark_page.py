"""The page about the benchmark: its table of suites, its example, its commands."""

import re
import shlex
from pathlib import Path

import typer
from benchmark.tiny_suite import written

import nearkin as nk
from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import load_suite
from nearkin.cli import app
from tools import docs

PAGE = (Path(nk.__file__).parents[2] / "docs" / "benchmark.md").read_text()


def test_the_page_lists_the_suites():
    assert docs.fill(PAGE, "suites", docs.suites_table()) == PAGE, "run python -m tools.docs"


def test_the_suite_on_the_page_is_valid(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    planned = plan_suite(load_suite(written(tmp_path, block, "mine")))
    assert len(planned.runs) == 3 * 3
    assert not planned.missing
    assert planned.suite.figure.x == "margin"


def test_the_commands_on_the_page_parse():
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    commands = typer.main.get_command(app).commands
    assert {words[1] for words in lines} == {"bench", "merge", "report", "train"}
    for program, name, *words in lines:
        assert program == "nearkin"
        given = commands[name].make_context(name, list(words)).params  # an unknown option is an error here
        for suite in map(load_suite, given.get("suites") or ()):
            assert {text.split(":")[0] for text in given.get("data") or ()} <= set(suite.data)
            assert set(given.get("rows") or ()) <= set(suite.rows)
