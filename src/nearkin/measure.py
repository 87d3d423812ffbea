"""A finished run, measured again: on its own test classes or on another data set."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nearkin.data.datasets import load_dataset
from nearkin.data.images import Images
from nearkin.data.shared import Opener
from nearkin.data.stores import open_store
from nearkin.evaluate import Scores, evaluate_under, protocol_of
from nearkin.model import Model, embed_store, load
from nearkin.paths import cache_dir
from nearkin.report.progress import Reporter


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
    opener: Opener = open_store,
) -> Embedded:
    """Embed the test images of a run's data set, or of another one."""
    reporter = reporter or Reporter()
    model = load(run, device=device)
    test = load_dataset(data or model.plan.data, halves=model.plan.halves).test
    with reporter.bar("reading test images") as progress:
        store, test, bad = opener(
            test,
            short=model.short,
            channels=model.embedder.trunk.channels,
            device=model.device,
            cache=cache_dir(),
            progress=progress,
        )
    if bad:
        reporter.note(f"{len(bad)} test images cannot be read and are left out, the first: {bad[0]}")
    with reporter.bar("embedding") as progress:
        x = embed_store(model.embedder, store, model.view, precision=model.plan.precision, progress=progress)
    return Embedded(x, test, model)


def measure_run(
    run: str | Path,
    *,
    data: str | None = None,
    metrics: tuple[str, ...] | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Scores:
    """Scores of a run's model, in percent."""
    x, images, model = embed_test(run, data=data, device=device, reporter=reporter)
    names = metrics or model.plan.metrics
    labels = images.labels.to(x.device)
    space, seed = model.embedder.space, model.plan.seed
    return evaluate_under(protocol_of(images), x, labels, metrics=names, space=space, seed=seed)
