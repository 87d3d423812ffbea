"""Opening a data set of a million images: a csv table of files, tars, and Arrow files.

    python benchmarks/open_million.py                         1,000,000 small images, three times; 8 GB of disk
    python benchmarks/open_million.py --images 20000 --out /tmp/open_million.json
    … --only tar                                              only the data sets with this in their names

A data set is opened in a new process after its imports, twice: first without an index in the cache folder, then with
the index that this has left. The second time counts. Then its images are opened as a stream for batches, which reads
the headers of files, but of no image in tar or Arrow files. Memory is the most that the process held, beyond what it
held before. Results are written as they come.
"""

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
from PIL import Image
from timing import source

from nearkin.files import Json, read_json, write_json

RESULTS = Path(__file__).parent / "results" / "open_million.json"
IMAGES, PER_CLASS, PER_FILE = 1_000_000, 50, 10_000
DIFFERENT = 100  # images; more are copies

OPEN = """
import json, sys, time
from nearkin.data import load_dataset
from nearkin.data.pixels.archives import arrow_library
from nearkin.data.pixels.open import open_store

def peak(start_again=False):
    if start_again:
        open("/proc/self/clear_refs", "w").write("5")
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

spec, stream = sys.argv[1:]
arrow_library()
before, start, worked = peak(True), time.perf_counter(), time.process_time()
data = load_dataset(spec)
found = {
    "open_s": time.perf_counter() - start, "open_processor_s": time.process_time() - worked,
    "open_mb": (peak() - before) / 1e6, "images": len(data.train) + len(data.test),
}
if stream == "stream":
    before, start = peak(True), time.perf_counter()
    open_store(data.train, short_side=256, device="cpu", location="stream")
    found |= {"stream_s": time.perf_counter() - start, "stream_mb": (peak() - before) / 1e6}
print(json.dumps(found))
"""


def picture(number: int) -> bytes:
    """A small JPEG."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((32, 24)).save(buffer, "JPEG", quality=50)
    return buffer.getvalue()


def label(number: int) -> str:
    return f"c{number // PER_CLASS:06d}"


def write_csv(folder: Path, images: int, pictures: list[bytes]) -> str:
    """A file per image, in folders of 1,000, and a table of them."""
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label"])
        for number in range(images):
            name = f"images/{number // 1000:04d}/{number:08d}.jpg"
            if number % 1000 == 0:
                os.makedirs(folder / f"images/{number // 1000:04d}")
            with open(f"{folder}/{name}", "wb") as image:  # faster than a Path
                image.write(pictures[number % DIFFERENT])
            table.writerow([name, label(number)])
    return f"csv:{folder / 'table.csv'}"


def write_tars(folder: Path, images: int, pictures: list[bytes]) -> str:
    """Tars as webdataset writes them, with an image and its class per sample."""
    for first in range(0, images, PER_FILE):
        with tarfile.open(folder / f"images-{first // PER_FILE:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(images, first + PER_FILE)):
                for kind, data in (("jpg", pictures[number % DIFFERENT]), ("cls", label(number).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return f"tar:{folder}"


def write_arrow(folder: Path, images: int, pictures: list[bytes]) -> str:
    """Arrow files as save_to_disk writes them, in batches of 1,000 rows."""
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", kind), ("label", pyarrow.string())])
    for first in range(0, images, PER_FILE):
        numbers = range(first, min(images, first + PER_FILE))
        with pyarrow.ipc.new_stream(str(folder / f"data-{first // PER_FILE:05d}.arrow"), schema) as file:
            rows = [{"bytes": pictures[number % DIFFERENT], "path": f"{number:08d}.jpg"} for number in numbers]
            columns = [pyarrow.array(rows, kind), pyarrow.array([label(number) for number in numbers])]
            file.write_table(pyarrow.Table.from_arrays(columns, schema=schema), max_chunksize=1000)
    return f"arrow:{folder}"


WRITERS: dict[str, Callable[[Path, int, list[bytes]], str]] = {
    "csv": write_csv,
    "tar": write_tars,
    "arrow": write_arrow,
}


def opened(spec: str, cache: Path, *, stream: bool) -> Json:
    """What opening takes in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, spec, "stream" if stream else ""],
        env={**os.environ, "NEARKIN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, images: int, folder: Path) -> Json:
    """All figures of one kind of data set."""
    with TemporaryDirectory(dir=folder) as made, TemporaryDirectory(dir=folder) as cache:
        spec = WRITERS[name](Path(made), images, [picture(number) for number in range(DIFFERENT)])
        first = opened(spec, Path(cache), stream=False)
        found = {"data": name, "first_s": first["open_s"], "first_mb": first["open_mb"]}
        found["index_mb"] = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file()) / 1e6
        found |= opened(spec, Path(cache), stream=True)
    assert found["images"] == images
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--only", default="", help="only the data sets with this in their names")
    parser.add_argument("--folder", type=Path, help="where the images are made, and removed again (default: temporary)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the figures (default %(default)s)")
    given = parser.parse_args()
    for name in WRITERS:
        if given.only in name:
            row = measure(name, given.images, given.folder)
            before = read_json(given.out)["rows"] if given.out.exists() else []
            rows = [known for known in before if known["data"] != name]
            write_json(given.out, {"rows": [*rows, row], **source()})
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
