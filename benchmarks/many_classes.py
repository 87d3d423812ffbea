"""Steps with very many classes: milliseconds, peak memory, and what else grows with them.

    python benchmarks/many_classes.py --device cuda    steps at 1e4 to 1e6 classes, 512-d, batch 180; 1e7 classes, 256-d
    python benchmarks/many_classes.py --tiny           the same with few classes, to check that it runs
    … --only vcpa                                      only the methods with this in their names
    … --names                                          write and read a model's record with 6 million class names
    … --accuracy letters                               sample_rate of 0.1 and 1 on embedded letters, 3 seeds
    … --accuracy made                                  the same on a made set of 20,000 classes
    … --accuracy cub --data cub:PATH                   the same on features of a frozen lite0 of CUB-200-2011

A step is zero_grad, loss, gradient, optimiser and state of the method, without a network; its time is the median after
two steps. Peak memory is that of the device, relative to [C·K, D] in float32, of which weights, gradient and AdamW's
moments are four. Products are in full float32 except in rows with `tf32`. With `compiled`, VCPA compiles its steps, as
nearkin train makes it do on a GPU. A row that fails is recorded with its error; rows that would begin after `--limit`
seconds are not measured.

The made set: a class is a point z in 32 dimensions, a sample is z with noise beside 32 dimensions that have nothing to
do with the class, mixed by a random network to 64 numbers. A network of two layers is trained on 20,000 classes of five
samples, and its embeddings are scored on 2,000 other classes.
"""

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from timing import milliseconds, source
from torch import Tensor

import nearkin as nk
from nearkin.errors import first_line
from nearkin.files import Json, read_json, read_tensors, write_json, write_tensors
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.training.optimiser import make_optimiser, set_rates
from nearkin.training.plan import Plan

Scores = dict[str, float]

GIB = 2**30
RESULTS = Path(__file__).parent / "results" / "many_classes.json"
SPECS = (
    "proxy_anchor",
    "proxy_anchor(sample_rate=0.1)",
    "vcpa",
    "arcface",
    "mpa_ap(per_class=2)",
    "proxy_isa(steps_per_epoch=1)",
)
HUGE = ("proxy_anchor(sample_rate=0.01)", "proxy_anchor(sample_rate=0.1)")


class Case(NamedTuple):
    spec: str
    classes: int
    dim: int
    batch: int
    compiled: bool = False
    tf32: bool = False


class Goal(NamedTuple):
    milliseconds: float | None = None
    multiple: float | None = None  # of [C·K, D], above one block


GOALS = {
    ("proxy_anchor", 10**6): Goal(40, 5),
    ("proxy_anchor(sample_rate=0.1)", 10**6): Goal(12),
    ("vcpa", 10**6): Goal(200),
}


