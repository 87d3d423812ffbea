"""A frozen trunk embeds each view once; head and proxies train on its features, into a run like any other."""

import pytest
import torch
from made import make_images

import nearkin as nk
from nearkin.files import read_tensors
from nearkin.networks.backbones import build_trunk
from nearkin.training import frozen
from nearkin.training.loop import Training
from nearkin.training.measure_run import measure_run

TINY = {"backbone": "conv4", "batch": 8, "dim": 8, "epochs": 2, "device": "cpu", "trunk": "frozen(views=2)"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a cache of its own and pictures of sixteen classes."""
    top = tmp_path_factory.mktemp("frozen")
    make_images(top / "images", classes=16, each=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEARKIN_CACHE", str(top / "cache"))
        yield top


@pytest.fixture
def computed(monkeypatch):
    """The numbers of images that the trunk embeds, call by call."""
    counts = []
    compute = frozen.FrozenTrunk._compute

    def counting(self, store, rows, show):
        counts.append(len(rows))
        return compute(self, store, rows, show)

    monkeypatch.setattr(frozen.FrozenTrunk, "_compute", counting)
    return counts


def data(place):
    return f"folder:{place / 'images'}"


def test_only_the_head_trains_and_the_run_is_like_any_other(place):
    run = nk.train(**TINY, lr=0.01, data=data(place), out=place / "run")
    state = read_tensors(run.model)[0]
    before = nk.load(nk.train(**{**TINY, "epochs": 0}, data=data(place), out=place / "before")).embedder.state_dict()
    moved = {name.split(".")[0] for name, tensor in state.items() if not torch.equal(tensor, before[name])}
    assert moved == {"head"}
    assert measure_run(run.path, device="cpu") == run.read_result()["scores"]


def test_views_depend_on_the_images_alone_and_are_computed_once(place, computed):
    nk.train(**TINY, data=data(place), out=place / "first", weights="none", seed=7)
    assert computed == [40, 40, 40]  # two random views, and the test view of the test half
    nk.train(**TINY, data=data(place), out=place / "more", seed=7, method="contrastive", fraction=0.6)
    assert computed == [40, 40, 40]
    nk.train(**{**TINY, "trunk": "frozen(views=3)"}, data=data(place), out=place / "third", seed=7)
    assert computed[3:] == [40]
    for damaged in (place / "cache" / f"features-v{frozen.VERSION}").rglob("*.safetensors"):
        damaged.write_bytes(damaged.read_bytes()[:-9])
    nk.train(**TINY, data=data(place), out=place / "again", seed=7)
    assert computed[4:] == [40, 40, 40]


def test_a_module_of_your_own_is_not_cached(place, computed):
    trunk = build_trunk("conv4", weights="none")
    for name in ("own", "own-again"):
        nk.train(**{**TINY, "backbone": trunk}, data=data(place), out=place / name)
    assert computed == [40] * 6


def test_a_step_sees_one_of_the_views(place):
    plan = nk.load(nk.train(**TINY, data=data(place), out=place / "views")).plan
    seen = []

    class Seen(frozen.FrozenTrunk):
        def draw(self, pixels, rng, count=None):
            chosen = super().draw(pixels, rng, count)
            equal = (pixels.canvas[:, :, 0] == chosen[:, None]).all(2)
            seen.append(equal)
            return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearkin.training.launch.FrozenTrunk", Seen)
        nk.train(**{**TINY, "epochs": 6}, data=plan.data, out=place / "seen")
    share = torch.cat(seen).float().mean(0)
    assert torch.cat(seen).any(1).all()
    assert (share > 0.3).all()


def test_an_interrupted_run_resumes_bit_for_bit(place, monkeypatch):
    settings = {**TINY, "lr": 0.01, "data": data(place), "method": "moco(proxy_anchor, queue=8)"}
    whole = nk.train(**settings, out=place / "whole")
    step = Training._one_step

    def cut(self, *batch):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_one_step", cut)
        patch.setattr("nearkin.training.loop.SAVE_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            nk.train(**settings, out=place / "cut")
    resumed = nk.train(out=place / "cut", resume=True)
    a, b = read_tensors(whole.model)[0], read_tensors(resumed.model)[0]
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "spec",
    [
        "ccp(contrastive, every=1)",
        "ccp(contrastive, anchors=samples, every=1)",
        "profs(triplet, plain_representatives=True)",
        "proxy_anchor(initial=means)",
        "vcpa",
    ],
)
def test_methods_that_ask_for_the_network_get_the_head(place, spec):
    more = {"select": "validation", "images_per_class": 2} if "(" in spec else {}
    run = nk.train(**{**TINY, **more}, lr=0.01, method=spec, data=data(place), out=place / spec.replace("/", "-"))
    before = read_tensors(place / "before" / "model.safetensors")[0]
    assert not torch.equal(read_tensors(run.model)[0]["head.linear.weight"], before["head.linear.weight"])


def test_the_test_view_may_be_chosen(place):
    run = nk.train(**TINY, data=data(place), test_view="auto", select="validation", held_out=0.5, out=place / "auto")
    result = run.read_result()
    assert result["test_view"]["size"] == nk.load(run).test_size
    assert len(result["test_view"]["scores"]) > 1
    assert measure_run(run.path, device="cpu") == result["scores"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pool": "gem(learn=True)"}, "pooled once"),
        ({"dim": 0}, "leave out dim=0"),
        ({"compile": True}, "leave out compile"),
        ({"drop_path": 0.1}, "leave out drop_path"),
        ({"trunk": "frozen(views=0)"}, "at least one view"),
        ({"trunk": "frosen"}, "Did you mean 'frozen'"),
    ],
)
def test_what_a_frozen_trunk_cannot_do_is_refused(place, settings, why):
    with pytest.raises(nk.NearkinError, match=why):
        nk.train(**{**TINY, **settings}, data=data(place), out=place / "refused")
    assert not (place / "refused").exists()
