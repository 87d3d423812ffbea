"""Uncertainty of training classes: numbers against loops, files, pictures, errors."""

import csv
import html
import re

import numpy as np
import pytest
import torch
from methods.strategies import oracle_vcpa as oracle
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.data.images import Images
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.report.html import Thumbnails
from nearkin.report.measured_runs import by_method, open_runs
from nearkin.report.sections import ReportData, training_classes
from nearkin.space import Space
from nearkin.studies import uncertainty as module
from nearkin.studies.uncertainty import (
    NAME_LENGTH,
    ClassUncertainty,
    draw_map,
    extreme_pairs,
    make_map,
    measure_uncertainty,
    median_similarity,
    standardise,
    summary,
    truncated_name,
    write_uncertainty,
)
from nearkin.training.checkpoint import read_classes
from nearkin.training.run_folder import RunFolder

SMALL = {"data": "glyphs(classes=16)", "backbone": "conv4", "batch": 24, "dim": 8, "epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "vcpa"
    return nk.train(**SMALL, metrics=("R@1",), method="vcpa(tau=0.1)", out=out)


def points(count, dim=5, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("per_class", [1, 2])
def test_median_similarity_against_loops(per_class):
    """Over odd and even numbers of images; with several proxies by the nearest; NaN without an image."""
    x, proxies = points(20), points(4 * per_class, seed=1)
    labels = torch.tensor([0] * 5 + [1] * 8 + [3] * 7)
    proxy_labels = torch.arange(4).repeat_interleave(per_class)
    got = median_similarity(Space.COSINE.project(x), labels, Space.COSINE.project(proxies), proxy_labels, Space.COSINE)
    assert got[2].isnan()
    for c in (0, 1, 3):
        similarities = [
            [oracle.cosine(v.tolist(), p.tolist()) for p in proxies[proxy_labels == c]] for v in x[labels == c]
        ]
        assert float(got[c]) == pytest.approx(np.median([max(s) for s in similarities]), abs=1e-6)
    if per_class == 1:
        want = oracle.s_bar(x, labels, proxies)
        assert [float(got[c]) for c in (0, 1, 3)] == pytest.approx([want[c] for c in (0, 1, 3)], abs=1e-6)


@pytest.mark.parametrize("classes", [2, 5, 1030])
def test_pairs_against_all_pairs(classes):
    """1030 classes need more than one block."""
    proxies = Space.COSINE.project(points(classes, dim=3))
    closest, farthest = extreme_pairs(proxies, torch.arange(classes), Space.COSINE, count=3)
    s = (proxies @ proxies.T).numpy()
    every = sorted((float(s[a, b]), a, b) for a in range(classes) for b in range(a + 1, classes))
    assert [p.similarity for p in farthest] == pytest.approx([t[0] for t in every[:3]], abs=1e-6)
    assert [p.similarity for p in closest] == pytest.approx([t[0] for t in every[::-1][:3]], abs=1e-6)
    assert all(p.a < p.b and p.similarity == pytest.approx(float(s[p.a, p.b]), abs=1e-6) for p in closest + farthest)


def test_classes_of_several_proxies_are_compared_by_their_means():
    proxies = torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.0, 1.0], [0.0, 1.0]])
    closest, _ = extreme_pairs(Space.COSINE.project(proxies), torch.tensor([0, 0, 1, 1]), Space.COSINE)
    assert closest[0].similarity == pytest.approx(0, abs=1e-6)


def made_up(sigma, seed=0):
    """Classes of ten images around their proxies."""
    C = len(sigma)
    proxies = Space.COSINE.project(points(C, seed=seed))
    labels = torch.arange(C).repeat_interleave(10)
    x = Space.COSINE.project(proxies[labels] + 0.1 * points(10 * C, seed=seed + 1))
    images = Images(torch.zeros(10 * C, 1, 4, 4, dtype=torch.uint8), labels, tuple(f"class {c}" for c in range(C)))
    proxy_labels = torch.arange(C)
    similarity = median_similarity(x, labels, proxies, proxy_labels, Space.COSINE)
    return ClassUncertainty(
        images,
        x,
        proxies,
        proxy_labels,
        torch.tensor(sigma),
        similarity,
        *extreme_pairs(proxies, proxy_labels, Space.COSINE),
    )


def test_the_correlation_is_pearsons():
    found = made_up([0.3, 0.1, 0.7, 0.2, 0.5])
    assert found.correlation == pytest.approx(oracle.pearson(found.uncertainty, found.similarity), abs=1e-6)
    assert found.order == [1, 3, 0, 4, 2]


def test_radii_are_proportional_to_the_uncertainty():
    """One factor for all; the radius at the median σ̄ is that of the median cluster, if circles stay apart."""
    found = made_up([0.3, 0.1, 0.7, 0.2, 0.5])
    drawn = make_map(found, points=1000)
    factors = drawn.radii / found.uncertainty.numpy()
    assert factors == pytest.approx(factors[0])
    clusters = [drawn.images[drawn.labels.numpy() == c] for c in range(5)]
    radii = [np.median(np.linalg.norm(cluster - np.median(cluster, axis=0), axis=1)) for cluster in clusters]
    every = range(5)
    apart = [min(np.linalg.norm(drawn.proxies[a] - drawn.proxies[b]) for b in every if a != b) for a in every]
    assert drawn.radii[0] == pytest.approx(min(np.median(radii), np.median(apart) / 6)), "0.3 is the median"
    assert len(drawn.proxies) == 5


