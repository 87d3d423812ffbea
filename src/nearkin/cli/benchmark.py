"""Commands that run a suite of methods and merge results."""

import ast
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console

from nearkin.cli.options import progress_reporter
from nearkin.console import PrintedTable, latex, markdown, terminal
from nearkin.errors import NearkinError
from nearkin.training.plan import Plan

app = typer.Typer()


@app.command()
def bench(
    suite: Annotated[str | None, typer.Argument(help="Name or file of a suite (none: list them).")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Location of a data set, as NAME:PATH; repeatable.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds (3) or a list (0,1,2; one seed: 5,); default: the suite's.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Run and show only this row; repeatable.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Stop cleanly after this time, as 25m or 2h; quick rows run first.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and results.jsonl.")] = Path("bench"),
    show: Annotated[
        bool, typer.Option("--show", help="Train nothing; show the finished runs and write table and figures.")
    ] = False,
    form: Annotated[
        Literal["terminal", "markdown", "latex"], typer.Option("--format", help="Format of the table.")
    ] = "terminal",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting for all rows, as backbone=lite0; repeatable.")
    ] = None,
) -> None:
    """Run a suite: every row in one loop over several seeds, beside the paper's numbers. Finished runs are skipped.

    Table and figures are also written into the folder. The exit code is 1 if a run failed.
    """
    from nearkin.benchmark import runner
    from nearkin.benchmark.suite import load_suite, suite_names
    from nearkin.benchmark.tables import suite_tables
    from nearkin.report.suite_figures import write_suite

    if suite is None:
        titles = [[name, load_suite(name).title] for name in suite_names()]
        Console().print(PrintedTable("", ["suite", "what it is"], titles, text=True))
        return
    chosen: dict[str, Any] = {
        "seeds": parse_seeds(seeds),
        "rows": rows,
        "settings": dict(_parse_setting(text) for text in settings or ()),
    }
    reporter = progress_reporter()
    if show:
        results = runner.suite_results(suite, out=out, **chosen)
    else:
        results = runner.bench(suite, data=data or (), budget=budget, out=out, reporter=reporter, **chosen)
        if results.stopped:
            reporter.note(f"Stopped: {results.stopped}. Run the same command again to continue.")
    tables = suite_tables(results)
    if form == "terminal":
        Console().print(terminal(tables))
    else:
        print(markdown(tables) if form == "markdown" else latex(tables))
    if not rows and (written := write_suite(results, out)):  # a selection of rows must not replace the whole table
        reporter.note(f"Written: {', '.join(map(str, written))}")
    if results.failed:
        raise typer.Exit(1)


def parse_seeds(text: str | None) -> int | list[int] | None:
    """A number of seeds ("3") or a list of them ("0,1,2", or "5," for one)."""
    if text is None:
        return None
    try:
        numbers = [int(number) for number in text.removesuffix(",").split(",")]
    except ValueError:
        raise NearkinError(
            f"--seeds takes a number of seeds (3) or a list (0,1,2; one seed: 5,), not {text!r}."
        ) from None
    return numbers if "," in text else numbers[0]


def _parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise NearkinError(f"--set takes name=value, as backbone=lite0, not {text!r}.")
    if get_type_hints(Plan).get(name) is str:
        return name, value
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Files results.jsonl, from this and other machines.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Merge the results of several machines into one file and name the runs that disagree."""
    from nearkin.benchmark.results import merge as merge_results

    merged = merge_results(files, out)
    for sentence in merged.conflicts:
        print(sentence)
    print(f"{merged.runs} runs in {out}.")
