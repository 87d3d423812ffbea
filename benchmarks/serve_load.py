"""A server under load: many clients at once, each searching with an image, over the loopback.

Prints how many searches failed (none may) and the times of the others, beside the same clients one after the other and
beside decoding, embedding and searching without a server. Clients and server share the machine.

    python benchmarks/serve_load.py --out benchmarks/results/serve_load.json
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from timing import source

import nearkin as nk
from nearkin.files import write_json
from nearkin.search.index import Index, create_index
from nearkin.training.model import Model

DATA = "glyphs(classes=200, samples=10)"


class Row(NamedTuple):
    """The times of some searches, in milliseconds."""

    what: str
    searches: int
    errors: int
    p50: float
    p99: float
    per_second: float


def prepare(folder: Path) -> tuple[Path, list[Path]]:
    """An index of letters with a briefly trained model, and its files."""
    run = nk.train(data=DATA, epochs=1, device="cpu", out=folder / "run")
    letters = nk.load_dataset(DATA).test
    paths = [folder / f"{row}.png" for row in range(len(letters))]
    for path, pixels in zip(paths, letters.sources, strict=True):
        Image.fromarray(pixels[0].numpy()).save(path)
    model = nk.load(run.path, device="cpu")
    x = model.embed(paths).numpy()
    labels = [letters.names[label] for label in letters.labels.tolist()]
    with create_index(folder / "index", dim=x.shape[1], space="cosine", run=run.path) as index:
        index.add(x, paths=[str(path) for path in paths], labels=labels)
    return folder / "index", paths


def row(what: str, seconds: list[float], whole: float, errors: int = 0) -> Row:
    times = 1000 * np.array(seconds)
    p50, p99 = (float(np.percentile(times, q)) for q in (50, 99))
    return Row(what, len(seconds), errors, p50, p99, len(seconds) / whole)


def bare(index: Index, model: Model, paths: list[Path]) -> Row:
    """The same work without a server, one image at a time."""
    taken, start = [], time.perf_counter()
    for path in paths:
        begin = time.perf_counter()
        index.search(model.embed([path]).numpy(), 20)
        taken.append(time.perf_counter() - begin)
    return row("bare work, one after the other", taken, time.perf_counter() - start)


async def clients(address: str, data: list[bytes], *, at_once: int, rounds: int, what: str) -> Row:
    """So many clients at once, each of which searches so often."""
    taken: list[float] = []
    errors = 0

    async def one(number: int) -> None:
        nonlocal errors
        begin = time.perf_counter()
        parts = urlsplit(address)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for turn in range(rounds):
            status, answer = await post(reader, writer, data[(number + turn * at_once) % len(data)])
            now = time.perf_counter()
            taken.append(now - begin)
            begin = now
            errors += status != 200 or len(json.loads(answer)["hits"]) != 20
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(at_once)))
    return row(what, taken, time.perf_counter() - start, errors)


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    """One search. By hand, since a whole HTTP client takes longer than the server with hundreds of connections."""
    writer.write(f"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length"))
    return int(head[0].split()[1]), await reader.readexactly(length)


def measure(folder: Path, *, at_once: int, rounds: int) -> list[Row]:
    index, paths = prepare(folder)
    data = [path.read_bytes() for path in paths]
    command = [sys.executable, "-m", "nearkin", "serve", str(index), "--port", "0", "--device", "cpu"]
    with nk.index.open_index(index) as opened:
        rows = [bare(opened, nk.load(opened.run, device="cpu"), paths[:200])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            asyncio.run(clients(address, data, at_once=4, rounds=5, what="warm"))
            rows.append(asyncio.run(clients(address, data, at_once=1, rounds=200, what="one client")))
            rows.append(asyncio.run(clients(address, data, at_once=at_once, rounds=1, what=f"{at_once} at once")))
            what = f"{at_once} clients, {rounds} searches each"
            rows.append(asyncio.run(clients(address, data, at_once=at_once, rounds=rounds, what=what)))
        finally:
            server.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="searches at once (default 200)")
    parser.add_argument("--rounds", type=int, default=10, help="searches of each client in the longer run (default 10)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    others = os.getloadavg()[0]  # load of the machine before; above its number of cores, times are long
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), at_once=args.clients, rounds=args.rounds)
    table = Table(
        "what", "searches", "errors", "p50 ms", "p99 ms", "a second", title="POST /api/search over the loopback"
    )
    for r in rows:
        table.add_row(r.what, str(r.searches), str(r.errors), f"{r.p50:.1f}", f"{r.p99:.1f}", f"{r.per_second:.0f}")
    Console(width=120).print(table)
    if args.out:
        about = {"data": DATA, "load": others}
        write_json(args.out, {**about, "rows": [r._asdict() for r in rows], **source()})
    sys.exit(any(r.errors for r in rows))


if __name__ == "__main__":
    main()
