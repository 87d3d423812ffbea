"""Commands that look into finished runs: one function each, registered in cli.py."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from nearkin.console import Reporter


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write (default: report.html, .md or .tex).")
    ] = None,
    form: Annotated[
        Literal["html", "markdown", "latex"],
        typer.Option("--format", help="A page with everything, or the tables alone."),
    ] = "html",
    data: Annotated[
        str | None, typer.Option(help="Another data set to test on, or where the run's own lies now.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page (default: methods and data).")] = "",
    points: Annotated[int, typer.Option(min=10, help="Test images on the t-SNE map, at most.")] = 1000,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Write a report of runs: settings, curves, scores with intervals, classes, neighbours, and tests between runs."""
    from nearkin.console import latex, markdown
    from nearkin.files import whole_file
    from nearkin.report.measured_runs import open_studies
    from nearkin.report.page import write_page
    from nearkin.report.run_tables import run_tables

    reporter = Reporter(Console(stderr=True))
    studies = open_studies(runs, data=data, device=device, reporter=reporter)
    path = out or Path({"html": "report.html", "markdown": "report.md", "latex": "report.tex"}[form])
    if form == "html":
        write_page(studies, path, title=title, points=points, reporter=reporter)
    else:
        tables = run_tables(studies)
        with whole_file(path) as temporary:
            temporary.write_text(markdown(tables) if form == "markdown" else latex(tables), encoding="utf-8")
    print(f"Report: {path}")


def cv(
    *,
    repeats: Annotated[
        int | None, typer.Option(help="How often, with seeds that follow each other (default: 1, or as before).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the models (default: a new one below runs/).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in --out; --repeats may be more than before.")
    ] = False,
    **settings: Any,
) -> None:
    """Cross-validate over classes: four models (--folds), each choosing its epoch on the quarter it holds out.

    All are tested on unseen classes, one by one and with their embeddings side by side (nearkin eval OUT measures both
    again; wherever a run's folder is asked for, OUT is all of them as one model).
    """
    from nearkin.console import terminal_table
    from nearkin.training.cross_validation import cross_validate, score_rows

    given = {name: value for name, value in settings.items() if value is not None}
    done = cross_validate(out=out, repeats=repeats, resume=resume, reporter=Reporter(Console(stderr=True)), **given)
    console = Console()
    console.print(terminal_table(*score_rows(done), title="Unseen classes, percent"))
    spread = f"; ± is the standard error over {len(done.runs)} repeats" if len(done.runs) > 1 else ""
    console.print(f"{done.steps.mean:,.0f} steps a model{spread}.", highlight=False)
    console.print(f"Folder: {done.runs[0].path}", highlight=False, markup=False)


def proxies(
    run: Annotated[Path, typer.Argument(help="Folder of a run with proxies.")],
    baseline: Annotated[Path | None, typer.Option(help="Another run, drawn beside it.")] = None,
    epochs: Annotated[
        str | None, typer.Option(help="Which snapshots, as 0,30,80 (default: a few of those there are).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures (default: RUN/pictures).")] = None,
    points: Annotated[int, typer.Option(min=10, help="Training images on a map, at most.")] = 1000,
    data: Annotated[str | None, typer.Option(help="Where the run's data set lies now.")] = None,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Draw a run's proxies: maps and cosines with training images over epochs, scores, class hardness, outliers.

    Train with --snapshots 0,30,80 to have several epochs, and with --evaluate-every 1 for the curve of scores.
    """
    from nearkin.errors import NearkinError
    from nearkin.studies.proxies import draw_run

    try:
        wanted = None if epochs is None else [int(part) for part in epochs.split(",")]
    except ValueError:
        raise NearkinError(f"Epochs are whole numbers with commas between, as 0,30,80, not {epochs!r}.") from None
    reporter = Reporter(Console(stderr=True))
    written = draw_run(
        run, out=out, baseline=baseline, epochs=wanted, points=points, data=data, device=device, reporter=reporter
    )
    for path in written:
        print(path)


def geometry(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    data: Annotated[
        str | None, typer.Option(help="Another data set to test on, or where the run's own lies now.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Measure how test classes lie: covering radius and distance between classes, before and after training.

    Of a run with ccp also the steps of its sub-problems, with their histogram as sub_problems.png in its folder.
    """
    from nearkin.console import terminal_table
    from nearkin.studies.geometry import draw_sub_problems, geometry_rows, sub_problems

    reporter = Reporter(Console(stderr=True))
    header, cells = geometry_rows(runs, data=data, device=device, reporter=reporter)
    Console().print(terminal_table(header, cells, title="Unseen classes"))
    for run in runs:
        if lengths := sub_problems(run):
            print(draw_sub_problems(lengths, run / "sub_problems.png"))


def ccp_demo(
    out: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.")] = Path("ccp_digits.png"),
    seed: Annotated[int, typer.Option(help="Seed of network, proxies and batches.")] = 0,
) -> None:
    """Show what CCP does to proxies: digits in two dimensions, trained in one go and in sub-problems (a minute)."""
    from nearkin.console import terminal_table
    from nearkin.studies.digits import digits_demo

    outcomes = digits_demo(out, seed=seed, reporter=Reporter(Console(stderr=True)))
    header = ["", *outcomes[0].numbers]
    cells = [[o.name, *(f"{v:.2f}" if v > 10 else f"{v:.4f}" for v in o.numbers.values())] for o in outcomes]
    Console().print(terminal_table(header, cells, title="Digits that were not trained on"))
    for outcome in outcomes:
        apart = ", ".join(f"{spread:.4f}" for spread in outcome.spreads)
        print(f"{outcome.name}: a proxy spread of {apart} at the end.")
    print(f"Picture: {out}")


def uncertainty(
    run: Annotated[Path, typer.Argument(help="Folder of a run with vcpa.")],
    out: Annotated[Path | None, typer.Option(help="Folder for table and pictures (default: RUN/uncertainty).")] = None,
    points: Annotated[int, typer.Option(min=10, help="Training images on the t-SNE map, at most.")] = 1500,
    data: Annotated[str | None, typer.Option(help="Where the run's data set lies now.")] = None,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Show how certain a run is of its training classes, and which of them lie closest and farthest.

    Writes a table of all classes, sheets of the most and least certain ones and of pairs, and a map with circles.
    """
    from nearkin.console import terminal_table
    from nearkin.studies.uncertainty import class_rows, write_uncertainty

    reporter = Reporter(Console(stderr=True))
    found, written = write_uncertainty(run, out=out, points=points, data=data, device=device, reporter=reporter)
    Console().print(terminal_table(*class_rows(found), title="Training classes, the most certain and the least"))
    print(f"Pearson's correlation of uncertainty and median similarity: {found.correlation:.2f}")
    for path in written:
        print(path)
