"""The digits demo: proxies merge without sub-problems and stay apart with them."""

from itertools import pairwise

import pytest
from PIL import Image

from nearkin.console import Reporter
from nearkin.studies import digits as module
from nearkin.studies.digits import CCP_SPEC, PROXY_SPEC, digits_demo, load_digits, train_digits


def test_proxies_merge_without_sub_problems_and_stay_apart_with_them():
    digits = load_digits()
    eager = CCP_SPEC.replace("pool=16", "pool=16, patience=1")
    often = train_digits(eager, digits, problems=3, steps=600)
    once = train_digits(PROXY_SPEC, digits, steps=600)
    assert len(often.moments) == 3
    assert often.numbers["proxy spread"] == often.moments[-1].numbers["proxy spread"] > 5 * once.numbers["proxy spread"]
    for before, after in pairwise(often.moments):
        assert before.next_proxies.shape == before.proxies.shape == (40, 2)
        assert not before.points.equal(after.points), "each moment has the network of its own time"
        assert not before.proxies.equal(after.proxies)
        assert not before.next_proxies.equal(before.proxies)
    assert [moment.next_proxies for moment in once.moments] == [None]
    assert once.numbers["MAP@R"] > 60
    assert (once.steps, often.steps) == (600, pytest.approx(400, abs=200))


def test_the_picture(tmp_path, monkeypatch):
    train = train_digits
    monkeypatch.setattr(
        module, "train_digits", lambda spec, digits, **options: train(spec, digits, **options | {"steps": 5})
    )
    without, with_ccp = digits_demo(tmp_path / "demo.png", reporter=Reporter())
    assert (without.name, with_ccp.name) == ("one sub-problem", "CCP, 0 sub-problems")
    assert without.numbers.keys() == with_ccp.numbers.keys()
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.size[0] > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 200, "the panels are not blank"
