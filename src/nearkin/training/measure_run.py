"""A finished run, measured again: on its own test classes or on another data set."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.console import Reporter
from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.data.pixels.decode import BadImage
from nearkin.data.pixels.open import Store, left_out, open_store
from nearkin.errors import NearkinError
from nearkin.evaluation import CLUSTERING, Scores, evaluate_under, protocol_of
from nearkin.files import cache_dir, read_json, read_tensors
from nearkin.methods.build import method
from nearkin.training.model import Model, build_embedder, embed_store, joined, load
from nearkin.training.plan import make_plan
from nearkin.training.run_folder import RunFolder


class Embedded(NamedTuple):
    """Test images with their embeddings, and the model that made them."""

    x: Tensor
    images: Images
    model: Model


def embed_test(
    run: str | Path,
    *,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
    model: Model | None = None,
) -> Embedded:
    """Embed the test images of a run's data set, or of another one, by its model or another."""
    reporter = reporter or Reporter()
    model = model or load(run, device=device)
    test = load_dataset(data or model.plan.data, halves=model.plan.halves).test
    store, test, _ = open_images(model, test, "test", reporter=reporter)
    with reporter.bar("embedding") as progress:
        x = embed_store(model.embedder, store, model.view, precision=model.plan.precision, progress=progress)
    return Embedded(x, test, model)


def open_images(model: Model, images: Images, what: str, *, reporter: Reporter) -> tuple[Store, Images, list[BadImage]]:
    """The pixels of images as a model takes them, the images that can be read, and those that cannot, which is said."""
    with reporter.bar(f"reading {what} images") as progress:
        store, good, bad = open_store(
            images,
            short=model.short,
            channels=model.embedder.trunk.channels,
            device=model.device,
            cache=cache_dir(),
            progress=progress,
        )
    if bad:
        reporter.note(left_out(bad, images, what))
    return store, good, bad


def untrained(run: str | Path, *, device: str = "auto") -> Model:
    """The model that a run began with; of folds, all of them as one."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return joined([untrained(part.path, device=device) for part in parts])
    config, (_, about) = read_json(folder.config), read_tensors(folder.model)
    plan = make_plan({**config["plan"], "device": device, "precision": "auto"}, {})
    with torch.random.fork_rng():
        torch.manual_seed(plan.own_seed)
        method(plan.method, classes=len(about["names"]), dim=plan.dim)  # draws before the network does
        embedder = build_embedder(plan, config["space"])
    if embedder.head.linear is not None:
        with torch.no_grad():
            embedder.head.linear.weight *= config.get("resolved", {}).get("head_scale", 1.0)  # older runs have none
    return Model(embedder.to(plan.device).eval(), plan, about["names"])


def joint_name(metric: str, dim: int) -> str:
    """What a metric of several models' embeddings side by side is called, as in "MAP@R 512-d"."""
    return f"{metric} {dim}-d"


def measure_run(
    run: str | Path,
    *,
    data: str | None = None,
    metrics: tuple[str, ...] | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Scores:
    """Scores of a run's model, in percent.

    Of a run of folds METRIC is the mean of its models' scores, METRIC N-d the score of all of them as one.
    """
    folder = RunFolder(run)
    names = metrics or _usual_metrics(folder)
    open_test = partial(embed_test, data=data, device=device, reporter=reporter)
    counts: list[Scores] = []

    def measured(embedded: Embedded, wanted: Sequence[str]) -> Scores:
        x, images, model = embedded
        labels, seed = images.labels.to(x.device), model.plan.seed
        scores = evaluate_under(protocol_of(images), x, labels, metrics=wanted, space=model.embedder.space, seed=seed)
        counts.append(scores)
        return scores

    values = _over_parts(folder, names, open_test, measured)
    return Scores(values, queries=counts[0].queries, left_out=counts[0].left_out)


def query_values(
    run: str | Path,
    *,
    metrics: Sequence[str],
    data: str | None = None,
    device: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """The class of each test query, and its value by every retrieval metric; of folds as `measure_run` has them."""
    open_test = partial(embed_test, data=data, device=device)
    classes: list[Tensor] = []

    def measured(embedded: Embedded, wanted: Sequence[str]) -> dict[str, Tensor]:
        x, images, model = embedded
        protocol, labels = protocol_of(images), images.labels
        classes.append(labels[protocol.query])
        return evaluate_under(
            protocol, x, labels.to(x.device), metrics=wanted, per_query=True, space=model.embedder.space
        )

    names = [name for name in metrics if name.split(" ")[0] not in CLUSTERING]
    values = _over_parts(RunFolder(run), names, open_test, measured)
    return classes[0], values


def _usual_metrics(folder: RunFolder) -> tuple[str, ...]:
    plan, parts = read_json(folder.config)["plan"], folder.parts()
    names = tuple(plan["metrics"])
    return names + tuple(joint_name(name, plan["dim"] * len(parts)) for name in names) if parts else names


def _over_parts(
    folder: RunFolder,
    names: Sequence[str],
    open_test: Callable[[Path], Embedded],
    measured: Callable[[Embedded, Sequence[str]], Mapping[str, Any]],
) -> dict[str, Any]:
    """What `measured` makes of a run's test embeddings; where it has parts, their mean, and that of all as one."""
    parts = folder.parts()
    alone = [name for name in names if not (parts and " " in name)]
    found = [measured(open_test(part.path), alone) for part in parts or [folder] if alone]
    values = {name: sum(each[name] for each in found) / len(found) for name in alone}
    if len(alone) < len(names):
        embedded = open_test(folder.path)
        called = {joint_name(n.split(" ")[0], embedded.x.shape[1]): n.split(" ")[0] for n in names if n not in alone}
        if wrong := [name for name in names if name not in (*alone, *called)]:
            raise NearkinError(f"{folder.path} has no {wrong[0]!r}: its models together have {', '.join(called)}.")
        joint = measured(embedded, list(called.values()))
        values |= {name: joint[base] for name, base in called.items()}
    return {name: values[name] for name in names}
