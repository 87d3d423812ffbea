"""Thresholds against naive loops, and the classes they are calibrated on."""

import numpy as np
import pytest
import torch
from made import make_images, make_run

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json
from nearkin.search import calibrate as calibrating
from nearkin.search.calibrate import apply, calibrate, choose, pairs
from nearkin.space import Space

GLYPHS = "glyphs(classes=48, samples=6)"


def naive_choice(s, positive, precision, least):
    """The lowest threshold that reaches the precision, by counting all pairs for every candidate."""
    best = None
    for t in sorted(set(s), reverse=True):
        above = [k for value, k in zip(s, positive, strict=True) if value >= t]
        if len(above) >= least and sum(above) / len(above) >= precision:
            best = (t, sum(above) / len(above), sum(above) / sum(positive))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("precision", [0.3, 0.6, 0.9])
def test_threshold_is_the_lowest_that_reaches_the_precision(seed, precision):
    rng = np.random.default_rng(seed)
    positive = rng.random(300) < 0.3
    s = (rng.normal(size=300) + 1.5 * positive).astype(np.float32)
    if seed % 2:
        s = s.round(1)  # ties count together
    expected = naive_choice(s.tolist(), positive.tolist(), precision, calibrating.MIN_PAIRS)
    found = choose(s, positive, precision)
    assert (found is None) == (expected is None)
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(apply(s, positive, found.similarity), expected, rtol=1e-6)


def test_few_pairs_give_no_threshold():
    s = np.linspace(1, 0, 100, dtype=np.float32)
    assert choose(s, np.arange(100) < 19, 0.97) is None
    found = choose(s, np.arange(100) < 20, 0.97)
    assert found is not None
    assert found.similarity == s[19]


@pytest.mark.parametrize("space", Space)
def test_pairs_lists_every_pair_once(space):
    x, labels = torch.randn(7, 3), torch.tensor([0, 1, 0, 2, 1, 0, 2])
    s, positive = pairs(x, labels, space)
    assert len(s) == 21
    assert positive.sum() == 3 + 1 + 1
    assert (s[:6] <= 1 + 1e-6).all() or space == "inner"


def test_calibration_uses_classes_not_trained_on(tmp_path):
    data = nk.load_dataset(GLYPHS)
    trained = data.train.names[:18]  # the last quarter is held out
    run = make_run(tmp_path / "run", names=trained, data=GLYPHS, select="validation")
    found = calibrate(run, precision=0.2)
    assert found["classes"] == 6
    assert found["images"] == 36
    assert found["pairs"] == 36 * 35 // 2
    assert found["positive_pairs"] == 6 * 15
    assert found["reached"] >= 0.2
    assert "held-out training classes" in found["on"]
    assert "chose the epoch" in found["on"]
    assert read_json(run / "threshold.json") == found
    other = calibrate(run, precision=0.05, data=GLYPHS)  # all classes but the 18
    assert other["classes"] == 30
    assert "not trained on" in other["on"]
    with pytest.raises(NearkinError, match="choose a lower --precision"):
        calibrate(run, precision=0.999)
    with pytest.raises(NearkinError, match="between 0 and 1"):
        calibrate(run, precision=95)


def test_run_without_held_out_classes_asks_for_other_images(tmp_path):
    names = nk.load_dataset(GLYPHS).train.names
    run = make_run(tmp_path / "run", names=names, data=GLYPHS)
    with pytest.raises(NearkinError, match="--data folder:PATH"):
        calibrate(run)
    make_images(tmp_path / "pictures", classes=6, each=5)
    found = calibrate(run, data=f"folder:{tmp_path / 'pictures'}", precision=0.9)
    assert found["classes"] == 6
    assert found["checked"] is not None
    everything = tuple(f"class {c}" for c in range(6))
    with pytest.raises(NearkinError, match="has none"):
        calibrate(make_run(tmp_path / "all", names=everything), data=f"folder:{tmp_path / 'pictures'}")


def test_many_images_are_sampled_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "MAX_IMAGES", 20)
    run = make_run(tmp_path / "run")
    make_images(tmp_path / "pictures", classes=4, each=10)
    found = calibrate(run, data=f"folder:{tmp_path / 'pictures'}", precision=0.5)
    assert (found["classes"], found["images"]) == (4, 20)
