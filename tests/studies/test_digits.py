"""The demonstration on digits: proxies merge in one go and stay apart where they are drawn anew."""

import pytest
from PIL import Image

from nearkin.console import Reporter
from nearkin.studies import digits as module
from nearkin.studies.digits import ALTERNATING, PROXY, digits_demo, load_digits, train_digits


def test_proxies_merge_in_one_go_and_stay_apart_where_they_are_drawn_anew():
    digits = load_digits()
    eager = ALTERNATING.replace("pool=16", "pool=16, patience=1")
    often = train_digits(eager, digits, problems=3, steps=600)
    once = train_digits(PROXY, digits, steps=600)
    assert len(often.spreads) == 3
    assert often.numbers["proxy spread"] == often.spreads[-1] > 5 * once.numbers["proxy spread"]
    assert often.following is not None
    assert often.following.shape == often.proxies.shape == (40, 2)
    assert once.following is None
    assert once.numbers["MAP@R"] > 60
    assert (once.steps, often.steps) == (600, pytest.approx(400, abs=200))


def test_the_picture(tmp_path, monkeypatch):
    short = train_digits
    monkeypatch.setattr(
        module, "train_digits", lambda spec, digits, **given: short(spec, digits, **given | {"steps": 5})
    )
    without, with_ccp = digits_demo(tmp_path / "demo.png", reporter=Reporter())
    assert (without.name, with_ccp.name) == ("one sub-problem", "CCP, 0 sub-problems")
    assert without.numbers.keys() == with_ccp.numbers.keys()
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.size[0] > 1000
