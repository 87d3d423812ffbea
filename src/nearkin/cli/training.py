"""Commands for data sets, methods, and training and measuring one model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from nearkin import ranks
from nearkin.cli.options import (
    Commands,
    ConfigOption,
    DeviceOption,
    JsonOption,
    MovedDataOption,
    RunArgument,
    StrictOption,
    TestDataOption,
    changed_settings,
    output_reporter,
    progress_reporter,
    resumable,
    with_plan_flags,
)
from nearkin.console import PrintedTable, score_cells
from nearkin.data.datasets import dataset_names
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json
from nearkin.training.gain import read_gain
from nearkin.training.run_folder import CHOSEN, RunFolder

app = typer.Typer()
methods_app = typer.Typer(
    cls=Commands, help="List the methods, or show what the paper of one says.", invoke_without_command=True
)
app.add_typer(methods_app, name="methods")


@app.command()
@with_plan_flags
def train(
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one below runs/).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out exactly where it was interrupted.")
    ] = False,
    strict: StrictOption = False,
    config: ConfigOption = None,
    **settings: Any,
) -> None:
    """Train a model and measure it on the test classes of its data; without options, on the embedded glyphs."""
    from nearkin.report.picture_sheets import neighbour_sheet
    from nearkin.training.images import Embedded
    from nearkin.training.launch import train as run_training
    from nearkin.training.measure_run import embed_test

    reporter = output_reporter(strict=strict)
    tested: list[Embedded] = []
    chosen = changed_settings(settings)
    with resumable("train"):
        run = run_training(out=out, resume=resume, reporter=reporter, after_test=tested.append, config=config, **chosen)
    _show_result(run)
    if not read_json(run.result)["scores"]:
        return
    if not ranks.broadcast(bool(tested)):  # the run was finished before
        device = read_json(run.config)["plan"]["device"]
        tested.append(embed_test(run.path, device=device, reporter=reporter, over_ranks=True))
    if not ranks.is_first():
        return
    picture = neighbour_sheet(tested[0], run.path / "neighbours.png")
    print(f"Nearest neighbours of test images: {picture}")


def _show_result(run: RunFolder) -> None:
    result = run.read_result()
    rows = {"before training": result["before"], read_json(run.config)["plan"]["method"]: result["scores"]}
    console = Console()
    if result["scores"]:
        console.print(PrintedTable(_scores_title(result), *score_cells(rows)))
    else:
        print("All classes trained, so no score could be measured.")
    if expected := result.get("expected"):
        from nearkin.training.expected import describe_expected, expected_table

        console.print(describe_expected(expected), highlight=False, markup=False)
        console.print(PrintedTable("", *expected_table(expected)))
    speed = result["images_per_second"]
    timing = f"{speed:,.0f} images/s" if speed else "no whole epoch was timed"
    queries = f"{_queries(result['queries'], result['left_out'])}; " if result["scores"] else ""
    shown = _test_view(read_json(run.config).get("resolved", {}), result)
    console.print(
        f"{queries}{shown}kept: {_kept(result['select'])}; {result['seconds']:.0f} s, {timing}.", highlight=False
    )
    if gain := read_gain(result):
        console.print(str(gain), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Run folder: {escape(str(run.path))}", highlight=False)


def _test_view(resolved: Json, result: Json) -> str:
    """How test images were shown, if it was chosen or is not as in training."""
    from nearkin.training.chosen_view import describe_view

    if chosen := result.get("test_view"):
        return f"test images at {describe_view(chosen)}; "
    size, shown = resolved.get("size", 0), resolved.get("test_size", 0)
    return f"trained at {size} px, tested at {shown} px; " if shown not in (0, size) else ""


def _scores_title(result: Json) -> str:
    from nearkin.training.seen_classes import SeenClasses

    tested = result.get("test_classes")  # older runs did not count them
    return f"{SeenClasses(**tested).title if tested else 'Test classes'}, percent"


def _queries(count: int, left_out: int) -> str:
    return f"{count} queries" + (f", {left_out} left out because their class has no other image" if left_out else "")


def _kept(select: str) -> str:
    return CHOSEN[select] + (", as requested: not comparable with honest scores" if select == "test" else "")


@app.command()
def ship(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was evaluated.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the new run (default: RUN-shipped).")] = None,
    data: MovedDataOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Train again on all classes, with the settings of an evaluated run and as many epochs as it kept.

    The new model cannot be measured on its data any more. The scores of RUN are recorded as the expected ones.
    """
    from nearkin.training.ship import ship as train_on_all

    with resumable("train"):
        _show_result(train_on_all(run, out=out, data=data, device=device, reporter=output_reporter()))


