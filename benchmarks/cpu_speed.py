"""Training and embedding on a CPU, beside what else runs the same network there, in one run.

    python benchmarks/cpu_speed.py                          some ten minutes on two cores; needs the extra `export`
    python benchmarks/cpu_speed.py --backbone resnet50 --timm resnet50
    python benchmarks/cpu_speed.py --size 64 --batch 4 --rounds 1 --out /tmp/cpu_speed.json    a quick check

A training step is forward, backward and AdamW with Proxy-Anchor, batch norms in eval mode, on images that are there
already. Embedding is the network in eval mode without gradients. timm's network runs as it is and with images and
weights channels-last, and both again compiled by torch. ONNX Runtime runs the file that `nearkin export` writes.
Times are medians over rounds that alternate between all of them; compiling is not counted. The ratio of ours is to the
fastest other.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from timing import Work, alternating, source, training_step
from torch import Tensor, nn

from nearkin.console import plain_table
from nearkin.files import Json, write_json
from nearkin.methods.catalogue import method
from nearkin.networks.embedder import Embedder, channels_last, pass_images
from nearkin.networks.timm_models import import_timm
from nearkin.training.export import INPUT, OUTPUT, export
from nearkin.training.model import Model, build_embedder
from nearkin.training.plan import Plan, make_plan

RESULTS = Path(__file__).parent / "results" / "cpu_speed.json"
OURS, CLASSES = "nearkin", 100
GOALS = {"training": 1.0, "embedding": 1.2}
FORMATS = {"timm": torch.contiguous_format, "timm, channels-last": torch.channels_last}


class Plain(nn.Module):
    """The same network without this project: timm's, with mean pooling and a linear map to unit vectors."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.trunk: nn.Module = import_timm().create_model(name, num_classes=0)
        self.linear = nn.Linear(self.trunk.num_features, dim)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.linear(self.trunk(x)))


def plain_networks(name: str, dim: int) -> dict[str, tuple[Plain, torch.memory_format, Callable[[Tensor], Tensor]]]:
    """The plain network in both layouts, as it is and compiled: the network, its layout, and what to call."""
    made = {}
    for title, layout in FORMATS.items():
        for compiled in (False, True):
            net = Plain(name, dim).to(memory_format=layout).eval()  # type: ignore[call-overload]
            made[title + ", compiled" * compiled] = (net, layout, torch.compile(net) if compiled else net)
    return made


def training_works(plan: Plan, network: Embedder, timm: str, batch: int) -> dict[str, Work]:
    """A training step of each."""
    y = torch.arange(batch) % CLASSES
    objective = method(plan.method, classes=CLASSES, dim=network.dim)
    works = {OURS: training_step(objective, network, plan, y)}
    side = network.trunk.size

    def plain(net: Plain, layout: torch.memory_format, call: Callable[[Tensor], Tensor]) -> Work:
        own = method(plan.method, classes=CLASSES, dim=network.dim)
        optimiser = torch.optim.AdamW([*net.parameters(), *own.parameters()], lr=plan.lr)
        images = torch.randn(batch, 3, side, side).contiguous(memory_format=layout)

        def step() -> None:
            optimiser.zero_grad()
            own(call(images), y).backward()
            torch.nn.utils.clip_grad_value_([*net.parameters(), *own.parameters()], plan.clip_value)
            optimiser.step()

        return step

    return works | {name: plain(*each) for name, each in plain_networks(timm, network.dim).items()}


def embedding_works(plan: Plan, network: Embedder, timm: str, batch: int) -> dict[str, Work]:
    """A batch embedded by each."""
    images = torch.randn(batch, 3, network.trunk.size, network.trunk.size)
    ordered = channels_last(images)

    def quiet(call: Callable[[Tensor], object], x: Tensor) -> Work:
        def work() -> None:
            with torch.inference_mode():
                call(x)

        return work

    network.eval()
    works = {OURS: quiet(partial(pass_images, network), ordered)}
    for name, (_, layout, call) in plain_networks(timm, network.dim).items():
        works[name] = quiet(call, images.contiguous(memory_format=layout))
    with TemporaryDirectory() as folder:
        run, file = Path(folder) / "run", Path(folder) / "model.onnx"
        export(Model(network, plan, [str(c) for c in range(CLASSES)]).save(run), file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads would slow what comes next
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    array = np.ascontiguousarray(images.numpy())
    return works | {"ONNX Runtime": lambda: session.run([OUTPUT], {INPUT: array})}


def measure(works: dict[str, Work], batch: int, rounds: int) -> Json:
    """Images per second of each, its time relative to ours, and the time of ours relative to the fastest other."""
    times = alternating(list(works.values()), rounds=rounds, device=torch.device("cpu"))
    took = {name: median(each) for name, each in zip(works, times, strict=True)}
    best = min(took[name] for name in works if name != OURS)
    rows = {
        name: {"images_per_second": round(1e3 * batch / ms, 1), "ratio": round(ms / took[OURS], 3)}
        for name, ms in took.items()
    }
    return {"rows": rows, "time_to_best_other": round(took[OURS] / best, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="lite0")
    parser.add_argument("--timm", default="tf_efficientnet_lite0", help="timm's name of the same network")
    parser.add_argument("--size", type=int, default=0, help="of the images, instead of the network's")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(GOALS), help="only one of both")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.manual_seed(0)
    settings = {"backbone": given.backbone, "weights": "none", "pool": "avg", "size": given.size, "device": "cpu"}
    plan = make_plan({"method": "proxy_anchor", "data": "cub:.", "warmup": 0, **settings}, {})
    done: Json = {"backbone": given.backbone, "batch": given.batch, "threads": torch.get_num_threads(), **source()}
    for part, build in (("training", training_works), ("embedding", embedding_works)):
        if given.only in (None, part):
            network = build_embedder(plan, "cosine")
            works = build(plan, network, given.timm, given.batch)
            done |= {
                "size": network.trunk.size,
                part: measure(works, given.batch, given.rounds) | {"goal": GOALS[part]},
            }
            write_json(given.out, done)
            rows = [[name, f"{row['images_per_second']:,}"] for name, row in done[part]["rows"].items()]
            Console().print(plain_table([part, "images/s"], rows))
            ratio = done[part]["time_to_best_other"]
            Console().print(f"{part}: {ratio} of the time of the best other", highlight=False)


if __name__ == "__main__":
    main()
