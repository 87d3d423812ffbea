"""Runs opened for a report: their names, their measurements, and the errors."""

import pytest
import torch

import nearkin as nk
from nearkin.data.images import Images
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.report.measured_runs import _same_test, by_method, label_runs, open_runs, score_curve


def config(method="proxy_anchor", seed=0, **plan):
    full = {"data": "cub:/here", "method": method, "seed": seed, "lr": 0.1, "device": "cpu", "compile": False, **plan}
    return {"plan": full, "method": f"{method}(resolved)"}


def labels(*configs):
    return [tuple(label) for label in label_runs(configs, [f"folder{n}" for n in range(len(configs))])]


def test_methods_are_named_by_their_spec():
    assert labels(config("a"), config("b")) == [("a", "a"), ("b", "b")]


def test_seeds_of_one_method_share_its_name():
    found = labels(config("a", 0), config("b", 0), config("a", 1, device="cuda", compile=True, data="cub:/there"))
    assert found == [("a", "a, seed 0"), ("b", "b"), ("a", "a, seed 1")]


def test_settings_that_differ_are_named():
    found = labels(config("a"), config("a", lr=0.2, seed=1), config("b"))
    assert found == [("a (lr 0.1)", "a (lr 0.1)"), ("a (lr 0.2)", "a (lr 0.2)"), ("b", "b")]


def test_repeated_trainings_are_named_by_folder():
    first, second = labels(config("a"), config("a"))
    assert first == ("a", "a, seed 0")
    assert second == ("a [folder1]", "a [folder1], seed 0")


def test_scores_and_neighbours_match_the_run(runs):
    (run,) = open_runs([runs["anchor"].path], device="cpu")
    expected = read_json(runs["anchor"].result)["scores"]
    assert set(run.values) == set(expected)
    for metric, value in expected.items():
        assert run.score(metric) == pytest.approx(value, abs=1e-6)
    x = nk.load(runs["anchor"].path, device="cpu").embed(run.images.sources)
    s = torch.nn.functional.normalize(x.double(), dim=1) @ torch.nn.functional.normalize(x.double(), dim=1).T
    s.fill_diagonal_(-2)
    assert torch.equal(run.nearest[:, 0], s.argmax(1))
    assert torch.allclose(run.similarity[:, 0].double(), s.max(1).values, atol=1e-5)
    assert float((run.images.labels[run.nearest[:, 0]] == run.labels).double().mean()) * 100 == pytest.approx(
        expected["R@1"]
    )
    assert run.class_records.proxies.shape == (18, 16)
    assert run.training_classes == set(run.class_records.names)
    assert not run.training_classes & set(run.images.names)


def test_runs_by_method_are_in_the_order_of_their_seeds(make_run):
    points, y = torch.randn(6, 2), [0, 0, 1, 1, 2, 2]
    made = [make_run(points, y, name=name, seed=seed) for name, seed in (("b", 1), ("a", 0), ("b", 0))]
    assert {name: [run.seed for run in group] for name, group in by_method(made).items()} == {"b": [0, 1], "a": [0]}


def test_score_curves_come_from_log_and_result(runs):
    result = read_json(runs["anchor"].result)
    epochs, values = score_curve(runs["anchor"].events(), result, "R@1")
    assert epochs[0] == 0
    assert {2, 4, result["kept_epoch"]} <= set(epochs)
    assert values[0] == result["before"]["R@1"]
    assert values[epochs.index(result["kept_epoch"])] == result["scores"]["R@1"]
    assert score_curve(runs["pairs"].events(), read_json(runs["pairs"].result), "R@1")[0] == [0, 6]
    assert score_curve(runs["anchor"].events(), result, "R@77") == ([], [])


def test_different_test_sets_are_refused(runs, tmp_path):
    other = nk.train(
        data="glyphs(classes=40, samples=6)", epochs=1, batch=24, dim=8, device="cpu", out=tmp_path / "other"
    )
    with pytest.raises(NearkinError, match=r"other were tested on different images .* their scores cannot be compared"):
        open_runs([runs["soft"].path, other.path], device="cpu")
    both = open_runs([runs["soft"].path, other.path], data="glyphs(classes=40, samples=6)", device="cpu")
    assert [s.images.classes for s in both] == [20, 20]


def test_images_are_compared_by_name_not_by_folder(tmp_path):
    def images(folder, names, y=(0, 1)):
        return Images([tmp_path / folder / name for name in names], torch.tensor(y), ("a", "b"))

    assert _same_test(images("here", ["1.png", "2.png"]), images("there", ["1.png", "2.png"]))
    assert not _same_test(images("here", ["1.png", "2.png"]), images("here", ["1.png", "3.png"]))
    assert not _same_test(images("here", ["1.png", "2.png"]), images("here", ["1.png", "2.png"], (1, 0)))
    pixels = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert _same_test(pixels, pixels)
    assert not _same_test(pixels, images("here", ["1.png", "2.png"]))
    assert not _same_test(pixels, Images(pixels.sources + 1, pixels.labels, pixels.names))


def test_a_folder_without_a_finished_run_is_refused(runs, tmp_path):
    with pytest.raises(NearkinError, match="name at least one run folder"):
        open_runs([])
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        open_runs([tmp_path])
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text(runs["soft"].config.read_text())
    with pytest.raises(NearkinError, match=r"begun is not finished: continue it with nearkin train --resume"):
        open_runs([begun])
