"""What a call of a loss may add: references, pairs and triplets mined elsewhere, losses per sample, weights."""

import pytest
import torch
from contract.cases import CLASSES, DETERMINISTIC_SPECS, DIM, PAIR_SPECS, batch, build, oracle, other_references, value
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from nearkin.errors import NearkinError
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.relation import References, relate

OVER_PROXIES = {"proxy_anchor", "mpa"}
SAMPLED = [spec for spec in DETERMINISTIC_SPECS if spec.split("(")[0] not in OVER_PROXIES]
STRATEGIES_OVER_SAMPLES = [
    "xbm(start=0, size=20)",
    "xbm(triplet, start=0, size=20, weight=0.5, reading=code)",
    "proxy(contrastive(negative=1), per_class=2, pair_weight=0.5)",
    "ccp(multi_similarity, per_class=2, pair_weight=0.5, every=1)",
    "proxy_isa(proxy_nca(scale=4), steps_per_epoch=1, size=7, hardness=0.9)",
    "proxy_isa(mpa_dw(per_class=1), steps_per_epoch=1, size=7)",
]


def gradient(loss, x):
    return torch.autograd.grad(loss, x)[0]


def even():
    """As many samples of each class, so that every sample has as many positives and negatives."""
    x, _ = batch(8)
    return x.requires_grad_(), torch.arange(8) // 2


@pytest.mark.parametrize("spec", SAMPLED + STRATEGIES_OVER_SAMPLES)
def test_reductions_and_weights(spec):
    m = build(spec).double()
    x, y = batch(9)
    if spec in STRATEGIES_OVER_SAMPLES:  # something to remember
        m.after_step(Step(*batch(9, seed=5)))
    x.requires_grad_()
    loss, each = m(x, y), m(x, y, reduction="none")
    assert each.shape == (9,)
    torch.testing.assert_close(each.mean(), loss)
    torch.testing.assert_close(gradient(each.mean(), x), gradient(loss, x))
    torch.testing.assert_close(m(x, y, reduction="sum"), each.sum())
    torch.testing.assert_close(m(x, y, reduction="mean_nonzero"), each.sum() / (each != 0).sum().clamp_min(1))
    w, of_class = torch.linspace(0, 2, 9), torch.linspace(1, 3, CLASSES)
    torch.testing.assert_close(m(x, y, sample_weights=w), (w * each).mean())
    torch.testing.assert_close(m(x, y, class_weights=of_class, reduction="none"), of_class[y] * each)
    torch.testing.assert_close(
        m(x, y.short(), class_weights=of_class, sample_weights=w), (of_class[y] * w * each).mean()
    )


# Where the number of terms depends on their values, or a term on several samples, a sample alone has another mean.
UNEVEN = ("contrastive", "triplet", "margin", "lifted")


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in (*OVER_PROXIES, *UNEVEN)])
def test_the_loss_of_a_sample_is_that_of_its_row_alone(name):
    m = build(name).double()
    x, y = even()
    r = relate(x, y, m.references(x, y), m.space)
    each = m(x, y, reduction="none")
    for i in range(len(y)):
        row = {k: getattr(r, k)[i : i + 1] for k in ("s", "pos", "neg", "rows", "x")}
        alone = m.objective(r._replace(**row))
        if name == "n_pair":  # its norm term is over the batch
            alone = alone - m.norm * r.x[i].square().sum() / 2 + m.norm * r.x.square().sum(1).mean() / 2
        torch.testing.assert_close(each[i], alone)


