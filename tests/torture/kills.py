"""Kill a job at the moments that matter, resume it until it ends, and compare the outcome with an undisturbed one.

python kills.py JOB CHAINS FOLDER      prints the number of chains and kills as JSON

The process forks one child per attempt, so that libraries are imported once. A child counts the operations that make a
write durable (fsync, rename, saving a file, …) and kills itself before, after or in the middle of one.
"""

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made import make_images, make_run

import nearkin as nk
from nearkin import files
from nearkin.benchmark.results import read_results
from nearkin.benchmark.runner import bench
from nearkin.data.image_files import list_images
from nearkin.files import read_tensors
from nearkin.search.build import index_images
from nearkin.search.embed import embed_to_file
from nearkin.search.index import folder as folder_index
from nearkin.search.index import open_index
from nearkin.training import loop
from nearkin.training.cross_validation import cross_validate
from nearkin.training.run_folder import RunFolder

TINY: dict[str, Any] = {"data": "glyphs(classes=16, samples=6)", "batch": 20, "dim": 8, "device": "cpu"}
METHODS = (
    "proxy_anchor", "soft_triple(per_class=2)", "xbm(contrastive, size=32, start=0)", "vcpa", "margin(learn=True)",
    "moco(momentum=0.5, queue=20)", "profs(steps=2, weight=0.1)", "proxy_gml",
    "proxy_isa(steps_per_epoch=1, size=20, volume=8, hardness=0.9, margin=0)",
    "ccp(contrastive(negative=1), per_class=2, pool=3, every=1)", "multi_similarity", "proxy_updates(steps=2, lr=0.1)",
)  # fmt: skip
SUITE = """
title = "Killed"
source = "made up"
backbone = "conv4"
seeds = 1
baseline = "PA"
[settings]
dim = 8
epochs = 1
batch = 16
[data.glyphs]
read = "glyphs(classes=16, samples=4)"
metrics = ["R@1"]
[[row]]
name = "PA"
method = "proxy_anchor"
[[row]]
name = "MS"
method = "multi_similarity"
"""
MOST_KILLS = 4  # per chain


# The jobs: what an attempt does in a folder, and what is compared at the end.


def train(folder: Path, number: int) -> None:
    """Train, or resume, a few steps with a checkpoint after each."""
    settings = {**TINY, "epochs": 2, "method": METHODS[number % len(METHODS)], "seed": number, "snapshots": "1"}
    if (folder / "run" / "config.json").exists():
        nk.train(out=folder / "run", resume=True)
    else:
        nk.train(out=folder / "run", **settings)


def trained(folder: Path) -> Any:
    """Weights, snapshots, scores and log of a run."""
    run = RunFolder(folder / "run")
    tensors = [run.model, *sorted(run.snapshots.iterdir()), *([run.classes] if run.classes.exists() else [])]
    events = [{k: v for k, v in event.items() if k != "seconds"} for event in run.events()]
    return [*map(content, tensors), run.read_result()["scores"], events]


def cross_validated(folder: Path, number: int) -> None:
    """Train two folds, or resume them."""
    known = (folder / "run" / "config.json").exists()
    settings = {} if known else {**TINY, "epochs": 1, "folds": 2, "seed": number, "metrics": "R@1"}
    cross_validate(out=folder / "run", resume=known, **settings)


def folds(folder: Path) -> Any:
    """Weights and scores of all folds."""
    run = RunFolder(folder / "run")
    return [[content(part.model) for part in run.parts()], run.read_result()["scores"]]


def bench_suite(folder: Path, number: int) -> None:
    """Make the runs of a suite that are not finished."""
    suite = folder / "killed.toml"
    if not suite.exists():
        suite.write_text(SUITE)
    bench(suite, out=folder / "bench", seeds=[number])


def benched(folder: Path) -> Any:
    """The scores of all runs."""
    return {key: record["scores"] for key, record in read_results(folder / "bench" / "results.jsonl").items()}


def embed(folder: Path, number: int) -> None:
    """Embed images into a file."""
    run, images = shared(folder)
    embed_to_file(run, nk.load(run), list_images([images]), folder / f"out{('.npz', '.parquet')[number % 2]}")


