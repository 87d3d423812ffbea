"""The command line: one function a command. Errors are one sentence and exit code 2."""

import ast
import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

from nearkin.cli import search as search_commands
from nearkin.cli import studies as study_commands
from nearkin.console import Reporter, score_cells, terminal_table
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.networks.backbones import natural_plan
from nearkin.training.plan import Plan
from nearkin.training.run_folder import CHOSEN, RunFolder

# Which click typer stands on depends on its version; its own exceptions tell.
ClickException: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

STOPPED = 130
"""The exit code after Ctrl-C; typer itself may turn the interrupt into it."""

app = typer.Typer(
    help="Deep metric learning: train embedding models whose nearest neighbours are kin, and measure them honestly.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
methods_app = typer.Typer(help="The methods there are, and what each one's paper says.", invoke_without_command=True)
app.add_typer(methods_app, name="methods")


def train(
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one below runs/).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it was.")
    ] = False,
    **settings: Any,
) -> None:
    """Train a model and measure it on unseen classes; with no options, on the embedded glyphs."""
    from nearkin.report.sheets import neighbour_sheet
    from nearkin.training.launch import train as run_training
    from nearkin.training.measure_run import embed_test

    given = {name: value for name, value in settings.items() if value is not None}
    run = run_training(out=out, resume=resume, reporter=Reporter(Console()), **given)
    _show_result(run.path)
    device = read_json(run.config)["plan"]["device"]
    embedded = embed_test(run.path, device=device, reporter=Reporter(Console()))
    picture = neighbour_sheet(embedded, run.path / "neighbours.png")
    print(f"Nearest neighbours of test images: {picture}")


def _flags() -> list[inspect.Parameter]:
    """The fields of Plan as flags; None where one was not given, so that a backbone's own settings can show."""
    hints, own = get_type_hints(Plan), natural_plan(Plan.backbone)
    flags = []
    for field in dataclasses.fields(Plan):
        shown = ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        shown += f"; {Plan.backbone}: {own[field.name]}" if field.name in own else ""
        option = typer.Option(help=field.metadata["help"], show_default=shown or "empty")
        hint = str if get_origin(hints[field.name]) is tuple else hints[field.name]
        annotation = Annotated[hint | None, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return flags


def _with_flags(command: Any) -> Any:
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *_flags()])
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}
    return command


app.command()(_with_flags(train))


def _kept(select: str) -> str:
    return CHOSEN[select] + (", as asked: not comparable with honest scores" if select == "test" else "")


def _show_result(run: Path) -> None:
    folder = RunFolder(run)
    result = read_json(folder.result)
    header, cells = score_cells(
        {"before training": result["before"], read_json(folder.config)["plan"]["method"]: result["scores"]}
    )
    console = Console()
    console.print(terminal_table(header, cells, title="Unseen classes, percent"))
    left_out = f", {result['left_out']} without kin left out" if result["left_out"] else ""
    speed = (
        f"{result['images_per_second']:,.0f} images/s" if result["images_per_second"] else "no whole epoch was timed"
    )
    console.print(
        f"{result['queries']} queries{left_out}; kept: {_kept(result['select'])}; {result['seconds']:.0f} s, {speed}.",
        highlight=False,
    )
    console.print(f"Run folder: {escape(str(folder.path))}", highlight=False)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[str | None, typer.Option(help="Another data set to test on (default: the run's own).")] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics, with commas between (default: the run's own).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
) -> None:
    """Measure a run's model on the test classes."""
    from nearkin.training.measure_run import measure_run

    names = tuple(metrics.replace(" ", "").split(",")) if metrics else None
    reporter = Reporter(None if as_json else Console())
    scores = measure_run(run, data=data, metrics=names, device=device, reporter=reporter)
    select = read_json(RunFolder(run).config)["plan"]["select"]
    if as_json:
        found = {"scores": scores, "queries": scores.queries, "left_out": scores.left_out, "select": select}
        print(json.dumps(found))
        return
    Console().print(terminal_table(*score_cells({str(run): scores}), title="Unseen classes, percent"))
    print(f"{scores.queries} queries, {scores.left_out} without kin left out; kept: {_kept(select)}.")


