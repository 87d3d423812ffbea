"""Runs to report on: three trained ones, and made-up ones from points and labels."""

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.data.images import Images
from nearkin.evaluation import evaluate_under, protocol_of
from nearkin.report.measured_runs import Label, MeasuredRun, open_runs
from nearkin.report.page import write_page
from nearkin.report.picture_sheets import nearest_rows
from nearkin.space import Space
from nearkin.training.checkpoint import KnownClasses
from nearkin.training.run_folder import RunFolder

POINTS = 100  # on the maps
DATA = "glyphs(classes=48, samples=6)"
RUNS = {
    "anchor": {"method": "proxy_anchor", "select": "validation", "evaluate_every": 2},
    "pairs": {"method": "contrastive(form=c1)"},
    "soft": {"method": "soft_triple(per_class=2)"},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three trained runs of different methods, by name."""
    out = tmp_path_factory.mktemp("runs")
    plan = {"data": DATA, "epochs": 6, "batch": 24, "dim": 16, "device": "cpu"}
    return {name: nk.train(**plan, **settings, out=out / name) for name, settings in RUNS.items()}


@pytest.fixture(scope="session")
def pages(runs, tmp_path_factory):
    """Files of a report of one run and of all three."""
    out = tmp_path_factory.mktemp("pages")
    opened = open_runs([run.path for run in runs.values()], device="cpu")
    return {
        "one": write_page(opened[:1], out / "one.html", points=POINTS),
        "three": write_page(opened, out / "three.html", points=POINTS),
    }


@pytest.fixture
def make_run():
    """A function that makes a run from points and labels, without training."""
    return _make_run


def _make_run(
    points,
    labels,
    *,
    name="made",
    seed=0,
    space=Space.COSINE,
    names=None,
    proxies=None,
    columns=None,
    masks=(None, None),
):
    x = torch.as_tensor(np.asarray(points), dtype=torch.float64)
    y = torch.as_tensor(np.asarray(labels))
    names = tuple(names or (f"class {c}" for c in range(int(y.max()) + 1)))
    images = Images(torch.zeros(len(y), 1, 4, 4, dtype=torch.uint8), y, names, query=masks[0], gallery=masks[1])
    protocol = protocol_of(images)
    values = evaluate_under(protocol, x, y, metrics=("R@1", "MAP@R"), per_query=True, space=space)
    nearest, similarity = nearest_rows(x, images, protocol.query, 8, space)
    records = None
    if proxies is not None or columns:
        p = None if proxies is None else torch.as_tensor(np.asarray(proxies), dtype=torch.float32)
        trained = tuple(f"trained {c}" for c in range(len(p) if p is not None else len(next(iter(columns.values())))))
        records = KnownClasses(trained, p, None if p is None else torch.arange(len(p)), columns or {})
    scores = {metric: float(value.nanmean()) for metric, value in values.items()}
    result = {
        "scores": scores, "before": {"R@1": 1.0}, "queries": len(protocol.query), "left_out": 0, "select": "last",
        "seed": seed, "kept_epoch": 2.0, "method": name, "seconds": 3.0, "images_per_second": 100.0,
        "hardware": "an abacus",
        "commit": "c0ffee", "versions": {"torch": "2"}, "date": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    plan = {
        "data": "made:/somewhere", "method": name, "seed": seed, "backbone": "conv4", "weights": "default", "dim": 2,
        "epochs": 2, "batch": 4, "optimiser": "adamw", "lr": 0.1, "size": 0, "precision": "float32",
        "select_by": "MAP@R",
    }  # fmt: skip
    return MeasuredRun(
        label=Label(name, f"{name}, seed {seed}"),
        folder=RunFolder("nowhere"),
        config={"plan": plan, "method": name, "space": space},
        result=result,
        events=[
            {"event": "test", "step": 0, "epoch": 0, "scores": {"R@1": 1.0, "MAP@R": 1.0}},
            {"event": "epoch", "step": 4, "epoch": 1, "loss": 2.0, "lr": 0.1},
            {"event": "epoch", "step": 8, "epoch": 2, "loss": 1.0, "lr": 0.1},
        ],
        images=images,
        points=space.project(x),
        space=space,
        size=4,
        query=protocol.query,
        gallery=protocol.gallery,
        values=values,
        nearest=nearest,
        similarity=similarity,
        training_classes=frozenset(records.names) if records else frozenset(),
        class_records=records,
    )
