"""Images per second that are decoded from their files for every batch, against decoding alone on all cores.

Made photographs (noise smoothed at several scales, 500 pixels at the long side, about 50 kB as JPEG) are written once,
as files and as webdataset tars. Each part runs for some seconds, in alternating rounds; the best of each counts:

- `decode`: every core reads and decodes images in a process of its own, and does nothing else;
- `batches`, `tar`: batches of a training run are read from files or tars, decoded, and sent to the device;
- `views`: they are augmented there, too;
- `train`: with them the steps of `nearkin train`; `resident`: the same steps with all images in memory.

Per part: images per second, and images per second of processor time over all processes, which says how much work
streaming adds even on a busy machine; for steps, whether they came from a CUDA graph. Results are written as they come.

    python benchmarks/stream_speed.py                                        # this machine: a GPU if it has one
    python benchmarks/stream_speed.py --images 240 --parts decode,batches,tar --out /tmp/stream_speed.json
"""

import argparse
import dataclasses
import io
import multiprocessing
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from timing import source
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.pixels import open as front_door
from nearkin.data.pixels.decode import decode_file
from nearkin.data.pixels.decoders import decoders
from nearkin.data.pixels.threads import cores
from nearkin.data.pixels.tiles import Pixels
from nearkin.files import Json, write_json
from nearkin.training.images import plan_dataset, with_storage
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.plan import make_plan, resolve_device
from nearkin.training.run_folder import RunFolder
from nearkin.training.step_graph import own_stream

PARTS = ("decode", "batches", "tar", "views", "train", "resident")
SHAPES = ((333, 500), (375, 500), (400, 500), (500, 500), (500, 375), (500, 333))
NOISE = ((8, 60), (40, 25), (160, 20), (500, 12))  # pixels along a side, and contrast, of each scale
DIFFERENT = 240  # images; more are copies, which decode alike
PER_CLASS, PER_TAR = 24, 1000


