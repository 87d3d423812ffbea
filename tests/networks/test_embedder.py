"""Poolings against naive loops, the head, and the embedder."""

from pathlib import Path

import pytest
import torch
from networks.trunks import maps, noise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.networks.backbones import build_trunk
from nearkin.networks.embedder import POOLS, Embedder, GeM, make_pool


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
        ("gem(p=big)", "p must be a number, not 'big'"),
        ("avg(p=2)", "avg has no option 'p'"),
        ("max+avg", "a name or name"),
    ],
)
def test_unknown_poolings_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(NearkinError, match=sentence):
        make_pool(text)


def test_initial_weights_of_the_head() -> None:
    """Kaiming: normal, variance 2/dim. Glorot: uniform up to √(6/(width + dim)), with that bound reached."""
    torch.manual_seed(0)
    trunk = build_trunk("conv4", weights="none")
    weights = {
        kind: Embedder(trunk, dim=500, head_init=kind).head.linear.weight.detach() for kind in ("kaiming", "glorot")
    }
    assert weights["kaiming"].std() == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    limit = (6 / (trunk.width + 500)) ** 0.5
    assert weights["glorot"].abs().max() == pytest.approx(limit, rel=1e-3)
    assert weights["glorot"].std() == pytest.approx(limit / 3**0.5, rel=0.02)


@pytest.mark.parametrize("space", ["cosine", "ball", "ball_inner", "euclidean", "inner"])
def test_embeddings_lie_in_their_space(space: str) -> None:
    torch.manual_seed(0)
    embedder, x = Embedder(build_trunk("conv4"), dim=16, space=space).eval(), noise(6, 1, 32, 32)
    with torch.no_grad():
        nn.init.normal_(embedder.head.linear.weight, std=0.1)
        x[:3] *= 30  # far out, so that the ball cuts some off and leaves others
        raw, out = embedder.head(embedder.trunk(x)), embedder(x)
    for v, got in zip(raw, out, strict=True):
        norm = float(v.square().sum().sqrt())
        inside = v / max(norm, 1.0)
        expected = {"cosine": v / norm, "ball": inside, "ball_inner": inside, "euclidean": v, "inner": v}[space]
        assert torch.allclose(got, expected, atol=1e-6)
    norms = raw.norm(dim=1)
    assert norms.min() < 1 < norms.max()


def test_the_head_is_layer_norm_and_linear_on_the_pooled_features() -> None:
    torch.manual_seed(0)
    embedder = Embedder(build_trunk("conv4"), dim=8, pool="max", layer_norm=True, space="inner").eval()
    x = noise(4, 1, 32, 32)
    with torch.no_grad():
        nn.init.normal_(embedder.head.linear.bias)
        features, out = embedder.features(x), embedder(x)
    assert torch.allclose(features.double(), naive_pool(maps(embedder.trunk, x), "max"))
    linear = embedder.head.linear
    for v, got in zip(features, out, strict=True):
        standard = (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()
        assert torch.allclose(got, linear.weight @ standard + linear.bias, atol=1e-5)


def test_the_head_is_initialised_as_in_proxy_anchor() -> None:
    torch.manual_seed(0)
    head = Embedder(build_trunk("conv4"), dim=512).head
    assert head.linear.weight.shape == (512, 64)
    assert head.linear.weight.std().item() == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    assert not head.linear.bias.any()
    assert Embedder(build_trunk("conv4"), dim=4, bias=False).head.linear.bias is None


def test_parameters_are_the_trunks_and_the_heads() -> None:
    embedder = Embedder(build_trunk("conv4"), dim=8, pool="gem(learn=True)")
    parts = [*embedder.trunk.parameters(), *embedder.head.parameters()]
    assert {id(p) for p in parts} == {id(p) for p in embedder.parameters()}
    embedder(noise(4, 1, 32, 32))[:, 0].sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in parts)


def test_low_precision_input_gives_float32() -> None:
    torch.manual_seed(0)
    embedder, x = Embedder(build_trunk("conv4"), dim=8, pool="gem").eval(), noise(2, 1, 32, 32)
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
    embedder, other = Embedder(build_trunk("conv4"), dim=8), Embedder(build_trunk("conv4", weights=None), dim=8)
    save_file(embedder.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = noise(3, 1, 32, 32)
    assert torch.equal(maps(embedder, x), maps(other, x))
    assert (embedder.dim, embedder.space) == (8, "cosine")


def test_impossible_embedders_are_refused() -> None:
    with pytest.raises(NearkinError, match=r"at least one dimension .*, not -1"):
        Embedder(build_trunk("conv4"), dim=-1)
    with pytest.raises(NearkinError, match="no space 'sphere'"):
        Embedder(build_trunk("conv4"), space="sphere")
    with pytest.raises(NearkinError, match=r"no pooling 'gen'.*Did you mean 'gem'"):
        Embedder(build_trunk("conv4"), pool="gen")
