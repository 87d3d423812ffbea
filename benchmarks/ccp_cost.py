"""The cost of CCP: a training step relative to the pair loss alone, and a redraw relative to its distances alone.

    python benchmarks/ccp_cost.py                  a small network (conv4, 32 px), as a CPU can time it
    python benchmarks/ccp_cost.py --device cuda    lite0, 224 px, compiled as `nearkin train --compile` does
    python benchmarks/ccp_cost.py --small          small sizes, to check that it runs: ratios are meaningless

A step is at CUB's size: 100 classes, K = 8, 128-d, batch 8 × 4: zero_grad, network, loss, backward, pull, clipping,
optimiser; images are loaded beforehand. A redraw is at_check of the second sub-problem at Stanford-Online-Products'
size: 11,318 classes, a pool of 7 images, K = 4, 128-d: draw, greedy k-center, new proxies, new anchor; the embeddings
are given. It is compared with the distances between pool and proxies. Times are the minimum over alternating rounds; on
a CPU they are processor times, which other load disturbs less.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import Work, least, source, training_step
from torch import Tensor, nn

from nearkin.files import write_json
from nearkin.methods.catalogue import method
from nearkin.methods.proxies import distances
from nearkin.networks.backbones import backbone_settings
from nearkin.training.model import build_embedder
from nearkin.training.plan import make_plan

PAIR = "contrastive(form=c2, positive=0, negative=0.3841)"
GOALS = {"step": 1.10, "redraw": 20.0}


class Size(NamedTuple):
    classes: int  # of the step
    per_class: int
    batch: int
    drawn: int  # classes of the redraw
    pool: int
    picks: int
    dim: int


FULL = Size(100, 8, 32, 11_318, 7, 4, 128)
SMALL = Size(10, 2, 8, 50, 5, 2, 16)


def step_of(spec: str, backbone: str, size: Size, device: torch.device) -> Work:
    settings = {"backbone": backbone, "weights": "none", "dim": size.dim, "device": str(device), "optimiser": "adam"}
    settings |= {"space": "ball", "pool": "avg", "bias": False, "clip_norm": 10.0, "compile": device.type == "cuda"}
    plan = make_plan({**settings, "clip_value": 0}, backbone_settings(backbone))
    torch.manual_seed(0)
    m = method(spec, classes=size.classes, dim=size.dim, space=plan.space)
    embedder = build_embedder(plan, m.space).to(device, memory_format=torch.channels_last)
    m.bind(embedder)
    if "problems" in (state := m.state_dict()):
        m.load_state_dict({**state, "problems": torch.ones_like(state["problems"])})  # the first has no pull
    return training_step(m.to(device), embedder, plan, torch.arange(size.batch, device=device) // 4)


def redraws(size: Size, device: torch.device) -> list[Work]:
    """The distances alone, and a whole redraw."""
    torch.manual_seed(0)
    labels = torch.arange(size.drawn, device=device).repeat_interleave(size.pool)
    known = torch.nn.functional.normalize(torch.randn(len(labels), size.dim, device=device), dim=1)
    points = known.view(size.drawn, size.pool, size.dim)
    options = f"per_class={size.picks}, pool={size.pool}, every=1"
    m = method(f"ccp({PAIR}, {options})", classes=size.drawn, dim=size.dim, space="ball").to(device)
    model = nn.Linear(1, 1).to(device)
    m.bind(model)

    def embed(index: Tensor | None = None, *, augment: bool = False) -> Tensor:  # noqa: ARG001
        return known if index is None else known[index]

    m.at_check(model, embed, labels)
    proxies: Tensor = m.proxies.vectors.detach().view(size.drawn, size.picks, size.dim)
    return [lambda: distances(points, proxies), lambda: m.at_check(model, embed, labels)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--backbone", help="the network (default: conv4 on a CPU, lite0 on a GPU)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    args = parser.parse_args()
    size, device = SMALL if args.small else FULL, torch.device(args.device)
    backbone = args.backbone or ("lite0" if device.type == "cuda" else "conv4")
    ccp = f"ccp({PAIR}, per_class={size.per_class}, pool=12, weight=2e-4)"
    steps = [step_of(spec, backbone, size, device) for spec in (PAIR, ccp)]
    each = 20 if device.type == "cuda" else 5
    rows: dict[str, dict[str, Any]] = {}
    print(f"{device}, {torch.get_num_threads()} threads; network of the step: {backbone}")
    for what, pair, repeat in (("step", steps, each), ("redraw", redraws(size, device), 1)):
        bare, ours = least(pair, rounds=args.rounds, device=device, times=repeat, processors=True)
        rows[what] = {"bare_ms": bare, "ccp_ms": ours, "ratio": ours / bare, "goal": GOALS[what]}
        reached = "" if args.small else f", {'reached' if ours / bare <= GOALS[what] else 'NOT reached'}"
        print(
            f"{what}: {bare:.3f} ms bare, {ours:.3f} ms with CCP, {ours / bare:.3f} × (at most {GOALS[what]}{reached})"
        )
    if args.out:
        about = {
            "size": size._asdict(),
            "backbone": backbone,
            "device": str(device),
        }
        write_json(args.out, {**about, "threads": torch.get_num_threads(), "rows": rows, **source()})


if __name__ == "__main__":
    main()