@app.command()
def data(
    name: Annotated[
        str | None, typer.Argument(help="A data set: glyphs, folder:PATH, csv:PATH, cub:PATH, … (none: list them).")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the contact sheet (PNG).")] = Path("contact_sheet.png"),
    halves: Annotated[str, typer.Option(help="first or swapped: which half of the classes trains.")] = "first",
) -> None:
    """Show what is in a data set: counts, splits, what is wrong with it, and a contact sheet picture."""
    from nearkin.data.datasets import DATASETS, Part, describe, load_dataset
    from nearkin.data.pixels.open import unreadable
    from nearkin.report.sheets import class_sheet

    if name is None:
        rows_of = [[each, reader.help] for each, reader in DATASETS.items()]
        Console().print(terminal_table(["data set", "what it is"], rows_of, text=True))
        return
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise NearkinError(f"The contact sheet is a .png or .jpg file, not {out.name!r}.")
    console = Console()
    with Reporter(console).bar("reading") as progress:
        dataset = load_dataset(name, halves=halves, progress=progress)  # type: ignore[arg-type]
    cells = [
        [p.part, f"{p.images:,}", f"{p.classes:,}", str(p.fewest), f"{p.median:g}", str(p.most)]
        for p in describe(dataset)
    ]
    console.print(terminal_table(list(Part._fields), cells, title=f"{dataset.name} (last three: images per class)"))
    with Reporter(console).bar("reading every image") as progress:
        broken = unreadable(dataset, progress=progress)
    for sentence in (*dataset.notes, *broken):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    class_sheet(dataset.train, title=f"{name}: training classes").save(out)
    print(f"Contact sheet: {out}")


@app.command()
def bench(
    suite: Annotated[str | None, typer.Argument(help="A suite's name or file (none: list them).")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Where a data set lies, as cub:PATH; repeatable.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many seeds (3) or which (0,1,2, or 5, for one); default: the suite's.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Run and show only this row; repeatable.")] = None,
    budget: Annotated[str | None, typer.Option(help="Stop cleanly after this time, as 25m or 2h.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and results.jsonl.")] = Path("bench"),
    show: Annotated[bool, typer.Option("--show", help="Run nothing; show, and write, what is finished.")] = False,
    form: Annotated[
        Literal["terminal", "markdown", "latex"], typer.Option("--format", help="Of the table.")
    ] = "terminal",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting for all rows, as backbone=lite0; repeatable.")
    ] = None,
) -> None:
    """Run a suite: every row in one loop over several seeds, beside the paper's numbers. What is done is skipped.

    Table and figures are also written into the folder. The exit code is 1 where a run failed.
    """
    from nearkin.benchmark import runner as benchmark
    from nearkin.benchmark.suite import load_suite, suite_names
    from nearkin.benchmark.tables import suite_tables
    from nearkin.console import latex, markdown, terminal
    from nearkin.report.suite_figures import write_suite

    if suite is None:
        rows_of = [[name, load_suite(name).title] for name in suite_names()]
        Console().print(terminal_table(["suite", "what it is"], rows_of, text=True))
        return
    chosen: dict[str, Any] = {
        "seeds": _seeds(seeds),
        "rows": rows,
        "settings": dict(_setting(text) for text in settings or ()),
    }
    reporter = Reporter(Console(stderr=True))
    if show:
        found = benchmark.board(suite, out=out, **chosen)
    else:
        found = benchmark.bench(suite, data=data or (), budget=budget, out=out, reporter=reporter, **chosen)
        if found.stopped:
            reporter.note(f"Stopped: {found.stopped}. The same command goes on.")
    tables = suite_tables(found)
    if form == "terminal":
        Console().print(terminal(tables))
    else:
        print(markdown(tables) if form == "markdown" else latex(tables))
    if not rows and (written := write_suite(found, out)):  # some rows are not the suite's table
        reporter.note(f"Written: {', '.join(map(str, written))}")
    if found.failed:
        raise typer.Exit(1)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Files results.jsonl, of this and other machines.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Merge results of several machines into one file; runs that disagree are named."""
    from nearkin.benchmark.results import merge as merge_results

    merged = merge_results(files, out)
    for sentence in merged.conflicts:
        print(sentence)
    print(f"{merged.runs} runs in {out}.")


def _seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise NearkinError(f"Seeds are a number of them (3) or a list (0,1,2, or 5, for one), not {text!r}.") from None
    return numbers if "," in text else numbers[0]


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise NearkinError(f"A setting is written name=value, as backbone=lite0, not {text!r}.")
    hints = get_type_hints(Plan)
    if hints.get(name) is str:
        return name, value
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@methods_app.callback()
def methods(context: typer.Context) -> None:
    """List the methods, one line each."""
    if context.invoked_subcommand is None:
        from nearkin.methods.catalogue import method_rows

        Console().print(terminal_table(["method", "kind", "what it does"], method_rows(), text=True))
        print("\nnearkin methods show NAME prints equations, settings and departures.")


@methods_app.command("show")
def show_method(name: Annotated[str, typer.Argument(help="A method's name.")]) -> None:
    """Print a method's header: citation, equations, symbols, settings, departures."""
    from nearkin.methods.catalogue import method_page

    print(method_page(name))


app.command()(_with_flags(study_commands.cv))
for _command in (
    study_commands.report,
    study_commands.geometry,
    study_commands.ccp_demo,
    study_commands.proxies,
    study_commands.uncertainty,
    *search_commands.COMMANDS,
):
    app.command()(_command)


def main() -> None:
    """Run the command line; a wrong input is one sentence on standard error and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except NearkinError as error:
        print(f"nearkin: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(
            f"nearkin: {error.strerror or error}: {error.filename or 'a file'}; choose another path.", file=sys.stderr
        )
        sys.exit(2)
    except ClickException as error:
        print(f"nearkin: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    if code == STOPPED:
        print(
            "nearkin: stopped; the same command goes on with what is finished, and a training with nearkin train "
            "--resume --out ITS_FOLDER.",
            file=sys.stderr,
        )
    sys.exit(code if isinstance(code, int) else 0)
