"""Does `nearkin review` find planted errors? A folder with wrong labels and changed copies.

    python benchmarks/review_planted.py --photographs CUB_200_2011/images --classes 40 --each 25
    python benchmarks/review_planted.py --epochs 20               the embedded letters, and a run trained on the result

Copies images into a folder per class, moves 5 % to a random other class and adds changed copies of 2 % (cropped by up
to 4 %, made smaller, a little brighter or darker, compressed again), half of them in another class. Prints, for each
kind, how many were planted, listed and found, and the recall among as many of the worst as were planted. With
--epochs the review uses a run trained on the folder, without it the features of a network that never saw it.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from timing import source

import nearkin as nk
from nearkin.files import Json, write_json
from nearkin.report.review import Review, review
from nearkin.search.duplicates import changed, pixels_of


class Planted(NamedTuple):
    """What was planted, as paths below the folder."""

    wrong: set[str]  # images whose label is wrong
    copies: set[frozenset[str]]  # pairs of an image and its changed copy


Sources = dict[str, list[Path | torch.Tensor]]  # class → files or pixels


def plant(folder: Path, sources: Sources, *, seed: int, wrong: float, copies: float) -> Planted:
    """Write the images of each class into a folder, with errors."""
    rng = np.random.default_rng(seed)
    names = list(sources)
    every = [(name, number) for name in names for number in range(len(sources[name]))]
    order = rng.permutation(len(every))
    moved = {every[i] for i in order[: round(wrong * len(every))]}
    copied = {every[i] for i in order[len(every) - round(copies * len(every)) :]}
    planted = Planted(set(), set())

    def other(name: str) -> str:
        return names[(names.index(name) + int(rng.integers(1, len(names)))) % len(names)]

    for name, number in every:
        image = sources[name][number]
        into = other(name) if (name, number) in moved else name
        stem = f"{into}/{names.index(name):03d}-{number:03d}"
        (folder / into).mkdir(parents=True, exist_ok=True)
        if isinstance(image, Path):
            path = f"{stem}{image.suffix}"
            shutil.copy(image, folder / path)
        else:
            path = f"{stem}.png"
            Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()).save(folder / path)
        if into != name:
            planted.wrong.add(path)
        if (name, number) in copied:
            place = name if len(planted.copies) % 2 else other(name)
            copy = f"{place}/copy-{names.index(name):03d}-{number:03d}.png"
            (folder / place).mkdir(parents=True, exist_ok=True)
            pixels = changed(pixels_of(folder / path, short_side=512), rng)
            Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()).save(folder / copy)
            planted.copies.add(frozenset((path, copy)))
            if place != name:
                planted.wrong.add(copy)
    return planted


def measure(done: Review, planted: Planted, folder: Path) -> Json:
    """Precision and recall of what was listed, and recall among as many of the worst as were planted."""
    paths = [str(Path(path).resolve().relative_to(folder.resolve())) for path in done.collection.images.sources]
    listed = {
        "wrong labels": ([paths[f.rows[0]] for f in done.findings if f.kind == "label"], planted.wrong),
        "copies": (
            [frozenset(paths[row] for row in f.rows) for f in done.findings if f.kind in ("leak", "duplicate")],
            planted.copies,
        ),
    }
    return {
        kind: {
            "planted": len(true),
            "listed": len(found),
            "found": len(hits := set(found) & true),
            "precision": len(hits) / max(1, len(found)),
            "recall": len(hits) / len(true),
            "recall among the worst": len(set(found[: len(true)]) & true) / len(true),
        }
        for kind, (found, true) in listed.items()
    }


def photographs(folder: Path, *, classes: int, each: int) -> Sources:
    """The first images of the last classes of a folder with one folder per class."""
    chosen = sorted(path for path in folder.iterdir() if path.is_dir())[-classes:]
    return {path.name: list(sorted(path.iterdir())[:each]) for path in chosen}


def letters(*, classes: int, each: int) -> Sources:
    """Embedded letters."""
    images = nk.load_dataset(f"glyphs(classes={4 * classes}, samples={each})").test
    return {
        f"letter {c:03d}": [images.sources[row] for row in (images.labels == c).nonzero().flatten().tolist()]
        for c in range(classes)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, help="folder with one folder per class (none: letters)")
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--wrong", type=float, default=0.05)
    parser.add_argument("--copies", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=0, help="train a run on the folder for so many epochs first")
    parser.add_argument("--method", default="proxy_anchor")
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "images"
        size = {"classes": args.classes, "each": args.each}
        sources = photographs(args.photographs, **size) if args.photographs else letters(**size)
        planted = plant(folder, sources, seed=args.seed, wrong=args.wrong, copies=args.copies)
        place = folder
        if args.epochs:
            settings = {"backbone": args.backbone, "method": args.method, "epochs": args.epochs, "seed": args.seed}
            place = nk.train(data=f"folder:{folder}", **settings, out=Path(made) / "run").path
        done = review(place, out=Path(made) / "review", backbone=args.backbone)
        counts: dict[str, int] = {}
        for finding in done.findings:
            counts[finding.kind] = counts.get(finding.kind, 0) + 1
        figures = {"limits": done.limits._asdict(), "listed": counts, **measure(done, planted, folder)}
    print(json.dumps(figures, indent=2))
    if args.out:
        write_json(args.out, {**figures, **source()})


if __name__ == "__main__":
    main()