def test_the_loss_of_a_sample_where_terms_are_counted():
    """A share of the sum, here of the non-zero hinges, times the number of samples."""
    x, y = batch(8)
    m = method("contrastive(form=c2, positive=0.2, negative=0.8)", classes=CLASSES, dim=DIM)
    r = relate(x, y, m.references(x, y), m.space)
    d = torch.cdist(r.x, r.x)
    pull, push = ((d - 0.2).clamp_min(0) * r.pos), ((0.8 - d).clamp_min(0) * r.neg)
    expected = 8 * (pull.sum(1) / (pull > 0).sum().clamp_min(1) + push.sum(1) / (push > 0).sum().clamp_min(1))
    torch.testing.assert_close(m(x, y, reduction="none"), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_means_over_proxies_have_no_losses_of_samples(name):
    x, y = batch()
    if name not in OVER_PROXIES:
        assert build(name)(x, y, reduction="none").shape == y.shape
        return
    for option in ({"reduction": "none"}, {"sample_weights": torch.ones(8)}, {"class_weights": torch.ones(CLASSES)}):
        with pytest.raises(NearkinError, match=r"^This loss is a mean over proxies, not over samples"):
            build(name)(x, y, **option)


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_public_references(spec):
    m = build(spec).double()
    x, y = batch(7)
    refs = other_references((x, y))
    found = m(x, y, references=refs)
    assert float(found.detach()) == pytest.approx(oracle(m, x, y, refs), rel=1e-8, abs=1e-10)
    others = refs.rows < 0  # without rows, all references are others than the samples
    pair = References(refs.vectors[others], refs.labels[others])
    expected = oracle(m, x, y, pair)
    assert float(m(x, y, references=(pair.vectors, pair.labels.int())).detach()) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_without_references_there_are_no_pairs(spec):
    m = build(spec).double()
    x, y = batch(7)
    loss = m(x.requires_grad_(), y, references=(x[:0], y[:0]))
    empty_slot = References(x.new_zeros(1, DIM), torch.tensor([-1]))
    torch.testing.assert_close(loss, m.objective(relate(x, y, empty_slot, m.space)))
    assert gradient(loss, x).isfinite().all()


def pairs_of(y):
    """All positive and negative pairs of a batch, as the miners list them."""
    same = y[:, None] == y
    return (*(same & ~torch.eye(len(y), dtype=torch.bool)).nonzero().T, *(~same).nonzero().T)


@pytest.mark.parametrize("spec", PAIR_SPECS)
def test_listed_pairs(spec):
    """All pairs: the loss itself. Some: as if the others were empty slots."""
    m = build(spec).double()
    x, y = batch(9)
    torch.testing.assert_close(value(m, x, y), m(x, y, pairs_of(y)))
    a, p, b, n = pairs_of(y)
    r = relate(x, y, m.references(x, y), m.space)
    kept = torch.zeros_like(r.pos)
    kept[a[::2], p[::2]] = kept[b[1:], n[1:]] = True
    torch.testing.assert_close(
        m(x, y, indices=(a[::2], p[::2], b[1:], n[1:])), m.objective(r._replace(pos=r.pos & kept, neg=r.neg & kept))
    )


def test_the_pairs_of_a_miner():
    """Mining inside the loss is that of the miner outside."""
    inside, outside = (method(f"multi_similarity(mining={on})", classes=CLASSES, dim=DIM) for on in (True, False))
    for seed in range(3):
        x, y = batch(12, seed=seed)
        torch.testing.assert_close(outside(x, y, MultiSimilarityMiner(epsilon=0.1)(x, y)), inside(x, y))


@pytest.mark.parametrize("kind", ["all", "semihard", "hard"])
def test_the_triplets_of_a_miner(kind):
    """Triplet takes the listed triplets, each as often as it is listed; other losses take their pairs."""
    x, y = batch(12)
    found = TripletMarginMiner(margin=0.2, type_of_triplets=kind)(x, y)
    found = tuple(torch.cat([t, t[:3]]) for t in found)
    theirs = TripletMarginLoss(margin=0.2, distance=LpDistance(power=2))(x, y, found)
    m = method("triplet(margin=0.2)", classes=CLASSES, dim=DIM)
    torch.testing.assert_close(m(x, y, found), theirs)
    assert m(x, y, found, reduction="none").shape == found[0].shape
    w = torch.rand(12)
    torch.testing.assert_close(
        m(x, y, found, reduction="sum", sample_weights=w), (w[found[0]] * m(x, y, found, reduction="none")).sum()
    )
    pairs = method("contrastive", classes=CLASSES, dim=DIM)
    a, p, n = found
    assert torch.equal(pairs(x, y, found), pairs(x, y, (a, p, a, n)))


def test_a_miner_that_finds_nothing():
    x, y = batch()
    nothing = torch.zeros(0, dtype=torch.int64)
    for spec in ("triplet", "triplet(swap=True)", "contrastive", "multi_similarity"):
        for reduction in ("mean", "mean_nonzero", "sum"):
            x.requires_grad_()
            loss = build(spec)(x, y, (nothing,) * 3, reduction=reduction)
            assert float(loss.detach()) == 0
            loss.backward()


@pytest.mark.parametrize(
    ("spec", "options", "match"),
    [
        ("contrastive", {"reduction": "avg"}, r"^reduction is one of mean, mean_nonzero, sum, none, not 'avg'\.$"),
        (
            "contrastive",
            {"sample_weights": torch.ones(3)},
            r"^sample_weights has one number per sample, \[8\]; got \[3\]",
        ),
        ("contrastive", {"class_weights": torch.ones(1)}, r"^class_weights has 1 numbers, but a label is "),
        (
            "contrastive",
            {"references": (torch.ones(2, 3), torch.ones(2).long())},
            r"^references are vectors \[R, 4\] and",
        ),
        ("contrastive", {"references": (torch.ones(2, 4), torch.ones(2))}, r"^The labels of references are integers"),
        ("contrastive", {"indices": (torch.ones(2).long(),) * 2}, r"^indices are three tensors"),
        (
            "contrastive",
            {"indices": (torch.tensor([0]), torch.tensor([8]), torch.tensor([1]))},
            "^indices of references",
        ),
        ("contrastive", {"indices": (*[torch.ones(2).long()] * 2, torch.ones(3).long())}, "^indices of one pair have"),
        ("proxy_nca", {"indices": (torch.ones(2).long(),) * 3}, "^proxy_nca compares samples with its proxies"),
        ("proxy_nca", {"references": (torch.ones(2, 4), torch.ones(2).long())}, "^proxy_nca compares samples with its"),
        ("xbm", {"indices": (torch.ones(2).long(),) * 3}, "^A strategy chooses its own references and pairs: leave"),
        ("xbm", {"references": (torch.ones(2, 4), torch.ones(2).long())}, "^A strategy chooses its own references"),
        ("profs", {"reduction": "none"}, "^The loss of profs is not a mean over the samples of a batch: leave out"),
        ("vcpa", {"sample_weights": torch.ones(8)}, "^The loss of vcpa is not a mean over the samples"),
        ("ccp(anchors=samples, every=1)", {"reduction": "sum"}, "^The loss of ccp is not a mean over the samples"),
        ("proxy_isa", {"reduction": "sum"}, "^This loss is a mean over proxies, not over samples"),
    ],
)
def test_errors(spec, options, match):
    with pytest.raises(NearkinError, match=match):
        build(spec)(*batch(), **options)
