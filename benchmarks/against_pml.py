"""Memory of SoftTriple and resuming a memory, beside pytorch-metric-learning (PML), in one run.

    python benchmarks/against_pml.py                           # Stanford-Online-Products size; needs about 8 GB
    python benchmarks/against_pml.py --classes 300 --out FILE.json

1. SoftTriple with its regulariser: the peak memory of building the loss and taking one step (forward and backward),
   and the value of the loss with the same centres. The size is that of the SoftTriple paper on Stanford Online
   Products: 11,318 classes with 2 centres each.
2. XBM: train 2n steps in one go, and again with a save and a load of every state_dict after n steps. A memory that
   resumes gives the same losses both times.

Evaluation is compared by evaluate_speed.py. tools/pml_table.py makes the table in the README from both files.
"""

import argparse
import copy
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from loss_speed import peak
from pytorch_metric_learning import losses
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from timing import source
from torch import Tensor, nn

import nearkin as nk
from nearkin.files import Json, write_json
from nearkin.methods.base import Step

SOP_CLASSES, SOP_CENTRES = 11_318, 2
CPU = torch.device("cpu")


def our_soft_triple(classes: int, per_class: int, dim: int) -> nn.Module:
    return nk.method(f"soft_triple(per_class={per_class})", classes=classes, dim=dim)


def their_soft_triple(classes: int, per_class: int, dim: int) -> nn.Module:
    return losses.SoftTripleLoss(
        classes,
        dim,
        centers_per_class=per_class,
        weight_regularizer=SparseCentersRegularizer(classes, per_class),
        weight_reg_weight=0.2,
    )


def measure_soft_triple(build: Callable[[], nn.Module], centres: Tensor, x: Tensor, y: Tensor) -> Json:
    """Peak memory of building the loss and of one step, the seconds of both, and the loss."""
    values = []

    def work() -> None:
        loss = build()
        (weights,) = loss.parameters()
        weights.data.copy_(centres if weights.shape == centres.shape else centres.T)
        value = loss(x, y)
        value.backward()
        values.append(value.item())

    start = time.perf_counter()
    most = peak(work, CPU)
    return {"peak_mb": most / 1e6, "seconds": time.perf_counter() - start, "loss": values[0]}


def soft_triple(classes: int, per_class: int, dim: int, batch: int) -> Json:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=rng)
    y = torch.randint(classes, (batch,), generator=rng)
    centres = torch.randn(classes * per_class, dim, generator=rng)
    size = (classes, per_class, dim)
    ours = measure_soft_triple(lambda: our_soft_triple(*size), centres, x.clone().requires_grad_(), y)
    theirs = measure_soft_triple(lambda: their_soft_triple(*size), centres, x.clone().requires_grad_(), y)
    return {"classes": classes, "per_class": per_class, "dim": dim, "batch": batch, "ours": ours, "pml": theirs}


class OurXbm:
    """A linear model trained with nearkin's XBM."""

    def __init__(self, dim: int, size: int) -> None:
        self.model = nn.Linear(dim, dim)
        self.method = nk.method(f"xbm(contrastive(form=c1), size={size}, start=0)", classes=10, dim=dim)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.last = Step(self.model(x), y)
        return self.method.loss(self.last)

    def after_step(self) -> None:
        self.method.after_step(self.last)


class TheirXbm:
    """The same with PML's CrossBatchMemory."""

    def __init__(self, dim: int, size: int) -> None:
        self.model = nn.Linear(dim, dim)
        self.method = losses.CrossBatchMemory(losses.ContrastiveLoss(), dim, memory_size=size)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.method(self.model(x), y)

    def after_step(self) -> None:
        """PML enqueues in the loss."""


def train(build: Callable[[], OurXbm | TheirXbm], batches: list[tuple[Tensor, Tensor]], resume_at: int) -> list[float]:
    """Train over the batches and return the losses; before step `resume_at` save, build everything again and load."""
    torch.manual_seed(0)
    run = build()
    optimiser = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    found = []
    for number, (x, y) in enumerate(batches):
        if number == resume_at:
            saved = copy.deepcopy([run.model.state_dict(), run.method.state_dict(), optimiser.state_dict()])
            run = build()
            optimiser = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
            for part, state in zip((run.model, run.method, optimiser), saved, strict=True):
                part.load_state_dict(state)
        loss = run.loss(x, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.after_step()
        found.append(loss.item())
    return found


def resume(steps: int, batch: int, dim: int, size: int) -> Json:
    """The largest relative difference of a loss after the load, of both libraries."""
    rng = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(batch, dim, generator=rng), torch.randint(10, (batch,), generator=rng)) for _ in range(2 * steps)
    ]
    result: Json = {"steps_before": steps, "steps_after": steps, "batch": batch, "dim": dim, "memory": size}
    for name, kind in (("ours", OurXbm), ("pml", TheirXbm)):
        whole, resumed = (train(lambda kind=kind: kind(dim, size), batches, at) for at in (-1, steps))
        different = [abs(a - b) / abs(a) for a, b in zip(whole[steps:], resumed[steps:], strict=True)]
        result[name] = {
            "largest_difference_percent": 100 * max(different),
            "steps_that_differ": sum(map(bool, different)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=SOP_CLASSES, help="classes of SoftTriple (default %(default)s)")
    parser.add_argument("--per-class", type=int, default=SOP_CENTRES, help="centres per class (default %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()

    memory = soft_triple(options.classes, options.per_class, dim=512, batch=32)
    resumed = resume(steps=20, batch=32, dim=16, size=256)
    for name in ("ours", "pml"):
        found, after = memory[name], resumed[name]
        print(
            f"{name}: SoftTriple {found['peak_mb']:,.0f} MB (loss {found['loss']:.5f}); XBM after a load: "
            f"{after['steps_that_differ']} of {resumed['steps_after']} losses differ, "
            f"by up to {after['largest_difference_percent']:.2g} %"
        )
    if options.out:
        about = {"threads": torch.get_num_threads(), "pml_version": version("pytorch-metric-learning"), **source()}
        write_json(options.out, {"soft_triple": memory, "resume": resumed, **about})


if __name__ == "__main__":
    main()
