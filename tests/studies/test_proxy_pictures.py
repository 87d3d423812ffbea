"""Pictures of a run's proxies and outliers: their numbers, files and errors."""

import csv
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app, main
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.studies import proxies
from nearkin.studies.outliers import draw_outliers, filtered_images, write_filtered
from nearkin.studies.proxies import draw_proxies
from nearkin.training.checkpoint import open_snapshot

TINY = {"data": "glyphs(classes=48, samples=6)", "epochs": 3, "batch": 24, "dim": 16, "device": "cpu"}
STRICT = "proxy_isa(size=40, hardness=1, sensitivity=0, margin=0, volume=4, filter_from=1)"
QUIET = {"reporter": Reporter()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of Proxy-ISA with snapshots, and a baseline without any."""
    folder = tmp_path_factory.mktemp("runs")
    isa = nk.train(**TINY, method=STRICT, snapshots="0,3", evaluate_every=1, out=folder / "isa")
    return isa, nk.train(**TINY, method="proxy_anchor", out=folder / "anchor")


@pytest.fixture(scope="module")
def last(runs):
    snapshot = open_snapshot(runs[0], 3, device="cpu")
    return snapshot, proxies.open_training(snapshot.model, **QUIET)


def test_all_pictures_beside_a_baseline(runs, tmp_path):
    written = draw_proxies(runs[0].path, baselines=[runs[1].path], epochs=[3], points=24, device="cpu", out=tmp_path)
    names = ["tsne.png", "cosines.png", "scores.png", "decay.png", "hardness.png", "filtered.csv", "filtered.png"]
    assert [path.name for path in written] == names
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 300
                assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, f"{path.name} is not blank"


def test_views_and_similarities_match_the_run(last):
    snapshot, opened = last
    view = proxies.embed_view(snapshot, opened, points=48)
    assert (view.x.norm(dim=1) - 1).abs().max() < 1e-5
    assert view.proxies.shape == (24, 16)
    assert len(torch.unique(view.labels)) == 16
    similarities = proxies.proxy_similarities(view, classes=10)
    assert similarities.shape == (30, 10)
    rows = (view.labels == view.labels.min()).nonzero().flatten()[:3]
    want = view.x[rows] @ view.proxies[int(view.labels.min())]
    torch.testing.assert_close(similarities[:3, 0], want)


def test_filtered_images_match_the_counts_of_the_method(last, tmp_path):
    snapshot, opened = last
    found = filtered_images(snapshot, opened, steps_per_epoch=6)
    counts = snapshot.method.filtered
    assert sorted(found.rows.tolist()) == counts.nonzero().flatten().tolist()
    assert counts[found.rows].tolist() == found.times.tolist() == sorted(found.times.tolist(), reverse=True)
    assert found.epochs == 3
    assert (found.s_nearest >= found.s).all()
    path = write_filtered(found, opened, tmp_path / "filtered.csv")
    table = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [int(row["filtered"]) for row in table] == found.times.tolist()
    assert table[0]["class"] == opened.images.names[int(opened.images.labels[found.rows[0]])]
    assert table[0]["image"] == f"row {int(found.rows[0])}"


def test_a_run_without_outliers_has_an_empty_table_and_no_sheet(last, tmp_path, monkeypatch):
    snapshot, opened = last
    kept = snapshot.method.filtered.clone()
    snapshot.method.filtered.zero_()
    written = draw_outliers(snapshot, opened, tmp_path, steps_per_epoch=6)
    snapshot.method.filtered.copy_(kept)
    assert [path.name for path in written] == ["decay.png", "hardness.png", "filtered.csv"]
    assert len((tmp_path / "filtered.csv").read_text().splitlines()) == 1
    monkeypatch.setattr(proxies, "draw_proxies", lambda *_, **__: written)
    told = CliRunner().invoke(app, ["proxies", "a run"]).output
    assert "filtered.csv (empty: no image was filtered)" in told.replace("\n", "")
    assert told.count("empty") == 1


def test_other_methods_have_no_outlier_pictures(runs, tmp_path):
    snapshot = open_snapshot(runs[1], 3, device="cpu")
    opened = proxies.open_training(snapshot.model, **QUIET)
    assert draw_outliers(snapshot, opened, tmp_path, steps_per_epoch=6) == []


def test_epochs_are_spread_evenly_by_default(runs, monkeypatch):
    assert proxies.choose_epochs(runs[0], None) == [0, 3]
    monkeypatch.setattr(proxies, "kept_epochs", lambda _: dict.fromkeys(range(0, 61, 5)))
    assert proxies.choose_epochs(runs[0], None) == [0, 20, 40, 60]


def test_runs_that_cannot_be_drawn_are_refused(runs, tmp_path):
    with pytest.raises(NearkinError, match="no snapshot of epoch 2: it has 0, 3"):
        draw_proxies(runs[0].path, epochs=[2], device="cpu", out=tmp_path)
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        draw_proxies(tmp_path / "nothing", device="cpu")
    pair = nk.train(**{**TINY, "epochs": 1}, method="contrastive", out=tmp_path / "pair")
    with pytest.raises(NearkinError, match="contrastive has no proxies"):
        draw_proxies(pair.path, device="cpu", out=tmp_path)


def test_the_command_refuses_a_wrong_epoch(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nearkin", "proxies", str(runs[0].path), "--epochs", "first"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("nearkin: --epochs takes whole numbers")
