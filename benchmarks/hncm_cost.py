"""What hard negative class mining costs: making a batch of PROFS beside the bare product [drawn classes × classes].

    python benchmarks/hncm_cost.py                      11,318 classes (SOP) and a million, 512-d; needs about 5 GB
    python benchmarks/hncm_cost.py --classes 11318      the first alone, in seconds

A batch is 128 images, 2 a class: 64 classes, 32 of them drawn. All representatives have been embedded. Batch and
product, the latter either way round, are made in turn; the least of all rounds counts. What is drawn for many batches
at once is timed apart, and its share added. Times on a CPU are of the processors, which a busy machine disturbs less.
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
    draws_ms: float  # a batch's share of what is drawn for many
    ratio: float
    reached: bool


def embedded(classes: int, dim: int, device: torch.device) -> PROFS:
    """PROFS in the middle of a run: a unit vector kept of every class."""
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
    draws = first / min(steps, HANDS)  # the first brings what is drawn for many
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
    parser.add_argument("--out", type=Path, help="a JSON file for the figures and where they come from")
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
