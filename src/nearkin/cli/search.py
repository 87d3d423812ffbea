"""Commands from images to a search page: embed, index, calibrate, search, serve."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from nearkin.cli.options import (
    DeviceOption,
    IndexArgument,
    MovedRunOption,
    RunArgument,
    StrictOption,
    progress_reporter,
)
from nearkin.errors import NearkinError, above_zero
from nearkin.files import write_text

app = typer.Typer()


@app.command()
def embed(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(help="Image files, folders, or csv tables (path, label).")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file, .parquet or .npz; with --part or --on a folder of parts.")
    ],
    part: Annotated[
        str | None, typer.Option(help="Embed only this part of the images, such as 3/8; a finished part is skipped.")
    ] = None,
    on: Annotated[Literal["ray"] | None, typer.Option(help="Embed in parts on the machines of a Ray cluster.")] = None,
    strict: StrictOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Embed images into a file: path, label, embedding. Safe to interrupt; run it again to continue."""
    from nearkin.data.image_files import list_images
    from nearkin.search.embed import embed_to_file
    from nearkin.search.parts import Part, embed_one_part, parts_folder
    from nearkin.training.model import load

    if part is not None and on is not None:
        raise NearkinError("--on ray makes the parts itself: leave out --part or --on.")
    chosen = None if part is None else Part.parse(part)
    where = out if part is None and on is None else parts_folder(out)
    reporter = progress_reporter(strict=strict)
    found = list_images(images, reporter.leave_out)
    if on is not None:
        from nearkin.search.on_ray import embed_on_ray

        filled = embed_on_ray(run, found, where, device=device, reporter=reporter)
    elif chosen is not None:
        where = chosen.file(out)
        filled = embed_one_part(run, found, out, chosen, device=device, reporter=reporter)
    else:
        filled = embed_to_file(run, load(run, device=device), found, out, reporter=reporter)
    print(f"{filled.added + filled.kept:,} images embedded: {where}")