@pytest.mark.parametrize("classes", [30, 100])
def test_circles_of_many_diffuse_classes_stay_apart(classes):
    """Most circles reach to no other proxy, so that the map stays readable."""
    labels = torch.arange(classes).repeat(3)
    images = Images(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels, tuple(map(str, range(classes))))
    x, proxies = Space.COSINE.project(points(len(labels))), Space.COSINE.project(points(classes, seed=1))
    similarity, number = torch.zeros(classes), torch.arange(classes)
    found = ClassUncertainty(images, x, proxies, number, torch.full((classes,), 0.2), similarity, [], [])
    drawn = make_map(found, points=1000)
    apart = np.linalg.norm(drawn.proxies[:, None] - drawn.proxies, axis=2) + 1e9 * np.eye(classes)
    assert np.mean(2 * 3 * drawn.radii <= apart.min(axis=1) + 1e-6) >= 0.5


def test_clouds_are_standardise():
    moved = standardise(3 * points(9) + 5)
    assert moved.mean(0).abs().max() < 1e-12
    assert moved.square().sum(1).mean() == pytest.approx(1)
    assert standardise(torch.ones(3, 2)).isfinite().all()


def test_the_same_map_twice(tmp_path):
    found = made_up([0.3, 0.1, 0.7, 0.2, 0.5])
    first, second = (draw_map(found, tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


def test_the_map_joins_the_closest_and_the_farthest_pair(tmp_path, monkeypatch):
    found = made_up([0.3, 0.1, 0.7, 0.2, 0.5])
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure) or path)
    draw_map(found, tmp_path / "map.png")
    drawn, lines = make_map(found, points=1500), {line.get_label(): line for line in figures[0].axes[0].lines}
    for word, pair in (("closest", found.closest[0]), ("farthest", found.farthest[0])):
        line = lines[f"{word} proxies: class {pair.a} and class {pair.b} ({pair.similarity:.2f})"]
        assert line.get_xydata() == pytest.approx(drawn.proxies[[pair.a, pair.b]])


def test_a_run_stores_the_uncertainty_of_its_classes(run):
    records = read_classes(run.classes)
    assert records.columns["uncertainty"].shape == (8,)
    assert (records.columns["uncertainty"] > 0).all()
    assert records.proxies.shape == (8, 8)
    assert records.proxies.any()


def test_files_of_a_run(run, tmp_path):
    found, written = write_uncertainty(run.path, out=tmp_path, device="cpu")
    assert sorted(path.name for path in written) == [
        "classes.csv", "classes.png", "correlation.png", "map.png", "pairs.png", "summary.json",
    ]  # fmt: skip
    assert all(path.stat().st_size > 200 for path in written)
    rows = list(csv.DictReader((tmp_path / "classes.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["class"] for row in rows] == [found.images.names[c] for c in found.order]
    assert [float(row["uncertainty"]) for row in rows] == sorted(float(row["uncertainty"]) for row in rows)
    assert sum(int(row["images"]) for row in rows) == len(found.images)
    told = read_json(tmp_path / "summary.json")
    assert told == summary(found)
    assert told["most_certain"][0]["class"] == rows[0]["class"]
    assert told["correlation"] == found.correlation


def test_similarities_are_those_of_the_training_images(run):
    """Embedded again by the stored model, against a loop over classes."""
    found = measure_uncertainty(run.path, device="cpu")
    records = read_classes(run.classes)
    x = nk.load(run.path, device="cpu").embed(found.images.sources)
    want = oracle.s_bar(x, found.images.labels, records.proxies)
    assert found.similarity.tolist() == pytest.approx(want, abs=1e-5)


def test_the_report_shows_the_uncertainty_class_by_class(run):
    """Name and σ̄ of every training class, in the order of the method."""
    opened = open_runs([run.path], device="cpu")
    section = training_classes(ReportData(opened, by_method(opened), Thumbnails(opened[0].images), 20))
    kept = read_classes(run.classes)
    rows = re.findall(r"<tr><t[hd][^>]*>([^<]+)</t[hd]><t[hd][^>]*>([^<]+)</t[hd]></tr>", section.body)
    assert [html.unescape(name) for name, _ in rows] == list(kept.names)
    assert [float(value) for _, value in rows] == pytest.approx(kept.columns["uncertainty"].tolist(), rel=1e-3)


def test_long_names_are_cut():
    found = made_up([0.1, 0.2])
    images = found.images
    long = found._replace(images=Images(images.sources, images.labels, ("x" * NAME_LENGTH, "y" * 2 * NAME_LENGTH)))
    assert truncated_name(long, 0) == "x" * NAME_LENGTH
    assert truncated_name(long, 1) == "y" * (NAME_LENGTH - 1) + "…"


def test_the_command(run, tmp_path):
    told = CliRunner().invoke(app, ["uncertainty", str(run.path), "--out", str(tmp_path), "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert "Pearson's correlation" in told.output
    assert (tmp_path / "map.png").exists()


def test_a_run_without_uncertainty_is_refused(tmp_path):
    plain = nk.train(**SMALL, metrics=("R@1",), method="proxy_anchor", out=tmp_path / "plain")
    with pytest.raises(
        NearkinError, match="trained with proxy_anchor, which stores no uncertainty per class: use vcpa"
    ):
        measure_uncertainty(plain.path)
    fixed = nk.train(**SMALL, metrics=("R@1",), method="vcpa(sample=False)", out=tmp_path / "fixed")
    with pytest.raises(NearkinError, match="vcpa with sample=False, so its proxies have no uncertainty: train without"):
        measure_uncertainty(fixed.path)
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        measure_uncertainty(RunFolder(tmp_path / "nothing").path)
