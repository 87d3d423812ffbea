"""Covering radius and distances against plain loops, runs before and after training, CCP's sub-problems."""

import math
from itertools import pairwise

import pytest
import torch
from methods.strategies import oracle_ccp
from PIL import Image
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.files import read_json, read_tensors
from nearkin.space import Space
from nearkin.studies import geometry as module
from nearkin.studies.geometry import (
    _edges,
    covering_radii,
    draw_geometry,
    draw_sub_problems,
    geometry,
    geometry_rows,
    inter_class_distance,
    proxy_spread,
    sub_problems,
)
from nearkin.training.measure_run import embed_test
from nearkin.training.model import load_untrained
from nearkin.training.run_folder import RunFolder

SETTINGS = {
    "data": "glyphs(classes=48, samples=6)",
    "method": "ccp(contrastive(negative=1), per_class=2, pool=3, patience=1)",
    "epochs": 2,
    "batch": 12,
    "dim": 8,
    "space": "ball",
    "select": "validation",
    "check_every": 2,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return nk.train(**SETTINGS, out=tmp_path_factory.mktemp("geometry") / "run")


def test_rows_before_and_after_training(run):
    header, (before, after) = geometry_rows([run.path], device="cpu")
    result = read_json(run.result)
    assert header == ["", "MAP@R", "covering radius", "inter-class distance"]
    assert before[0] == f"{run.path}, before training"
    assert before[1] == f"{result['before']['MAP@R']:.2f}"
    assert after[1] == f"{result['scores']['MAP@R']:.2f}"
    assert before[2:] != after[2:]
    assert all(float(cell) > 0 for cell in (*before[1:], *after[1:]))
    x = embed_test(run.path, device="cpu", model=load_untrained(run.path, device="cpu")).x
    assert not x.equal(embed_test(run.path, device="cpu").x)


def test_sub_problems_are_read_from_the_log(run, tmp_path):
    checks = [event for event in run.events() if event["event"] == "check"]
    best, lengths, begun = -1.0, [], 0
    for check in checks:
        if check["score"] > best + 1e-3:
            best = check["score"]
        else:
            lengths.append(check["step"] - begun)
            best, begun = -1.0, check["step"]
    assert sub_problems(run.path) == lengths
    assert len(lengths) > 1
    sentence = draw_sub_problems(lengths, tmp_path / "steps.png")
    assert f"{len(lengths)} sub-problems of {min(lengths)} to {max(lengths)} steps" in sentence
    with Image.open(tmp_path / "steps.png") as picture:
        assert picture.size[0] > 400


@pytest.fixture(scope="module")
def regular(tmp_path_factory) -> RunFolder:
    """A run with sub-problems of fixed length and snapshots."""
    method = "ccp(contrastive(negative=1), per_class=2, pool=3, every=3)"
    settings = {**SETTINGS, "method": method, "select": "last", "snapshots": "0,1"}
    return nk.train(**settings, out=tmp_path_factory.mktemp("geometry") / "regular")


def test_sub_problems_of_fixed_length_need_no_scores(regular):
    run = regular
    steps = read_json(run.result)["steps"]
    assert sub_problems(run.path) == [6] * (steps // 6)
    assert steps >= 12
    assert int(read_tensors(run.checkpoint)[0]["method.problems"]) == steps // 6


def test_maps_at_each_saved_epoch(regular, run, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure) or path)
    assert draw_geometry(regular.path, tmp_path / "maps.png", device="cpu") == tmp_path / "maps.png"
    titles = [axes.get_title() for axes in figures[0].axes]
    result, per_epoch = read_json(regular.result), read_json(regular.config)["resolved"]["steps_per_epoch"]
    assert [title.split(",")[0] for title in titles] == ["epoch 0", "epoch 1", "epoch 2"]
    assert [int(title.split(", ")[1].split()[0]) for title in titles] == [e * per_epoch // 6 for e in range(3)]
    assert f"MAP@R {result['before']['MAP@R']:.2f}," in titles[0]
    assert f"MAP@R {result['scores']['MAP@R']:.2f}," in titles[2]
    before, after = (figures[0].axes[n].collections[0].get_offsets() for n in (0, 2))
    assert before.shape == after.shape == (result["queries"], 2)
    assert not (before == after).all()
    assert draw_geometry(run.path, tmp_path / "none.png", device="cpu") is None, "one saved epoch shows no change"


def test_the_command_says_that_no_sub_problem_ended(run, monkeypatch):
    monkeypatch.setattr(module, "geometry_rows", lambda *_, **__: (["", "MAP@R"], []))
    monkeypatch.setattr(module, "draw_geometry", lambda *_, **__: None)
    for lengths, said in (([], True), (None, False)):
        monkeypatch.setattr(module, "sub_problems", lambda _, lengths=lengths: lengths)
        told = CliRunner().invoke(app, ["geometry", str(run.path)])
        assert ("no sub-problem of ccp ended" in told.output) == said, told.output


def test_pooled_features_without_a_head_have_a_geometry(tmp_path):
    plain = {**SETTINGS, "method": "proxy_anchor", "epochs": 1, "dim": 0, "select": "last", "space": ""}
    rows = geometry_rows([nk.train(**plain, out=tmp_path / "run").path], device="cpu")[1]
    assert [float(row[2]) > 0 for row in rows] == [True, True]


def test_a_method_without_sub_problems_has_none(tmp_path):
    other = {**SETTINGS, "method": "proxy(contrastive(negative=1))", "epochs": 1}
    assert sub_problems(nk.train(**other, out=tmp_path / "run").path) is None


@pytest.mark.parametrize("lengths", [[100], [100, 100, 125, 300], [25 * n for n in (4, 5, 9, 40, 41, 260)]])
def test_no_length_lies_on_a_bin_edge(lengths):
    edges = _edges(lengths)
    assert edges[0] < min(lengths) <= max(lengths) < edges[-1]
    assert not set(lengths) & set(edges)
    assert len(edges) <= 31
    assert len({round(b - a, 6) for a, b in pairwise(edges)}) == 1


def cloud(seed, classes=5, dim=3):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (30,), generator=rng) * 7
    return torch.randn(30, dim, generator=rng, dtype=torch.float64), labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("space", [Space.COSINE, Space.BALL, Space.EUCLIDEAN])
def test_both_measures_against_plain_loops(seed, space):
    x, y = cloud(seed)
    found = geometry(x, y, space=space)
    points = space.project(x)
    assert found.radius == pytest.approx(oracle_ccp.covering_radius(points, y), rel=1e-9)
    assert found.inter_class == pytest.approx(oracle_ccp.inter_class_distance(points, y), rel=1e-6)


def test_the_block_size_does_not_matter(monkeypatch):
    x, y = cloud(0)
    whole = geometry(x, y)
    monkeypatch.setattr(module, "_BLOCK", 40)
    assert geometry(x, y) == pytest.approx(whole, rel=1e-9)


def test_covering_radii_of_simple_classes():
    """Two points at distance 4: radii 4 and 0. Three on a line: the middle one covers at 3, then 1, 0. One point: 0."""
    x = torch.tensor([[0.0], [4.0], [10.0], [13.0], [14.0], [99.0]])
    y = torch.tensor([3, 3, 1, 1, 1, 0])
    torch.testing.assert_close(covering_radii(x, y), torch.tensor([0.0, 4 / 3, 2.0]))
    assert covering_radii(x[-1:], y[-1:]).tolist() == [0.0]


def test_inter_class_distance():
    x, y = torch.tensor([[0.0, 0], [0, 2], [3, 0]]), torch.tensor([0, 0, 1])
    assert inter_class_distance(x, y) == pytest.approx((3 + 13**0.5) / 2)
    assert math.isnan(inter_class_distance(x, torch.zeros(3, dtype=torch.int64)))


def test_tighter_classes_have_a_smaller_radius():
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 4, generator=rng).repeat_interleave(10, 0)
    noise, labels = torch.randn(60, 4, generator=rng), torch.arange(6).repeat_interleave(10)
    tight, loose = (geometry(centres + s * noise, labels, space="euclidean").radius for s in (0.1, 0.2))
    assert loose == pytest.approx(2 * tight, rel=1e-4)


def test_proxy_spread():
    v = torch.tensor([[0.0, 0], [3, 4], [100, 0], [100, 1]])
    assert proxy_spread(v, torch.tensor([0, 0, 1, 1])) == pytest.approx(3.0)
    assert math.isnan(proxy_spread(v, torch.arange(4))), "no class has two"
