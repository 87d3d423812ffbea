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
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help="Name or file of a suite (none: list them); several with --headline."),
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Location of a data set, as NAME:PATH; repeatable.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds (3) or a list (0,1,2; one seed: 5,); default: the suite's.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Run and show only this row; repeatable.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Stop cleanly after this time, as 25m or 2h; quick rows run first.")
    ] = None,
    headline: Annotated[
        bool,
        typer.Option(
            "--headline", help="Run only the two rows of each suite's headline claim, all suites in turn, seed by seed."
        ),
    ] = False,
    speed: Annotated[
        float, typer.Option(help="Images per second that this machine trains, for estimates before its first run.")
    ] = 0.0,
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
    from nearkin.benchmark import headlines, runner
    from nearkin.benchmark.suite import load_suite, suite_names
    from nearkin.benchmark.tables import suite_tables
    from nearkin.report.suite_figures import write_suite

    if not suites:
        titles = [[name, load_suite(name).title] for name in suite_names()]
        Console().print(PrintedTable("", ["suite", "what it is"], titles, text=True))
        return
    changed = dict(_parse_setting(text) for text in settings or ())
    chosen: dict[str, Any] = {"seeds": parse_seeds(seeds), "settings": changed, "out": out}
    reporter = progress_reporter()
    making: dict[str, Any] = {"data": data or (), "budget": budget, "speed": speed, "reporter": reporter}
    if headline and (rows or show):
        raise NearkinError("--headline has rows of its own and trains: leave out --rows and --show.")
    if headline:
        found = headlines.bench_headlines(suites, **chosen, **making)
    elif len(suites) > 1:
        raise NearkinError("Several suites run together only with --headline: give one, or add it.")
    elif show:
        found = [runner.suite_results(suites[0], rows=rows, **chosen)]
    else:
        found = [runner.bench(suites[0], rows=rows, **chosen, **making)]
    if stopped := next((results.stopped for results in found if results.stopped), ""):
        reporter.note(f"Stopped: {stopped}. Run the same command again to continue.")
    tables = [table for results in found for table in suite_tables(results)]
    if form == "terminal":
        Console().print(terminal(tables))
    else:
        print(markdown(tables) if form == "markdown" else latex(tables))
    whole = not rows and not headline  # a selection of rows must not replace the whole table
    if whole and (written := write_suite(found[0], out)):
        reporter.note(f"Written: {', '.join(map(str, written))}")
    if any(results.failed for results in found):
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
    out: Annotated[Path, typer.Option(help="The file to write; with --suite the folder.")],
    suites: Annotated[
        list[str] | None,
        typer.Option(
            "--suite", help="Add only the runs of this suite, to the file results.jsonl in its folder; repeatable."
        ),
    ] = None,
) -> None:
    """Merge the results of several machines into one file, or one per suite, and name the runs that disagree."""
    from nearkin.benchmark.results import merge as merge_results
    from nearkin.benchmark.runner import merge_suite

    if suites:
        found = {out / suite / "results.jsonl": merge_suite(files, suite, out) for suite in suites}
    else:
        found = {out: merge_results(files, out)}
    for path, merged in found.items():
        for sentence in merged.conflicts:
            print(sentence)
        print(f"{merged.runs} runs in {path}.")