@app.command("eval")
def evaluate(
    run: RunArgument,
    data: TestDataOption = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="Measure what nearkin embed wrote: a .parquet file or a folder of all parts.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics, separated by commas (default: those of the run).")
    ] = None,
    as_json: JsonOption = False,
    strict: StrictOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Measure the model of a run on the test classes."""
    from nearkin.search.parts import measure_embedded
    from nearkin.training.measure_run import measure_run

    if data is not None and embeddings is not None:
        raise NearkinError("Either --data is measured or --embeddings: leave one out.")
    names = tuple(name.strip() for name in metrics.split(",")) if metrics else None
    reporter = progress_reporter(strict=strict, silent=True) if as_json else output_reporter(strict=strict)
    if embeddings is not None:
        scores = measure_embedded(run, embeddings, metrics=names, device=device)
    else:
        scores = measure_run(run, data=data, metrics=names, device=device, reporter=reporter)
    select = read_json(RunFolder(run).config)["plan"]["select"]
    if as_json:
        found = {"scores": scores, "queries": scores.queries, "left_out": scores.left_out, "select": select}
        found["test_classes"] = scores.tested._asdict()
        print(json.dumps(found))
        return
    Console().print(PrintedTable(f"{scores.tested.title}, percent", *score_cells({str(run): scores})))
    print(f"{_queries(scores.queries, scores.left_out)}; kept: {_kept(select)}.")


@app.command()
@with_plan_flags
def cv(
    *,
    repeats: Annotated[
        int | None, typer.Option(help="Number of repeats, with consecutive seeds (default: 1, or as before).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the models (default: a new one below runs/).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what is in --out; --repeats may be larger than before.")
    ] = False,
    strict: StrictOption = False,
    config: ConfigOption = None,
    **settings: Any,
) -> None:
    """Cross-validate over classes: four models (--folds), each choosing its epoch on the quarter it holds out.

    All are tested on the test classes, one by one and with their embeddings concatenated. nearkin eval OUT measures
    both again. Every command that takes the folder of a run accepts OUT as one model.
    """
    from nearkin.training.cross_validation import cross_validate, score_rows
    from nearkin.training.settings_file import read_settings

    chosen = {**(read_settings(config) if config else {}), **changed_settings(settings)}
    with resumable("cv"):
        reporter = progress_reporter(strict=strict)
        done = cross_validate(out=out, repeats=repeats, resume=resume, reporter=reporter, **chosen)
    console = Console()
    console.print(PrintedTable(_scores_title(read_json(done.runs[0].result)), *score_rows(done)))
    spread = f"; ± is the standard error over {len(done.runs)} repeats" if len(done.runs) > 1 else ""
    console.print(f"{done.steps.mean:,.0f} steps per model{spread}.", highlight=False)
    console.print(f"Folder: {done.runs[0].path}", highlight=False, markup=False)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: .onnx, or .pt2 for torch.export.")],
    images: Annotated[
        list[Path] | None,
        typer.Option(help="An image for the check; repeatable (default: the photographs in scikit-learn)."),
    ] = None,
) -> None:
    """Write the model of a run as ONNX or as a torch.export program, and check the file on real images."""
    from nearkin.data.images import counted
    from nearkin.training.export import TOLERANCE
    from nearkin.training.export import export as write

    done = write(run, out, images=images or ())
    print(f"{done.path}: images {done.about['input']['shape']} to embeddings {done.about['output']['shape']}.")
    on = counted(done.images, "image", "images")
    print(f"Largest difference from PyTorch on {on}: {done.difference:.1e} (allowed: {TOLERANCE:.0e}).")


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help=f"One of {dataset_names()} (none: list them).")] = None,
    out: Annotated[Path, typer.Option(help="File for the contact sheet (PNG).")] = Path("contact_sheet.png"),
    halves: Annotated[str, typer.Option(help="Which half of the classes to train on: first or swapped.")] = "first",
    strict: StrictOption = False,
    test: Annotated[str, typer.Option(help="What to test on: split, or none if all classes train.")] = "split",
) -> None:
    """Describe a data set: counts, splits, unreadable images, and a contact sheet."""
    from nearkin.data.datasets import DATASETS, PartCounts, describe, load_dataset
    from nearkin.data.pixels.open import find_unreadable
    from nearkin.report.picture_sheets import class_sheet, save_sheet

    console = Console()
    if name is None:
        rows = [[each, reader.help] for each, reader in DATASETS.items()]
        console.print(PrintedTable("", ["data set", "what it is"], rows, text=True))
        return
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise NearkinError(f"--out must be a .png or .jpg file, not {out.name!r}.")
    reporter = output_reporter(strict=strict)
    with reporter.bar("reading") as progress:
        dataset = load_dataset(name, halves=halves, test=test, progress=progress)  # type: ignore[arg-type]
    cells = [
        [p.part, f"{p.images:,}", f"{p.classes:,}", str(p.fewest), f"{p.median:g}", str(p.most)]
        for p in describe(dataset)
    ]
    console.print(PrintedTable(f"{dataset.name} (last three: images per class)", list(PartCounts._fields), cells))
    reporter.leave_out(dataset.left_out)
    with reporter.bar("reading every image") as progress:
        broken = find_unreadable(dataset, reporter.leave_out, progress=progress)
    for sentence in (*dataset.notes, *broken):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    save_sheet(class_sheet(dataset.train, title=f"{name}: training classes"), out)
    print(f"Contact sheet: {out}")


@app.command()
def recipes() -> None:
    """List the recipes: named sets of settings for nearkin train, and the evidence for each."""
    from nearkin.training.recipes import recipes as all_recipes

    rows = [[each.name, each.title, each.source, each.evidence] for each in all_recipes().values()]
    Console().print(PrintedTable("", ["recipe", "what it is", "source", "evidence"], rows, text=True))
    print("\nnearkin train --recipe NAME uses one; flags are preferred to it.")


@methods_app.callback()
def methods(context: typer.Context) -> None:
    """List the methods, one line each."""
    if context.invoked_subcommand is None:
        from nearkin.methods.catalogue import method_rows

        Console().print(PrintedTable("", ["method", "kind", "what it does"], method_rows(), text=True))
        print("\nnearkin methods show NAME prints equations, settings and departures.")


@methods_app.command("show")
def show_method(name: Annotated[str, typer.Argument(help="Name of a method.")]) -> None:
    """Print the header of a method: citation, equations, symbols, settings, departures."""
    from nearkin.methods.catalogue import method_page

    print(method_page(name))
