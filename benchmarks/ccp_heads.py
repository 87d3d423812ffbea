"""CCP by the fair protocol on fixed features: 128-d heads on lite0's features of CUB, four folds, several seeds.

    python benchmarks/ccp_heads.py PATH                 of CUB_200_2011; 3 seeds, about half an hour on two CPU cores
    python benchmarks/ccp_heads.py PATH --steps 50 --seeds 1

The network keeps its ImageNet weights and each image is embedded once, without augmentation, so that a CPU can train
many heads. As in ccp_lite0 there are contiguous folds, ball, Adam, weight decay 1e-4, batches of 8 × 4, and a
check every 25 steps; the best on held-out classes counts. The learning rate is 1e-3, which works for a head alone;
gradients are not clipped and training does not stop early.
Prints MAP@R of the mean 128-d model and of the joint embeddings of four, and each CCP row minus its loss by paired
t-tests over seeds with Holm's correction.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from timing import source
from torch import Tensor, nn

from nearkin.data.benchmarks import read_cub
from nearkin.data.images import Dataset, Images
from nearkin.data.splits import held_out
from nearkin.evaluation import evaluate
from nearkin.evaluation.statistics import Comparison, against, summary
from nearkin.files import read_json, write_json
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import backbone_settings
from nearkin.space import Space
from nearkin.training.model import Model, build_embedder
from nearkin.training.plan import make_plan

C2 = "contrastive(form=c2, positive=0, negative=0.3841)"
MS = "multi_similarity(alpha=2, beta=40, base=0.5, mining=False)"
ROWS = {"C2": C2, "C2-CCP": f"ccp({C2})", "MS": MS, "MS-CCP": f"ccp({MS})"}
FOLDS, DIM, SPACE, CHECK = 4, 128, Space.BALL, 25
SIZES = ("128-d", "512-d")  # one model, the joint embeddings of all
Row = dict[str, list[float]]


class Known(NamedTuple):
    """Features of images with their labels."""

    x: Tensor
    y: Tensor


def features(images: Images) -> Known:
    """The features of each image, by the network without a head."""
    plan = make_plan({"backbone": "lite0", "dim": 0, "pool": "avg", "device": "cpu"}, backbone_settings("lite0"))
    model = Model(build_embedder(plan, "euclidean"), plan, images.names)
    return Known(model.embed(list(images.sources)), images.labels)


def take(known: Known, images: Images, part: Images) -> Known:
    """The features of some of the images."""
    rows = {path: row for row, path in enumerate(images.sources)}
    return Known(known.x[[rows[path] for path in part.sources]], part.labels)


def score(head: nn.Module, known: Known) -> float:
    """MAP@R of a head."""
    return float(evaluate(SPACE.project(head(known.x)), known.y, metrics=["MAP@R"], space=SPACE)["MAP@R"])


def train(spec: str, known: Known, chooses: Known, *, steps: int, lr: float, seed: int) -> tuple[nn.Linear, int]:
    """A head at its best check on the held-out classes, and the step of that check."""
    torch.manual_seed(seed)
    head = nn.Linear(known.x.shape[1], DIM, bias=False)
    m = method(spec, classes=int(known.y.max()) + 1, dim=DIM, space=SPACE)
    m.bind(head)

    def embed(index: Tensor | None = None, *, augment: bool = False) -> Tensor:  # noqa: ARG001
        return SPACE.project(head(known.x if index is None else known.x[index]))

    with torch.no_grad():
        m.at_check(head, embed, known.y)
    groups = [{"params": list(head.parameters()), "lr": lr}, *m.groups(lr)]
    optimiser = torch.optim.Adam(groups, weight_decay=1e-4)
    best, at, kept = -1.0, 0, head.weight.detach().clone()
    for number, index in enumerate(m.batches(known.y, 32, seed=seed, images_per_class=4), start=1):
        now = Step(SPACE.project(head(known.x[index])), known.y[index], head, known.x[index], index)
        optimiser.zero_grad()
        m.loss(now).backward()
        m.after_backward(head)
        optimiser.step()
        m.after_step(now)
        if number % CHECK == 0:
            with torch.no_grad():
                found = score(head, chooses)
                if found > best:
                    best, at, kept = found, number, head.weight.detach().clone()
                m.at_check(head, embed, known.y, found)
        if number == steps:
            break
    head.load_state_dict({"weight": kept})
    return head.requires_grad_(requires_grad=False), at


def measure(spec: str, data: Dataset, known: Known, test: Known, *, seeds: int, steps: int, lr: float) -> Row:
    """MAP@R on unseen classes per seed, mean of the folds' heads and joint, and the best step of each head."""
    row: Row = {"128-d": [], "512-d": [], "steps": []}
    for seed in range(seeds):
        heads = []
        for fold in range(FOLDS):
            own, chooses = (take(known, data.train, part) for part in held_out(data.train, fold=(fold, FOLDS)))
            head, at = train(spec, own, chooses, steps=steps, lr=lr, seed=seed * FOLDS + fold)
            heads.append(head)
            row["steps"].append(at)
        row["128-d"].append(sum(score(head, test) for head in heads) / FOLDS)
        beside = SPACE.project(torch.cat([SPACE.project(head(test.x)) for head in heads], 1))
        row["512-d"].append(score(nn.Identity(), Known(beside, test.y)))
    return row


def compare(rows: dict[str, Row]) -> dict[str, Comparison]:
    """Each CCP row minus its loss; p is Holm's over all of them."""
    scores = {f"{name}, {size}": dict(enumerate(row[size])) for name, row in rows.items() for size in SIZES}
    return against(scores, {f"{loss}-CCP, {size}": f"{loss}, {size}" for loss in ("C2", "MS") for size in SIZES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cub", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="existing rows are not computed again")
    args = parser.parse_args()
    settings = {"seeds": args.seeds, "steps": args.steps, "lr": args.lr}
    old = read_json(args.out) if args.out and args.out.exists() else {}
    rows: dict[str, Row] = old["rows"] if settings.items() <= old.items() else {}
    if missing := [name for name in ROWS if name not in rows]:
        data = read_cub(args.cub)
        known, test = features(data.train), features(data.test)
        for name in missing:
            rows[name] = measure(ROWS[name], data, known, test, **settings)
            if args.out:
                write_json(args.out, {"rows": rows, **settings, **source()})
    for name, row in rows.items():
        print(f"{name}: MAP@R " + ", ".join(f"{size} {summary(row[size]).mean:.2f}" for size in SIZES))
    tests = compare(rows)
    for name, found in tests.items():
        interval = f"95 % {found.low:+.2f} to {found.high:+.2f}"
        print(f"{name}, minus its loss: {found.difference:+.2f} ({interval}, p {found.p:.3f})")
    if args.out:
        said = {name: found._asdict() for name, found in tests.items()}
        where = source() if missing else {name: old[name] for name in source()}
        write_json(args.out, {"rows": rows, "tests": said, **settings, **where})


if __name__ == "__main__":
    main()