def embedded(folder: Path) -> Any:
    """The bytes of the file; nothing else is left."""
    (left,) = [path for path in folder.iterdir() if path.name.startswith("out")]
    if left.suffix == ".npz":
        with np.load(left) as known:
            return [known["embeddings"].tolist(), known["paths"].tolist()]
    import pyarrow.parquet

    return pyarrow.parquet.read_table(left).to_pylist()


def index(folder: Path, number: int) -> None:
    """Index images; odd ones through a graph."""
    run, images = shared(folder)
    kind = "hnsw" if number % 2 else None
    index_images(run, list_images([images / "class 0"]), folder / "index", kind=kind)
    index_images(run, list_images([images]), folder / "index", kind=kind)
    with open_index(folder / "index") as opened:
        opened.remove([str(path) for path in (images / "class 1").iterdir()])


def indexed(folder: Path) -> Any:
    """Items, embeddings and hits."""
    opened = open_index(folder / "index")
    ids = sorted(opened.items().ids)
    x = opened.embeddings(ids)
    hits = [[hit.id for hit in found] for found in opened.search(x, 3)]
    return [ids, x.tolist(), hits, opened.meta["threshold"]]


def shared(folder: Path) -> tuple[Path, Path]:
    """The run and the images for the last two jobs, made before the first kill."""
    top = folder.parent
    if not (top / "ready").exists():
        make_run(top / "model", names=("x", "y"))
        make_images(top / "images", classes=3, each=4)
        (top / "ready").touch()
    return top / "model", top / "images"


def content(path: Path) -> str:
    """A digest of a file's tensors and record."""
    tensors, about = read_tensors(path)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


JOBS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Any]]] = {
    "train": (train, trained),
    "cv": (cross_validated, folds),
    "bench": (bench_suite, benched),
    "embed": (embed, embedded),
    "index": (index, indexed),
}


# The kills.


class Killer:
    """Counts operations and kills this process at one of them; target 0 only counts."""

    def __init__(self, target: int, when: str) -> None:
        self.target, self.when, self.count = target, when, 0
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir")):
            setattr(owner, name, self.around(getattr(owner, name), half=None))
        files.save_file = self.around(files.save_file, half=self.cut)

    def around(self, act: Callable[..., Any], half: Callable[..., None] | None) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count != self.target:
                return act(*arguments, **named)
            if self.when != "before":
                act(*arguments, **named)
                if self.when == "half" and half is not None:
                    half(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("not reached")

        return watched

    @staticmethod
    def cut(_content: Any, path: Path, *_: Any) -> None:
        """Leave half of the file."""
        os.truncate(path, Path(path).stat().st_size // 2)


def attempt(job: str, folder: Path, number: int, target: int, when: str) -> tuple[bool, int]:
    """Work in a child; return whether it was killed, and the number of operations it counted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            killer = Killer(target, when)
            JOBS[job][0](folder, number)
            os.write(write, str(killer.count).encode())
            code = 0
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True, 0
    if os.WEXITSTATUS(status):
        raise SystemExit(f"{job} {number} in {folder} after operation {target} ({when}): {said}")
    return False, int(said)


def main(job: str, chains: int, top: Path) -> None:
    """Run the chains of kills of one job."""
    torch.set_num_threads(1)
    loop.SAVE_SECONDS = 0.0
    folder_index.MIN_ITEMS = 1  # a graph also of few items
    kills = 0
    for number in range(chains):
        rng = random.Random(f"{job} {number}")
        whole, cut = top / f"whole-{number}", top / f"cut-{number}"
        whole.mkdir(parents=True)
        cut.mkdir()
        shared(whole)
        _, operations = attempt(job, whole, number, 0, "before")
        expected = JOBS[job][1](whole)
        for left in range(MOST_KILLS, -1, -1):
            target = rng.randint(1, operations) if left else 0
            killed, _ = attempt(job, cut, number, target, rng.choice(["before", "after", "half"]))
            kills += killed
            if not killed:
                break
        found = JOBS[job][1](cut)
        if text(found, cut) != text(expected, whole):
            raise SystemExit(f"{job} {number}: {cut} differs from {whole}")
    print(json.dumps({"chains": chains, "kills": kills}))


def text(found: Any, folder: Path) -> str:
    """An outcome that does not depend on its folder."""
    return json.dumps(found, sort_keys=True).replace(str(folder), "")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
