"""The cost of hard negative class mining: making a batch of PROFS, beside the product [drawn classes × classes] alone.

    python benchmarks/hncm_cost.py                      11,318 classes (SOP) and a million, 512-d; needs about 5 GB
    python benchmarks/hncm_cost.py --classes 11318      only the first, in seconds

A batch is 128 images, 2 per class: 64 classes, 32 of them drawn. All representatives are embedded beforehand. Batch and
product (in both orders) alternate; the minimum over rounds counts. Draws for many batches at once are timed separately
and their share is added. Times on a CPU are processor times, which other load disturbs less.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import least, milliseconds, source

from nearkin.files import write_json
from nearkin.methods.catalogue import method
from nearkin.methods.strategies.profs import HANDS, PROFS

BATCH, IMAGES, GOAL = 128, 2, 1.5


class Row(NamedTuple):
    classes: int
    batch_ms: float
    product_ms: float
    draws_ms: float  # a batch's share of draws for many batches
    ratio: float
    reached: bool


def embedded(classes: int, dim: int, device: torch.device) -> PROFS:
    """PROFS in the middle of a run: it has a unit vector of every class."""
    m = method("profs(n_pair, hard_classes=True)", classes=classes, dim=dim).to(device)
    assert isinstance(m, PROFS)
    m.vectors.normal_()
    m.vectors /= m.vectors.norm(dim=1, keepdim=True)
    m.offset.fill_(-0.5)
    return m


def measure(classes: int, *, dim: int, rounds: int, device: torch.device) -> Row:
    m = embedded(classes, dim, device)
    labels = torch.arange(classes).repeat_interleave(3)
    steps = m.projection(BATCH)
    batches = m.batches(labels, BATCH, seed=0)
    first = milliseconds(lambda: next(batches), device, processors=True)
    draws = first / min(steps, HANDS)  # the first includes the draws for many batches
    drawn = torch.randperm(classes, device=device)[: BATCH // IMAGES // 2]

    works = [
        lambda: next(batches),
        lambda: m.vectors[drawn] @ m.vectors.T,
        lambda: m.vectors @ m.vectors[drawn].T,
    ]
    batch, *products = least(works, rounds=min(rounds, steps - 2), device=device, processors=True)
    bare = min(products)
    ratio = (batch + draws) / bare
    return Row(classes, batch, bare, draws, ratio, ratio <= GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[11_318, 1_000_000], help="numbers of classes")
    parser.add_argument("--dim", type=int, default=512, help="dimensions (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    rows = [measure(classes, dim=args.dim, rounds=args.rounds, device=device) for classes in args.classes]
    title = f"batch {BATCH}, {IMAGES} images a class, D = {args.dim}, {device}, {torch.get_num_threads()} threads"
    table = Table("classes", "batch", "its draws", "product", "ratio", f"at most {GOAL}", title=title)
    for row in rows:
        times = (f"{ms:.2f} ms" for ms in (row.batch_ms, row.draws_ms, row.product_ms))
        table.add_row(f"{row.classes:,}", *times, f"{row.ratio:.2f}", "yes" if row.reached else "no")
    Console(width=120).print(table)
    if args.out:
        content = {"batch": BATCH, "images_per_class": IMAGES, "dim": args.dim, "threads": torch.get_num_threads()}
        write_json(args.out, {**content, "rows": [row._asdict() for row in rows], **source()})


if __name__ == "__main__":
    main()
