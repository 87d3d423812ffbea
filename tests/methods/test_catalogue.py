"""Methods by spec, by keywords and by class; what they need; what they print; sentences on wrong calls."""

import pytest
import torch

import nearkin as nk
from nearkin.errors import NearkinError

SIZES = {"classes": 4, "dim": 8}


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("proxy_anchor(alpha=16)", {"spec": "proxy_anchor", "alpha": 16}),
        ("proxy_anchor(alpha=16, delta=0.2)", {"spec": "proxy_anchor(delta=0.2)", "alpha": 16}),
        ("proxy_anchor(alpha=16)", {"spec": nk.losses.ProxyAnchor, "alpha": 16}),
        ("xbm(contrastive, size=9)", {"spec": nk.strategies.XBM, "inner": nk.losses.Contrastive, "size": 9}),
        ("xbm(contrastive(form=c1), size=9)", {"spec": "xbm", "inner": "contrastive(form=c1)", "size": 9}),
        ("vcpa", {"spec": nk.strategies.VCPA}),
    ],
)
def test_keywords_and_classes_build_what_the_spec_builds(spec, settings):
    built, wanted = nk.method(**settings, **SIZES), nk.method(spec, **SIZES)
    assert built.spec == wanted.spec
    assert type(built) is type(wanted)
    assert str(built.spec) in repr(built)


def test_only_methods_with_proxies_or_a_memory_need_sizes():
    assert nk.method("triplet")(torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])).ndim == 0
    with pytest.raises(NearkinError, match=r"needs classes and dim.*method\('proxy_anchor', classes=…, dim=…\)"):
        nk.method("proxy_anchor")
    with pytest.raises(NearkinError, match="needs dim, for"):
        nk.method("xbm")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spec": "proxy_anchor(alpha=3)", "alpha": 4}, "give it once"),
        ({"spec": "xbm(triplet)", "inner": "contrastive"}, "give it once"),
        ({"spec": "proxy_anchor", "alfa": 4}, "Did you mean 'alpha'"),
        ({"spec": "proxy_anchor", "alpha": "high"}, "must be a number"),
        ({"spec": torch.nn.Linear}, "nearkin.losses or nearkin.strategies"),
    ],
)
def test_wrong_calls_are_sentences(settings, words):
    with pytest.raises(NearkinError, match=words):
        nk.method(**settings, **SIZES)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            torch.randn(4, 8),
            torch.zeros(4, dtype=torch.int64, device="meta"),
            "labels on meta: move them to one device",
        ),
        (torch.randn(4, 8, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"), r"call its .to\('meta'\)"),
        (torch.randn(4, 7), torch.zeros(4, dtype=torch.int64), "build it with dim=7"),
        (torch.randn(4, 8), torch.zeros(4), "call labels.long"),
    ],
)
def test_wrong_batches_are_sentences(x, y, words):
    with pytest.raises(NearkinError, match=words):
        nk.method("proxy_anchor", **SIZES)(x, y)
