"""The geometry of runs before and after training, and the steps of CCP's sub-problems."""

from itertools import pairwise

import pytest
from PIL import Image

import nearkin as nk
from nearkin.files import read_json, read_tensors
from nearkin.studies.geometry import _edges, draw_sub_problems, geometry_rows, sub_problems
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


def test_before_training_is_the_network_the_run_began_with(run):
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


def test_sub_problems_of_so_many_checks_need_no_scores(tmp_path):
    method = "ccp(contrastive(negative=1), per_class=2, pool=3, every=3)"
    run = nk.train(**{**SETTINGS, "method": method, "select": "last"}, out=tmp_path / "run")
    steps = read_json(run.result)["steps"]
    assert sub_problems(run.path) == [6] * (steps // 6)
    assert steps >= 12
    assert int(read_tensors(run.checkpoint)[0]["method.problems"]) == steps // 6


def test_a_method_without_sub_problems_has_none(tmp_path):
    other = {**SETTINGS, "method": "proxy(contrastive(negative=1))", "epochs": 1}
    assert sub_problems(nk.train(**other, out=tmp_path / "run").path) == []


@pytest.mark.parametrize("lengths", [[100], [100, 100, 125, 300], [25 * n for n in (4, 5, 9, 40, 41, 260)]])
def test_bars_hold_all_lengths_and_none_lies_on_an_edge(lengths):
    edges = _edges(lengths)
    assert edges[0] < min(lengths) <= max(lengths) < edges[-1]
    assert not set(lengths) & set(edges)
    assert len(edges) <= 31
    assert len({round(b - a, 6) for a, b in pairwise(edges)}) == 1
