"""Pictures of a run's proxies: what is drawn is what the run was, and what cannot be drawn is a sentence."""

import csv
import sys

import pytest
import torch
from PIL import Image

import nearkin as nk
from nearkin.cli import main
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.studies import outliers as isa_pictures
from nearkin.studies import proxy_pictures
from nearkin.studies.proxies import draw_run
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
    return snapshot, proxy_pictures.open_training(snapshot.model, **QUIET)


def test_all_pictures_beside_a_baseline(runs, tmp_path):
    written = draw_run(runs[0].path, baseline=runs[1].path, epochs=[3], points=24, device="cpu", out=tmp_path)
    names = ["tsne.png", "cosines.png", "scores.png", "decay.png", "hardness.png", "filtered.csv", "filtered.png"]
    assert [path.name for path in written] == names
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 300
                assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, f"{path.name} is not blank"


def test_views_are_of_the_run(last):
    snapshot, part = last
    seen = proxy_pictures.view(snapshot, part, points=48)
    assert (seen.x.norm(dim=1) - 1).abs().max() < 1e-5
    assert seen.proxies.shape == (24, 16)
    assert len(torch.unique(seen.labels)) == 16
    cosines = proxy_pictures.cosines(seen, classes=10)
    assert cosines.shape == (30, 10)
    rows = (seen.labels == seen.labels.min()).nonzero().flatten()[:3]
    want = seen.x[rows] @ seen.proxies[int(seen.labels.min())]
    torch.testing.assert_close(cosines[:3, 0], want)


def test_scores_are_those_of_the_log_and_the_result(runs):
    epochs, values = proxy_pictures.score_curve(runs[0], "R@1")
    assert epochs == [0, 1, 2, 3]
    result = read_json(runs[0].result)
    assert (values[0], values[-1]) == (result["before"]["R@1"], result["scores"]["R@1"])
    assert proxy_pictures.score_curve(runs[1], "R@1")[0] == [0, 3]
    assert proxy_pictures.score_curve(runs[0], "R@77") == ([], [])


def test_filtered_images_are_those_the_method_counted(last, tmp_path):
    snapshot, part = last
    found = isa_pictures.filtered_images(snapshot, part, per_epoch=6)
    counts = snapshot.method.filtered
    assert sorted(found.rows.tolist()) == counts.nonzero().flatten().tolist()
    assert counts[found.rows].tolist() == found.times.tolist() == sorted(found.times.tolist(), reverse=True)
    assert found.chances == 3
    assert (found.s_nearest >= found.s).all()
    path = isa_pictures.write_filtered(found, part, tmp_path / "filtered.csv")
    table = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [int(row["filtered"]) for row in table] == found.times.tolist()
    assert table[0]["class"] == part.images.names[int(part.images.labels[found.rows[0]])]
    assert table[0]["image"] == f"row {int(found.rows[0])}"


def test_a_run_that_filtered_nothing_has_an_empty_table_and_no_sheet(last, tmp_path):
    snapshot, part = last
    kept = snapshot.method.filtered.clone()
    snapshot.method.filtered.zero_()
    written = isa_pictures.isa_pictures(snapshot, part, tmp_path, per_epoch=6)
    snapshot.method.filtered.copy_(kept)
    assert [path.name for path in written] == ["decay.png", "hardness.png", "filtered.csv"]
    assert len((tmp_path / "filtered.csv").read_text().splitlines()) == 1


def test_other_methods_have_no_pictures_of_hardness(runs, tmp_path):
    snapshot = open_snapshot(runs[1], 3, device="cpu")
    part = proxy_pictures.open_training(snapshot.model, **QUIET)
    assert isa_pictures.isa_pictures(snapshot, part, tmp_path, per_epoch=6) == []


def test_a_few_epochs_are_chosen_where_none_are_named(runs, monkeypatch):
    assert proxy_pictures.chosen_epochs(runs[0], None) == [0, 3]
    monkeypatch.setattr(proxy_pictures, "kept_epochs", lambda _: dict.fromkeys(range(0, 61, 5)))
    assert proxy_pictures.chosen_epochs(runs[0], None) == [0, 20, 40, 60]


def test_what_cannot_be_drawn_is_a_sentence(runs, tmp_path):
    with pytest.raises(NearkinError, match="no snapshot of epoch 2: it has 0, 3"):
        draw_run(runs[0].path, epochs=[2], device="cpu", out=tmp_path)
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        draw_run(tmp_path / "nothing", device="cpu")
    pair = nk.train(**{**TINY, "epochs": 1}, method="contrastive", out=tmp_path / "pair")
    with pytest.raises(NearkinError, match="contrastive has no proxies"):
        draw_run(pair.path, device="cpu", out=tmp_path)


def test_the_command_names_a_wrong_epoch(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nearkin", "proxies", str(runs[0].path), "--epochs", "first"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("nearkin: Epochs are whole numbers")
