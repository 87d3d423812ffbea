"""The digits demo: proxies merge without sub-problems and stay apart with them."""

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
    assert len(often.spreads) == 3
    assert often.numbers["proxy spread"] == often.spreads[-1] > 5 * once.numbers["proxy spread"]
    assert often.next_proxies is not None
    assert often.next_proxies.shape == often.proxies.shape == (40, 2)
    assert once.next_proxies is None
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