@app.command()
def index(
    run: Annotated[Path, typer.Argument(help="Folder of the run whose model embeds the images.")],
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Image files, folders (one per class gives the labels), or csv tables (path, label); or what nearkin "
            "embed wrote, a .parquet file or a folder of all parts."
        ),
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder of the index, new or to add to; see also --store.")
    ] = None,
    kind: Annotated[
        Literal["exact", "hnsw", "ivfpq"] | None,
        typer.Option(help="Search of a new index: exact, or approximate.", show_default="exact"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store items in postgresql://…, qdrant://host:port/collection or lance:///folder; "
            "--out keeps the address."
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove items whose files no longer exist.")] = False,
    strict: StrictOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Index images for search; embeds only new and changed ones. Safe to interrupt; run it again to continue."""
    from nearkin.data.image_files import list_images
    from nearkin.search.build import index_images, summary
    from nearkin.search.parts import embedded_files

    if out is None and store is None:
        raise NearkinError("The index needs a place: --out FOLDER or --store URL.")
    reporter = progress_reporter(strict=strict)
    embedded = {place: embedded_files(place) for place in images}
    places = [place for place, files in embedded.items() if not files]
    done = index_images(
        run,
        list_images(places, reporter.leave_out) if places else [],
        out or str(store),
        embedded=[file for files in embedded.values() for file in files],
        kind=kind,
        store=store,
        prune=prune,
        device=device,
        reporter=reporter,
    )
    for line in summary(done):
        print(line)


@app.command()
def calibrate(
    run: RunArgument,
    precision: Annotated[
        float, typer.Option(help="Precision to reach: share of same-class pairs among those above the threshold.")
    ] = 0.95,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set to choose the threshold on, as NAME:PATH; classes of the training are left out.",
            show_default="the run's held-out training classes",
        ),
    ] = None,
    strict: StrictOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Choose the similarity above which two images count as the same class, and store it in the run folder."""
    from nearkin.search.calibrate import calibrate as choose

    found = choose(run, data=data, precision=precision, device=device, reporter=progress_reporter(strict=strict))
    checked = "" if found["checked"] is None else f" ({found['checked']:.1%} on other classes)"
    print(f"Same class above a similarity of {found['similarity']:.4f}.")
    print(f"Precision {found['reached']:.1%}{checked}, recall {found['recall']:.1%} of same-class pairs.")
    print(
        f"Calibrated on {found['on']}: {found['classes']:,} classes, {found['images']:,} images, "
        f"{found['positive_pairs'] / found['pairs']:.2%} of pairs same-class. More classes lower the precision."
    )


@app.command()
def search(
    index: IndexArgument,
    images: Annotated[list[Path], typer.Argument(help="Query images: files or folders.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of items to find per image.")] = 10,
    label: Annotated[list[str] | None, typer.Option(help="Only items of this label; repeatable.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with the pictures.")] = None,
    form: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="Format of the results.")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    run: MovedRunOption = None,
    strict: StrictOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Find the items nearest to images, as tables, csv or JSON, and as an HTML page."""
    from nearkin.data.image_files import list_images
    from nearkin.data.pixels.formats import describe_misnamed
    from nearkin.data.pixels.image_bytes import none_usable
    from nearkin.report.search_results import search_page
    from nearkin.search.index.engines import without_password
    from nearkin.search.names import escape_name
    from nearkin.search.parts import open_searchable
    from nearkin.search.query import (
        as_records,
        check_labels,
        model_of,
        printed,
        search_images,
        threshold_of,
        threshold_words,
        write_csv,
    )

    if as_json and form != "table":
        raise NearkinError("--json is the same as --format json: leave out --json or --format.")
    reporter = progress_reporter(strict=strict, silent=True)
    found = list_images(images, reporter.leave_out)
    with open_searchable(index, run=run) as opened:
        check_labels(opened, label or ())
        threshold = threshold_of(opened, run)
        model = model_of(opened, run=run, device=device)
        answers, bad = search_images(opened, model, found, k=k, labels=label, run=run)
    if not answers:
        raise none_usable(bad, len(found))
    reporter.leave_out(image.left_out for image in bad)
    title = f"Search in {without_password(index)}"
    if html is not None:
        write_text(html, search_page(answers, title=title, note=threshold_words(threshold)))
    if as_json or form == "json":
        print(json.dumps(as_records(answers, bad, threshold), indent=2))
        return
    if form == "table":
        print(*map(printed, answers), sep="\n\n", end="\n\n")
    else:
        write_csv(answers, sys.stdout)
    misnamed = describe_misnamed(Path(image.path) for image in found)
    notes = sys.stdout if form == "table" else sys.stderr  # a program may read the csv
    for line in (*misnamed, threshold_words(threshold)):
        print(escape_name(line), file=notes)
    if html is not None:
        print(f"Pictures: {html}", file=notes)


@app.command()
def serve(
    index: IndexArgument,
    run: MovedRunOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 admits other machines and requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on (0: any free one).")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="NEARKIN_TOKEN", help="Password of page and API; auto generates one and prints it."),
    ] = None,
    max_upload_mb: Annotated[float, typer.Option(help="Largest upload, in megabytes.")] = 20,
    max_pixels: Annotated[int, typer.Option(help="Largest picture, in pixels.")] = 50_000_000,
    device: DeviceOption = "auto",
) -> None:
    """Serve a page that searches an index by picture, and a JSON API (documented at /docs)."""
    try:
        from nearkin.serve import Limits
        from nearkin.serve import serve as run_server
    except ModuleNotFoundError as error:
        raise NearkinError(f"The server needs the package {error.name}: pip install 'nearkin[serve]'.") from None
    above_zero("serve", max_upload_mb=max_upload_mb)
    limits = Limits(upload_bytes=int(max_upload_mb * 2**20), pixels=max_pixels)
    run_server(
        index,
        run=run,
        host=host,
        port=port,
        token=token,
        device=device,
        limits=limits,
        say=lambda sentence: print(sentence, flush=True),
    )
