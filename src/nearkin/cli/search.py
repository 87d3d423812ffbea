"""Commands that lead from images to a search page: one function each, registered in cli.py."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from nearkin.console import Reporter
from nearkin.errors import NearkinError, above_zero


def embed(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, folders, or csv tables (path, label).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: .parquet or .npz.")],
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
) -> None:
    """Embed images into a file: path, label, embedding. Stopped at any moment, the same command goes on."""
    from nearkin.data.image_files import gather, say_bad
    from nearkin.search.embed import embed_to_file
    from nearkin.training.model import load

    found = gather(images)
    filled = embed_to_file(run, load(run, device=device), found, out, reporter=Reporter(Console(stderr=True)))
    for line in say_bad(filled.bad, len(found)):
        print(line)
    print(f"{filled.added + filled.kept:,} images embedded: {out}")


def index(
    run: Annotated[Path, typer.Argument(help="Folder of the run whose model embeds the images.")],
    images: Annotated[
        list[Path],
        typer.Argument(help="Image files, folders (one folder a class names the labels), or csv tables (path, label)."),
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The index: a folder, new or to be added to; see --store.")
    ] = None,
    kind: Annotated[
        Literal["exact", "hnsw", "ivfpq"] | None,
        typer.Option(help="How a new index searches: exact, or approximately with faiss.", show_default="exact"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Keep the items in postgresql://… or qdrant://host:port/collection; --out remembers where."),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove items whose files are no longer there.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
) -> None:
    """Index images for search. Only what is new or has changed is embedded; stopped at any moment, it goes on."""
    from nearkin.data.image_files import gather, say_bad
    from nearkin.search.build import index_images, summary

    if out is None and store is None:
        raise NearkinError("Say where the index is to be: --out FOLDER or --store URL.")
    found = gather(images)
    reporter = Reporter(Console(stderr=True))
    done = index_images(
        run, found, out or str(store), kind=kind, store=store, prune=prune, device=device, reporter=reporter
    )
    for line in (*say_bad(done.filled.bad, len(found)), *summary(done)):
        print(line)


def calibrate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    precision: Annotated[
        float, typer.Option(help="Of the pairs at least as similar, the part that shall be of one class.")
    ] = 0.95,
    data: Annotated[
        str | None,
        typer.Option(
            help="Images to choose on, as folder:PATH; classes that were trained on are left out.",
            show_default="the run's held-out training classes",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
) -> None:
    """Choose the similarity from which two images may be taken for one class, and keep it in the run folder."""
    from nearkin.search.calibrate import calibrate as choose

    found = choose(run, data=data, precision=precision, device=device, reporter=Reporter(Console(stderr=True)))
    checked = "" if found["checked"] is None else f"; {found['checked']:.1%} on classes that did not choose it"
    print(f"Same class from a similarity of {found['similarity']:.4f} on.")
    print(
        f"{found['reached']:.1%} of the pairs above it are of one class{checked}; they are {found['recall']:.1%} of "
        "all pairs of one class."
    )
    print(
        f"Calibrated on {found['on']}: {found['classes']:,} classes, {found['images']:,} images, "
        f"{found['kin_pairs'] / found['pairs']:.2%} of their pairs of one class. Among more classes it is less precise."
    )


def search(
    index: Annotated[str, typer.Argument(help="An index: its folder, postgresql://… or qdrant://…")],
    images: Annotated[list[Path], typer.Argument(help="Images to search with: files or folders.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each.")] = 10,
    label: Annotated[list[str] | None, typer.Option(help="Only items of this label; repeatable.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the pictures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run that made it, where it is no longer where it was.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Find the nearest items of images: a table, a page with the pictures, or JSON."""
    from nearkin.console import terminal_table
    from nearkin.data.image_files import gather, none_usable, say_bad
    from nearkin.report.page import search_page
    from nearkin.search.index import open_index
    from nearkin.search.index.engines import without_password
    from nearkin.search.query import (
        as_records,
        check_labels,
        model_of,
        rows_of,
        search_images,
        shown,
        threshold_of,
        threshold_words,
    )

    found = gather(images)
    with open_index(index) as opened:
        check_labels(opened, label or ())
        threshold = threshold_of(opened, run)
        model = model_of(opened, run=run, device=device)
        answers, bad = search_images(opened, model, found, k=k, labels=label, run=run)
    if not answers:
        raise none_usable(bad, len(found))
    if html is not None:
        html.write_text(
            search_page(answers, title=f"Search in {without_password(index)}", note=threshold_words(threshold))
        )
    if as_json:
        print(json.dumps(as_records(answers, bad, threshold), indent=2))
        return
    console = Console()
    for answer in answers:
        console.print(terminal_table(["path", "label", "similarity", ""], rows_of(answer), title=shown(answer.query)))
        console.print()
    for line in (*say_bad(bad, len(found)), threshold_words(threshold)):
        print(line)
    if html is not None:
        print(f"Pictures: {html}")


def serve(
    index: Annotated[str, typer.Argument(help="An index: its folder, postgresql://… or qdrant://…")],
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run that made it, where it is no longer where it was.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in, and wants a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at (0: any free one).")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="NEARKIN_TOKEN", help="What a visitor must know; auto makes one up and prints it."),
    ] = None,
    max_upload_mb: Annotated[float, typer.Option(help="Megabytes that a picture may have.")] = 20,
    max_pixels: Annotated[int, typer.Option(help="Pixels that a picture may have.")] = 50_000_000,
    device: Annotated[str, typer.Option(help="Where to embed: auto, cpu, cuda.")] = "auto",
) -> None:
    """Serve a page to search an index with pictures, and a JSON API (described at /docs)."""
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


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: .onnx, or .pt2 for torch.export.")],
    images: Annotated[
        list[Path] | None,
        typer.Option(help="An image to check on; repeatable (default: photographs that come with scikit-learn)."),
    ] = None,
) -> None:
    """Write a run's model as ONNX or as a torch.export program, checked against ours on real images."""
    from nearkin.data.images import counted
    from nearkin.training.export import TOLERANCE
    from nearkin.training.export import export as write

    done = write(run, out, images=images or ())
    print(f"{done.path}: images {done.about['input']['shape']} to embeddings {done.about['output']['shape']}.")
    on = counted(done.images, "image", "images")
    print(f"Largest difference from ours on {on}: {done.difference:.1e} (allowed: {TOLERANCE:.0e}).")


COMMANDS = (embed, index, calibrate, search, serve, export)
