"""Does Proxy-ISA's filter find wrong labels? Glyphs with a fraction of the training labels made wrong.

    python benchmarks/isa_noise.py                          the bundled letters, 5 % wrong, 40 epochs; minutes on a CPU
    python benchmarks/isa_noise.py --classes 120 --epochs 20

Images are written as files with a table of labels, as a user has them, and trained on by `nearkin train`'s loop. Prints
the share of wrong labels among the filtered images (precision) and the share of wrong labels that are filtered
(recall): for images filtered at all, and for those filtered in at least a quarter or half of the epochs with filter.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from timing import source

import nearkin as nk
from nearkin.data.images import Dataset, Images
from nearkin.files import read_json, write_json
from nearkin.training.checkpoint import open_snapshot
from nearkin.training.run_folder import RunFolder

METHODS = {
    "published settings": "proxy_isa",
    "a filter at the class's own average": "proxy_isa(hardness=1, sensitivity=0, margin=0)",
}


def plant(images: Images, part: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of which a fraction is replaced by a random other class; and the mask of these."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(images), generator=rng)[: round(part * len(images))]
    labels = images.labels.clone()
    shift = torch.randint(1, images.classes, (len(rows),), generator=rng)
    labels[rows] = (labels[rows] + shift) % images.classes
    return labels, torch.isin(torch.arange(len(images)), rows)


def write_table(folder: Path, data: Dataset, labels: torch.Tensor) -> Path:
    """Images as PNG files below the folder, and table.csv with the noisy labels."""
    table = folder / "table.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "split"))
        for split, images, given in (("train", data.train, labels), ("test", data.test, data.test.labels)):
            (folder / split).mkdir()
            for number, (pixels, label) in enumerate(zip(images.sources, given.tolist(), strict=True)):
                name = f"{split}/{number:05d}.png"
                Image.fromarray(pixels[0].numpy()).save(folder / name)
                rows.writerow((name, f"{split} {label:04d}", split))
    return table


def found(run: RunFolder, epochs: int, wrong: torch.Tensor) -> dict[str, float]:
    """Recall and precision of the filter of a finished run."""
    method = open_snapshot(run, epochs, device="cpu").method
    chances = epochs - (method.filter_from - 1)
    result = {"average precision": float(average_precision_score(wrong, method.filtered.double()))}
    for words, least in (("once", 1), ("a quarter", max(1, round(chances / 4))), ("half", max(1, round(chances / 2)))):
        caught = method.filtered >= least
        result[f"filtered, {words}"] = int(caught.sum())
        result[f"recall, {words}"] = float(caught[wrong].double().mean())
        result[f"precision, {words}"] = float(wrong[caught].double().mean()) if caught.any() else 0.0
    return result | {"R@1": read_json(run.result)["scores"]["R@1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--classes", type=int, default=800, help="classes of glyphs, half of them for training (default: %(default)s)"
    )
    parser.add_argument("--noise", type=float, default=0.05, help="fraction of wrong labels (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of labels and training (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for images and runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    options = parser.parse_args()
    data = nk.load_dataset(f"glyphs(classes={options.classes})")
    labels, wrong = plant(data.train, options.noise, options.seed)
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table = write_table(folder, data, labels)
        print(f"{int(wrong.sum())} of {len(wrong)} labels are wrong")
        for number, (name, spec) in enumerate(METHODS.items()):
            settings = {"method": spec, "epochs": options.epochs, "seed": options.seed, "device": "cpu"}
            run = nk.train(data=f"csv:{table}", out=folder / f"run-{number}", snapshots=str(options.epochs), **settings)
            rows[name] = {"method": spec} | found(run, options.epochs, wrong)
            print(f"{name}: {spec}")
            for what, value in rows[name].items():
                print(f"    {what}: {value:.3f}" if isinstance(value, float) else f"    {what}: {value}")
    if options.out:
        about = {k: v for k, v in vars(options).items() if k not in ("keep", "out")}
        write_json(options.out, {**about, "planted": int(wrong.sum()), "rows": rows, **source()})


if __name__ == "__main__":
    main()