def cases(*, tiny: bool, gpu: bool) -> Iterator[Case]:
    """All cases, those with goals first."""
    sizes, dim, batch = ((1000, 300, 100), 16, 12) if tiny else ((10**6, 10**5, 10**4), 512, 180)
    for classes in sizes:
        yield from (Case(spec, classes, dim, batch) for spec in SPECS)
        if classes == sizes[0]:
            yield from (Case(spec, 10 * classes, dim // 2, batch) for spec in HUGE)
        if classes == sizes[0] and gpu:
            yield from (Case(spec, classes, dim, batch, tf32=True) for spec in SPECS[:3])
    if gpu:
        yield from (Case("vcpa", sizes[0], dim, batch, compiled=True, tf32=tf32) for tf32 in (False, True))


def measure(case: Case, device: torch.device) -> Json:
    """The median time of a step, its peak memory, and the loss of the first and the last step on one batch."""
    gpu = device.type == "cuda"
    if gpu:
        torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    torch.manual_seed(0)
    with device:
        m = method(case.spec, classes=case.classes, dim=case.dim)
        x = torch.randn(case.batch, case.dim, requires_grad=True)
        y = torch.randint(case.classes, (case.batch,))
    m.compiled = case.compiled
    optimiser = make_optimiser(Plan(device=str(device), graph=False), m.groups(1e-4))
    losses = []

    def step() -> None:
        optimiser.zero_grad()
        x.grad = None
        now = Step(x, y)
        loss = m.loss(now)
        loss.backward()
        optimiser.step()
        m.after_step(now)
        losses.append(loss.detach())

    took, began = [], time.perf_counter()
    for number in range(12):
        if number == 2 and gpu:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        took.append(milliseconds(step, device))
        if number >= 5 and time.perf_counter() - began > 2:
            break
    found: Json = {
        "milliseconds": statistics.median(took[2:]),
        "steps": len(took) - 2,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }
    if gpu:
        peak, vectors = torch.cuda.max_memory_allocated(), 4 * m.proxies.vectors.numel()
        found |= {"peak_gib": peak / GIB, "multiple": peak / vectors}
    return found


def steps(device: torch.device, *, tiny: bool, only: str, limit: float, keep: Callable[[Json], None]) -> None:
    """Measure all cases, and keep the results after each."""
    began, rows, where = time.perf_counter(), list[Json](), source()
    for case in cases(tiny=tiny, gpu=device.type == "cuda"):
        if only not in case.spec:
            continue
        row: Json = case._asdict()
        try:
            # Compilation takes up to half a minute.
            if time.perf_counter() - began > limit - 30 * case.compiled:
                raise TimeoutError(f"not measured: {limit:g} s are over")
            row |= measure(case, device)
        except Exception as error:  # such as too little memory: the other rows are still wanted
            row |= {"error": f"{type(error).__name__}: {first_line(error)}"}
        if (goal := GOALS.get((case.spec, case.classes))) is not None:
            row |= {"goal": goal._asdict()}
        rows.append(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        about = {"device": str(device), "tiny": tiny, "seconds": round(time.perf_counter() - began, 1)}
        keep({**about, "rows": rows, **where})
        print(sentence(row), flush=True)


def sentence(row: Json) -> str:
    """One line about a case."""
    how = ", compiled" * row["compiled"] + ", TF32" * row["tf32"]
    what = f"{row['spec']}{how}, C = {row['classes']:,}, D = {row['dim']}: "
    if "error" in row:
        return what + row["error"]
    peak = f", {row['peak_gib']:.1f} GiB = {row['multiple']:.2f} [C·K, D]" if "peak_gib" in row else ""
    return f"{what}{row['milliseconds']:.1f} ms{peak}; loss {row['first_loss']:.4g} to {row['last_loss']:.4g}"


def names(count: int) -> Json:
    """Seconds to write and to read the names of very many classes with the weights of a model."""
    given = [f"{number:09d} ← класс" for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        began = time.perf_counter()
        write_tensors(path, {"weight": torch.zeros(10)}, {"names": given, "step": 3})
        written = time.perf_counter()
        tensors, about = read_tensors(path)
        read, size = time.perf_counter(), path.stat().st_size
        header = int.from_bytes(path.read_bytes()[:8], "little")
    same = about == {"names": given, "step": 3} and list(tensors) == ["weight"]
    found = {"names": count, "same": same, "write_s": round(written - began, 2), "read_s": round(read - written, 2)}
    print(found := {**found, "bytes": size, "header_bytes": header})
    return {**found, **source()}


RATES = (1.0, 0.1)
METHODS = ("arcface", "proxy_anchor")
METRICS = ("R@1", "MAP@R")


def on_letters(spec: str, seed: int, *, tiny: bool) -> Scores:
    """Scores on the test classes of the embedded letters after nearkin train."""
    given = {"data": "glyphs(classes=40)", "epochs": 1, "dim": 16} if tiny else {"epochs": 8}
    with tempfile.TemporaryDirectory() as folder:
        run = nk.train(method=spec, out=Path(folder) / "run", seed=seed, device="cpu", warmup=0, **given)
        return {name: run.read_result()["scores"][name] for name in METRICS}


def on_birds(spec: str, seed: int, *, tiny: bool, data: str) -> Scores:
    """Scores on the test classes of CUB-200-2011 after training head and proxies on features of a frozen trunk."""
    given = {"epochs": 1} if tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = nk.train(method=spec, data=data, backbone="lite0", trunk="frozen", out=out, seed=seed, **given)
        return {name: run.read_result()["scores"][name] for name in METRICS}


def made_set(classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Five samples [5·C, 64] of each class, and their classes; the same mixing for every seed."""
    rng, mix = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    y = torch.arange(classes).repeat_interleave(5)
    z = torch.randn(classes, 32, generator=rng)[y] + 0.5 * torch.randn(len(y), 32, generator=rng)
    x = torch.cat([z, torch.randn(len(y), 32, generator=rng)], 1)
    for _ in range(2):
        x = torch.tanh(x @ (torch.randn(64, 64, generator=mix) / 6))
    return x, y


def on_made_set(spec: str, seed: int, *, tiny: bool) -> Scores:
    """Scores on other classes of the made set, after 4 epochs of batches of 180."""
    classes, epochs = (200, 1) if tiny else (20_000, 4)
    torch.manual_seed(seed)
    x, y = made_set(classes, seed=2 * seed + 1)
    network = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 32))
    m = method(spec, classes=classes, dim=32)
    groups = [{"params": list(network.parameters()), "lr": 1e-3}, *m.groups(1e-4)]
    optimiser = make_optimiser(Plan(device="cpu", graph=False), groups)
    rates = [group["lr"] for group in groups]
    steps = epochs * len(y) // 180
    for number, index in enumerate(itertools.islice(m.batches(y, 180, seed=seed), steps)):
        set_rates(optimiser, [rate * (1 - number / steps) for rate in rates])
        optimiser.zero_grad()
        now = Step(network(x[index]), y[index])
        m.loss(now).backward()
        optimiser.step()
        m.after_step(now)
    x, y = made_set(classes // 10, seed=2 * seed + 2)
    with torch.no_grad():
        return dict(nk.evaluate(network(x), y, metrics=METRICS))


def accuracy(scores_of: Callable[..., Scores], *, tiny: bool, keep: Callable[[Json], None]) -> None:
    """MAP@R and R@1 by method, rate of sampling and seed."""
    rows = list[Json]()
    for seed, name, rate in itertools.product(range(1 if tiny else 3), METHODS, RATES):
        began = time.perf_counter()
        scores = scores_of(f"{name}(sample_rate={rate})", seed, tiny=tiny)
        seconds = round(time.perf_counter() - began, 1)
        rows.append({"method": name, "rate": rate, "seed": seed, "scores": scores, "seconds": seconds})
        print(rows[-1], flush=True)
        keep({"rows": rows, "tiny": tiny, **source()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--tiny", action="store_true", help="few classes, to check that it runs")
    parser.add_argument("--only", default="", help="only the methods with this in their names")
    parser.add_argument("--limit", type=float, default=65.0, help="begin no row after so many seconds (default 65)")
    parser.add_argument("--names", action="store_true", help="only the names of 6 million classes")
    parser.add_argument("--accuracy", choices=("letters", "made", "cub"), help="only the accuracy of sampled classes")
    parser.add_argument("--data", default="", help="where CUB-200-2011 is, as for nearkin train")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the figures (default %(default)s)")
    args = parser.parse_args()

    def keep(part: str, found: Json) -> None:
        before = read_json(args.out) if args.out.exists() else {}
        write_json(args.out, before | {part: found})

    if args.names:
        keep("names", names(6000 if args.tiny else 6_000_000))
    elif args.accuracy:
        scores_of = {"letters": on_letters, "made": on_made_set, "cub": partial(on_birds, data=args.data)}
        keep_part = partial(keep, f"accuracy_{args.accuracy}")
        accuracy(scores_of[args.accuracy], tiny=args.tiny, keep=keep_part)
    else:
        device = torch.device(args.device)
        steps(device, tiny=args.tiny, only=args.only, limit=args.limit, keep=lambda found: keep("steps", found))


if __name__ == "__main__":
    main()