def photo(number: int) -> bytes:
    """A made photograph as JPEG."""
    rng, (height, width) = np.random.default_rng(number), SHAPES[number % len(SHAPES)]
    pixels = np.full((height, width, 3), 128, np.float32)
    for side, contrast in NOISE:
        grid = (max(2, side * height // 500), max(2, side * width // 500), 3)
        scale = Image.fromarray(rng.integers(0, 256, grid, np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        pixels += contrast / 128 * (np.asarray(scale, np.float32) - 128)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=87)
    return buffer.getvalue()


def make_images(folder: Path, images: int) -> int:
    """Write the images as files, one folder per class, and as tars, unless they are there; return their bytes."""
    if not (folder / "files").exists():
        with ThreadPoolExecutor(cores()) as workers:
            photos = list(workers.map(photo, range(min(images, DIFFERENT))))
        new = folder / "new"
        (folder / "tars").mkdir(parents=True, exist_ok=True)
        for first in range(0, images, PER_TAR):
            with tarfile.open(folder / "tars" / f"images-{first // PER_TAR:04d}.tar", "w") as tar:
                for number in range(first, min(images, first + PER_TAR)):
                    data, label = photos[number % len(photos)], f"c{number // PER_CLASS:04d}"
                    path = new / label / f"{number:06d}.jpg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    for name, content in ((path.name, data), (f"{path.stem}.cls", label.encode())):
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        new.rename(folder / "files")
    return sum(path.stat().st_size for path in (folder / "files").rglob("*.jpg"))


def decode_for(paths: list[Path], short_side: int, seconds: float, seed: int) -> tuple[int, float, float]:
    """Decode images for some seconds in this process: return how many, and its seconds on the clock and processor."""
    torch.set_num_threads(1)
    order = np.random.default_rng(seed).permutation(len(paths))
    began, worked, end = time.perf_counter(), time.process_time(), time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end:
        decode_file(paths[order[done % len(paths)]], short_side=short_side)
        done += 1
    return done, time.perf_counter() - began, time.process_time() - worked


def processor_seconds() -> float:
    """Seconds of processor time of this process and those it has started."""
    total, me = 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def starting() -> bool:
    """Whether processes that decode were started and not all have answered yet."""
    return decoders().process is not None and decoders().ready < cores()


def run_for(
    batches: Iterator[tuple[Tensor, Pixels]], step: Callable[[Tensor, Pixels], Any], seconds: float, batch: int
) -> Json:
    """Take batches and use them for some seconds, after half as many, and after the processes that decode are there."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < seconds / 2 or (starting() and waited < 20):
        step(*next(batches))
    wait()
    began, worked = time.perf_counter(), processor_seconds()
    done = 0
    while time.perf_counter() - began < seconds:
        step(*next(batches))
        done += batch
    wait()
    return figures(done, time.perf_counter() - began, processor_seconds() - worked)


def figures(images: int, seconds: float, processor: float) -> Json:
    return {
        "images/s": round(images / seconds, 1),
        "images per processor second": round(images / processor, 1),
        "images": images,
        "seconds": round(seconds, 2),
    }


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def training_on(data: str, settings: Json, folder: Path, *, stream: bool) -> Training:
    """A training run that is ready for its first step after warm-up, with the images streamed or in memory."""
    room = front_door.free_memory
    front_door.free_memory = lambda device: 0 if stream else room(device)
    try:
        plan = make_plan({**settings, "data": data, "test": "none", "warmup": 0, "epochs": 1000, "select": "last"}, {})
        dataset, reporter = plan_dataset(plan), Reporter()
        size = plan.size or 224
        plan = with_storage(
            dataclasses.replace(plan, stored=round(size * 256 / 224) / size), dataset, reporter=reporter
        )
        training, _ = build_training(RunFolder(folder), plan, dataset, reporter=reporter)
    finally:
        front_door.free_memory = room
    training._begin_epoch()
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the images are made, and found again (default: temporary)")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--weights", default="none")
    parser.add_argument("--size", type=int, default=224, help="of the network's input")
    parser.add_argument("--batch", type=int, default=180)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each part in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="default: results/stream_speed_DEVICE.json beside this script")
    given = parser.parse_args()
    # Forked before there are threads or a GPU.
    with ProcessPoolExecutor(cores(), mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(abs, range(cores())))
        with TemporaryDirectory() as temporary:
            measure(given, pool, Path(temporary))


def measure(given: argparse.Namespace, pool: ProcessPoolExecutor, temporary: Path) -> None:
    folder = given.folder or temporary / "images"
    size = make_images(folder, given.images)
    paths = sorted((folder / "files").rglob("*.jpg"))
    short_side = round(given.size * 256 / 224)
    device = resolve_device(given.device)
    out = given.out or Path(__file__).parent / "results" / f"stream_speed_{device.type}.json"
    settings = {name: getattr(given, name) for name in ("backbone", "weights", "size", "batch", "device")}
    about = {**settings, "images": len(paths), "kB": round(size / len(paths) / 1000, 1), "cores": cores()}
    done: Json = {"settings": about, "short_side": short_side, "parts": {}, **source()}
    print(f"{len(paths):,} images of {about['kB']} kB, {cores()} cores, {device}", flush=True)

    def decode() -> Json:
        futures = [pool.submit(decode_for, paths, short_side, given.seconds, seed) for seed in range(cores())]
        each = [future.result() for future in futures]
        rates = sum(number / seconds for number, seconds, _ in each)
        number, processor = sum(row[0] for row in each), sum(row[2] for row in each)
        return figures(number, number / rates, processor)

    def part(data: str, use: str = "", *, stream: bool = True) -> Callable[[], Json]:
        training = training_on(data, settings, temporary / "runs", stream=stream)
        uses = {"views": training._views, "train": training.run_step}
        step = uses.get(use, lambda *_: None)

        def run() -> Json:
            with closing(training.batches()) as batches:  # type: ignore[type-var]
                found = run_for(batches, step, given.seconds, given.batch)
            return found | ({"graph": getattr(step, "recorded", None) is not None} if use == "train" else {})

        return run

    wanted = given.parts.split(",")
    files, tar = f"folder:{folder / 'files'}", f"tar:{folder / 'tars' / '*.tar'}"
    with own_stream(device):
        makers: dict[str, Callable[[], Callable[[], Json]]] = {
            "decode": lambda: decode,
            "batches": lambda: part(files),
            "tar": lambda: part(tar),
            "views": lambda: part(files, "views"),
            "train": lambda: part(files, "train"),
            "resident": lambda: part(files, "train", stream=False),
        }
        works: dict[str, Callable[[], Json]] = {}
        for number in range(given.rounds):
            for name in wanted:
                if number and name not in works:
                    continue
                try:
                    works[name] = works.get(name) or makers[name]()
                    found = works[name]()
                except Exception as error:
                    done["parts"][name] = {"error": f"{type(error).__name__}: {error}"}
                    print(f"{name}: {error}", flush=True)
                    continue
                best = done["parts"].get(name, {}).get("images/s", 0)
                print(f"{name}: {found['images/s']:,} images/s, ", end="")
                print(f"{found['images per processor second']:,} per processor second", flush=True)
                if found["images/s"] > best:
                    done["parts"][name] = found
                done["relative to decode"] = relative(done["parts"])
                write_json(out, done)
    for name, ratios in done.get("relative to decode", {}).items():
        print(f"{name} / decode: {ratios['images/s']} (per processor second {ratios['images per processor second']})")


def relative(parts: dict[str, Json]) -> Json:
    """Each part's figures as a share of those of decoding alone."""
    keys = ("images/s", "images per processor second")
    alone = parts.get("decode", {})
    return {
        name: {key: round(row[key] / alone[key], 3) for key in keys}
        for name, row in parts.items()
        if name != "decode" and keys[0] in row and keys[0] in alone
    }


if __name__ == "__main__":
    main()
