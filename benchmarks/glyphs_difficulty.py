"""The difficulty of a setting of the bundled letters, from training classes alone; test scores are never used.

    python benchmarks/glyphs_difficulty.py
    python benchmarks/glyphs_difficulty.py --spec "glyphs(shift=1.5)" --epochs 0

Prints R@1 of raw pixels and of an untrained network, on all training classes and on the quarter that is held out, and
on that quarter of a network trained on the rest, at its last epoch. Raw pixels should fail, training should succeed.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from timing import source

import nearkin as nk
from nearkin.data.images import Images
from nearkin.data.splits import held_out
from nearkin.files import write_json
from nearkin.networks.backbones import backbone_settings, build_trunk
from nearkin.networks.embedder import Embedder
from nearkin.training.model import Model
from nearkin.training.plan import make_plan


def untrained(images: Images, seed: int) -> torch.Tensor:
    """Embeddings by a network with random weights."""
    torch.manual_seed(seed)
    plan = make_plan({"device": "cpu"}, backbone_settings("conv4"))
    return Model(Embedder(build_trunk("conv4"), dim=plan.dim, pool=plan.pool), plan, images.names).embed(images.sources)


def recall_at_1(x: torch.Tensor, images: Images) -> float:
    return nk.evaluate(x, images.labels, metrics=("R@1",))["R@1"]


def trained(spec: str, epochs: int, seed: int) -> float:
    """R@1 on the held-out quarter after the last epoch of training on the others."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"select": "validation", "select_by": "R@1", "epochs": epochs, "seed": seed, "device": "cpu"}
        run = nk.train(data=spec, out=Path(folder) / "run", **settings)
        return [event["score"] for event in run.events() if event["event"] == "check"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="glyphs", help="the data set (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of training, 0 for none (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the network (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and their provenance")
    options = parser.parse_args()
    everything = nk.load_dataset(options.spec).train
    _, quarter = held_out(everything, fraction=0.25)
    figures: dict[str, float] = {}
    for name, images in (("all training classes", everything), ("held-out quarter", quarter)):
        figures[f"raw pixels, {name}"] = recall_at_1(images.sources.flatten(1).float(), images)
        figures[f"untrained, {name}"] = recall_at_1(untrained(images, options.seed), images)
    if options.epochs:
        figures["trained, held-out quarter"] = trained(options.spec, options.epochs, options.seed)
    for name, value in figures.items():
        print(f"R@1 {value:5.1f}  {name}")
    if options.out:
        about = {"spec": options.spec, "epochs": options.epochs, "seed": options.seed}
        write_json(options.out, {**about, "R@1": figures, **source()})


if __name__ == "__main__":
    main()
