"""Commands that study finished runs: report, proxies, geometry, uncertainty, and the CCP demo."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from nearkin.cli.options import (
    DeviceOption,
    MovedDataOption,
    RunsArgument,
    TestDataOption,
    progress_reporter,
)
from nearkin.console import PrintedTable, latex, markdown
from nearkin.errors import NearkinError
from nearkin.files import atomic_file

app = typer.Typer()


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write (default: report.html, .md or .tex).")
    ] = None,
    form: Annotated[
        Literal["html", "markdown", "latex"],
        typer.Option("--format", help="An HTML page with everything, or only the tables."),
    ] = "html",
    data: TestDataOption = None,
    title: Annotated[str, typer.Option(help="Title of the page (default: methods and data).")] = "",
    points: Annotated[int, typer.Option(min=10, help="Test images on the t-SNE map, at most.")] = 1000,
    device: DeviceOption = "auto",
) -> None:
    """Write a report of runs: settings, curves, scores with intervals, classes, neighbours, significance tests."""
    from nearkin.report.comparison import run_tables
    from nearkin.report.measured_runs import open_runs
    from nearkin.report.page import write_page

    reporter = progress_reporter()
    measured = open_runs(runs, data=data, device=device, reporter=reporter)
    path = out or Path({"html": "report.html", "markdown": "report.md", "latex": "report.tex"}[form])
    if form == "html":
        write_page(measured, path, title=title, points=points, reporter=reporter)
    else:
        tables = run_tables(measured)
        with atomic_file(path) as temporary:
            temporary.write_text(markdown(tables) if form == "markdown" else latex(tables), encoding="utf-8")
    print(f"Report: {path}")


@app.command()
def review(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or a folder of images with one folder per class.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for page and table (default: RUN/review, or review).")
    ] = None,
    data: TestDataOption = None,
    backbone: Annotated[str, typer.Option(help="Network for a folder of images: its features are used.")] = "lite0",
    device: DeviceOption = "auto",
) -> None:
    """List what to look at in labelled images, worst first: wrong labels, copies, leaks, mixed classes, outliers.

    Writes a page with pictures and a csv table with everything.
    """
    from nearkin.report.review import KINDS
    from nearkin.report.review import review as run_review

    done = run_review(source, out=out, data=data, backbone=backbone, device=device, reporter=progress_reporter())
    counts = [[title, str(sum(f.kind == kind for f in done.findings))] for kind, title in KINDS.items()]
    Console().print(PrintedTable("What to look at", ["", "found"], counts, text=True))
    print(f"Page: {done.page}")
    print(f"Table: {done.table}")


@app.command()
def proxies(
    run: Annotated[Path, typer.Argument(help="Folder of a run with proxies.")],
    baseline: Annotated[
        list[Path] | None, typer.Option(help="Another run, drawn beside it; may be given several times.")
    ] = None,
    epochs: Annotated[str | None, typer.Option(help="Which snapshots, as 0,30,80 (default: a few of them).")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures (default: RUN/pictures).")] = None,
    points: Annotated[int, typer.Option(min=10, help="Training images on a map, at most.")] = 1000,
    data: MovedDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Draw the proxies of a run: maps and cosines with training images over epochs, scores, hardness, outliers.

    Train with --snapshots 0,30,80 to see several epochs, and with --evaluate-every 1 for the curve of scores.
    """
    from nearkin.studies.proxies import draw_proxies

    try:
        wanted = None if epochs is None else [int(part) for part in epochs.split(",")]
    except ValueError:
        raise NearkinError(f"--epochs takes whole numbers separated by commas, as 0,30,80, not {epochs!r}.") from None
    reporter = progress_reporter()
    written = draw_proxies(
        run,
        out=out,
        baselines=baseline or (),
        epochs=wanted,
        points=points,
        data=data,
        device=device,
        reporter=reporter,
    )
    for path in written:
        empty = path.name == "filtered.csv" and len(path.read_text(encoding="utf-8").splitlines()) == 1
        print(f"{path} (empty: no image was filtered)" if empty else path)


@app.command()
def geometry(
    runs: RunsArgument,
    data: TestDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure the geometry of the test classes, before and after training: covering radius, distance between classes.

    Also draw, into the folder of a run: geometry.png, a map of the test classes at each epoch of --snapshots, and for a
    run with ccp sub_problems.png, a histogram of the steps per sub-problem.
    """
    from nearkin.studies.geometry import draw_geometry, draw_sub_problems, geometry_rows, sub_problems

    reporter = progress_reporter()
    header, cells = geometry_rows(runs, data=data, device=device, reporter=reporter)
    Console().print(PrintedTable("Test classes", header, cells))
    for run in runs:
        if lengths := sub_problems(run):
            print(draw_sub_problems(lengths, run / "sub_problems.png"))
        elif lengths is not None:
            print(f"{run}: no sub-problem of ccp ended, so there is no histogram of their steps.")
        if drawn := draw_geometry(run, run / "geometry.png", data=data, device=device, reporter=reporter):
            print(f"Maps by epoch: {drawn}")


@app.command()
def ccp_demo(
    out: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.")] = Path("ccp_digits.png"),
    seed: Annotated[int, typer.Option(help="Seed of network, proxies and batches.")] = 0,
) -> None:
    """Show what CCP does to proxies: digits in two dimensions, trained with and without sub-problems (one minute)."""
    from nearkin.studies.digits import digits_demo

    outcomes = digits_demo(out, seed=seed, reporter=progress_reporter())
    header = ["", *outcomes[0].numbers]
    cells = [[o.name, *(f"{v:.2f}" if v > 10 else f"{v:.4f}" for v in o.numbers.values())] for o in outcomes]
    Console().print(PrintedTable("Digits not trained on", header, cells))
    for outcome in outcomes:
        spreads = ", ".join(f"{moment.numbers['proxy spread']:.4f}" for moment in outcome.moments)
        print(f"{outcome.name}: final proxy spread {spreads}.")
    print(f"Picture: {out}")


@app.command()
def uncertainty(
    run: Annotated[Path, typer.Argument(help="Folder of a run with vcpa.")],
    out: Annotated[Path | None, typer.Option(help="Folder for table and pictures (default: RUN/uncertainty).")] = None,
    points: Annotated[int, typer.Option(min=10, help="Training images on the t-SNE map, at most.")] = 1500,
    data: MovedDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Show how certain a run is of its training classes, and which of them are closest and farthest apart.

    Writes a table of all classes, sheets of the most and least certain ones and of pairs, and a map with circles.
    """
    from nearkin.studies.uncertainty import class_rows, write_uncertainty

    reporter = progress_reporter()
    found, written = write_uncertainty(run, out=out, points=points, data=data, device=device, reporter=reporter)
    Console().print(PrintedTable("Training classes, most and least certain", *class_rows(found)))
    print(f"Pearson's correlation of uncertainty and median similarity: {found.correlation:.2f}")
    for path in written:
        print(path)
