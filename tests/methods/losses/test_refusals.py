"""Invalid options are refused when a loss is built, by name."""

import inspect
import math

import pytest

from nearkin.errors import NearkinError
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES

SHARPNESS = ("scale", "gamma", "temperature", "alpha", "beta")
"""What exponents are multiplied or divided by: below 0, near and far would swap."""


def options(name):
    return inspect.signature(LOSSES[name]).parameters


def built(name, **chosen):
    given = {key: 4 for key in ("classes", "dim") if key in options(name)}
    return LOSSES[name](**given, **chosen)


@pytest.mark.parametrize(("name", "option"), [(n, o) for n in LOSSES for o in SHARPNESS if o in options(n)])
@pytest.mark.parametrize("value", [-1.0, -1e-9, -math.inf, math.inf, math.nan])
def test_an_exponent_keeps_its_sign(name, option, value):
    with pytest.raises(NearkinError, match=rf"^{name}: {option} must be a number [^.]*, not {value}\.$"):
        built(name, **{option: value})


@pytest.mark.parametrize(
    "spec",
    [
        "angular(n_pair=-1)", "arcface(scale=0)", "arcface(margin=-0.1)", "circle(gamma=0)", "contrastive(positive=-1)",
        "contrastive(negative=-1)", "cosface(scale=0)", "cosface(margin=-0.1)", "lifted(margin=-1)",
        "margin(margin=-1)", "margin(boundary=0)", "margin(nu=-1)", "margin(cutoff=0)", "margin(upper=0)",
        "mpa(alpha=0)", "mpa(gamma=0)", "mpa(tau=-1)", "mpa_ap(gamma=0)", "mpa_ap(tau=-1)", "mpa_dw(gamma=0)",
        "mpa_dw(tau=-1)", "multi_similarity(alpha=0)", "multi_similarity(beta=0)", "n_pair(norm=-1)",
        "norm_softmax(temperature=0)",
        "proxy_anchor(alpha=0)", "proxy_gml(ratio=0)", "proxy_gml(scale=0)", "proxy_gml(weight=-1)",
        "proxy_nca(scale=0)", "proxy_nca_pp(temperature=0)", "ranked_list(radius=0)", "ranked_list(margin=-1)",
        "ranked_list(balance=-1)", "soft_triple(scale=0)", "soft_triple(gamma=0)", "soft_triple(tau=-1)",
        "supcon(temperature=0)", "triplet(margin=-1)",
    ],
)  # fmt: skip
def test_nonsense_is_refused(spec):
    name, option = spec.split("(")[0], spec.split("(")[1].split("=")[0]
    with pytest.raises(NearkinError, match=f"^{name}: {option} must be a number"):
        method(spec, classes=4, dim=3)
    with pytest.raises(NearkinError, match=f"^{name}: {option} must be a number"):
        method(f"xbm({spec})", classes=4, dim=3)


@pytest.mark.parametrize("name", [name for name in LOSSES if "per_class" in options(name)])
def test_proxies_are_at_least_one_per_class_and_learn_forwards(name):
    for value in (0, -1):
        with pytest.raises(NearkinError, match="at least one class, dimension and proxy"):
            built(name, per_class=value)
    with pytest.raises(NearkinError, match="Proxies: speed must be a number of at least 0, not -1"):
        built(name, speed=-1.0)
    built(name, speed=0.0)  # proxies that stay where they are


def test_what_papers_do_use_is_allowed():
    built("circle", margin=-0.2)  # moves both sides, either way
    built("ranked_list", temperature=0.0)  # all negatives alike
    built("soft_triple", tau=0.0)
    built("contrastive", positive=0.0, negative=0.0)
