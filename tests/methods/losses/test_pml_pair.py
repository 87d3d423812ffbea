"""Pair losses against pytorch-metric-learning's, in value and gradient, where the definitions coincide.

They do not, and are left to the oracles: c1 and squared contrastive (other sums and divisors), lifted's Eq. 3 (theirs
is the smooth form), margin over all or distance-weighted negatives (theirs repeats pairs in triplets, or draws).
"""

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers

from nearkin import method
from nearkin.methods.relation import References, relate
from nearkin.space import Space

CLASSES, EACH, DIM = 5, 4, 6
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def batch(seed=0, *, each=EACH, spread=0.7):
    """Classes that overlap, in float64, shuffled."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(CLASSES).repeat_interleave(each)[torch.randperm(CLASSES * each, generator=rng)]
    centres = torch.randn(CLASSES, DIM, generator=rng, dtype=torch.float64)
    return centres[y] + spread * torch.randn(len(y), DIM, generator=rng, dtype=torch.float64), y


def build(spec, space=None):
    return method(spec, classes=CLASSES, dim=DIM, space=space).double()


def agree(ours, theirs, *tensors):
    """The same value and, for the given tensors, the same gradients."""
    torch.testing.assert_close(ours.detach(), theirs.detach(), **TOLERANCE)
    assert ours.detach() > 0.01
    for a, b in zip(torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, tensors), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def distance(power=1, normalise=True):
    return distances.LpDistance(normalize_embeddings=normalise, p=2, power=power)


SAME = {
    # each side the mean over its non-zero terms, as PML's reducer does by default
    "contrastive(positive=0.4, negative=1.1)": losses.ContrastiveLoss(pos_margin=0.4, neg_margin=1.1),
    "multi_similarity(mining=False)": losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5),
    "multi_similarity(mining=False, alpha=14, beta=40, base=0.66)": losses.MultiSimilarityLoss(14, 40, 0.66),
    "triplet(squared=False, margin=0.1)": losses.TripletMarginLoss(margin=0.1),
    "triplet(margin=0.3)": losses.TripletMarginLoss(margin=0.3, distance=distance(power=2)),
    "triplet(margin=0.3, over=all)": losses.TripletMarginLoss(
        margin=0.3, distance=distance(power=2), reducer=reducers.MeanReducer()
    ),
    "circle(margin=0.4, gamma=8)": losses.CircleLoss(m=0.4, gamma=8),
    "supcon": losses.SupConLoss(temperature=0.1),
    "fast_ap": losses.FastAPLoss(num_bins=10),
    "fast_ap(bins=16)": losses.FastAPLoss(num_bins=16),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("spec", SAME)
def test_the_same_on_a_batch(spec, seed):
    x, y = batch(seed)
    x.requires_grad_()
    agree(build(spec)(x, y), SAME[spec](x, y), x)


@pytest.mark.parametrize("angle", [36, 45])
def test_angular_on_unit_vectors(angle):
    """Theirs normalises anchors and positives but not negatives: the same where the batch is of unit vectors."""
    x, y = batch()
    x.requires_grad_()
    theirs = losses.AngularLoss(alpha=angle)(torch.nn.functional.normalize(x, dim=1), y)
    agree(build(f"angular(angle={angle})")(x, y), theirs, x)


def test_lifted_on_unnormalised_and_on_unit_vectors():
    x, y = batch()
    x.requires_grad_()
    agree(build("lifted")(x, y), losses.LiftedStructureLoss(distance=distance(normalise=False))(x, y), x)
    agree(build("lifted", space="cosine")(x, y), losses.LiftedStructureLoss()(x, y), x)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_multi_similarity_with_its_mining(seed):
    x, y = batch(seed)
    x.requires_grad_()
    mined = miners.MultiSimilarityMiner(epsilon=0.1)(x, y)
    assert 0 < len(mined[0]) < CLASSES * EACH * (EACH - 1)  # it leaves something out, and not all
    agree(build("multi_similarity")(x, y), losses.MultiSimilarityLoss()(x, y, mined), x)


def test_semi_hard_triplets():
    x, y = batch()
    x.requires_grad_()
    mined = miners.TripletMarginMiner(margin=0.3, type_of_triplets="semihard", distance=distance(power=2))(x, y)
    assert len(mined[0])
    theirs = losses.TripletMarginLoss(margin=0.3, distance=distance(power=2))(x, y, mined)
    agree(build("triplet(margin=0.3, mining=semi_hard)")(x, y), theirs, x)


def hard_pairs(x, y):
    """Naive: for each sample its positives, farthest first, with as many of the nearest negatives."""
    d = torch.cdist(*2 * [torch.nn.functional.normalize(x.detach(), dim=1)])
    anchors, positives, negatives = [], [], []
    for i in range(len(y)):
        farthest = sorted((j for j in range(len(y)) if y[j] == y[i] and j != i), key=lambda j: -d[i, j])
        nearest = sorted((j for j in range(len(y)) if y[j] != y[i]), key=lambda j: d[i, j])
        for j, k in zip(farthest, nearest, strict=False):
            anchors.append(i)
            positives.append(j)
            negatives.append(k)
    return tuple(map(torch.tensor, (anchors, positives, negatives)))


def test_hard_mining_on_the_same_pairs():
    x, y = batch()
    x.requires_grad_()
    a, p, n = hard_pairs(x, y)
    agree(build("triplet(mining=hard)")(x, y), losses.TripletMarginLoss(0.2, distance=distance(2))(x, y, (a, p, n)), x)
    agree(build("contrastive(mining=hard)")(x, y), losses.ContrastiveLoss()(x, y, (a, p, a, n)), x)
    agree(build("margin(sampling=hard)")(x, y), losses.MarginLoss(margin=0.2, beta=1.2)(x, y, (a, p, n)), x)


def test_margin_with_a_boundary_of_each_class():
    """Theirs is over triplets: the same where each positive has one negative, as `sampling="hard"` takes them."""
    x, y = batch()
    x.requires_grad_()
    m = build("margin(sampling=hard, learn=True, nu=0.1)")
    theirs = losses.MarginLoss(margin=0.2, nu=0.1, beta=1.2, learn_beta=True, num_classes=CLASSES).double()
    with torch.no_grad():
        boundaries = torch.linspace(0.8, 1.3, CLASSES, dtype=torch.float64)
        m.boundary.copy_(boundaries)
        theirs.beta.copy_(boundaries)
    pairs = hard_pairs(x, y)
    agree(m(x, y), theirs(x, y, pairs), x)
    (a,) = torch.autograd.grad(m(x, y), [m.boundary])
    (b,) = torch.autograd.grad(theirs(x, y, pairs), [theirs.beta])
    torch.testing.assert_close(a, b, **TOLERANCE)


def test_n_pair_of_first_and_second_images():
    """Theirs compares the first image of each class with the second ones; ours does where those are the references."""
    x, y = batch(each=2)
    x.requires_grad_()
    first = torch.tensor([(y == c).nonzero()[0, 0] for c in range(CLASSES)])
    second = torch.tensor([(y == c).nonzero()[1, 0] for c in range(CLASSES)])
    r = relate(x[first], y[first], References(x[second], y[second]), Space.INNER)
    inner = distances.DotProductSimilarity(normalize_embeddings=False)
    agree(build("n_pair(norm=0.0)").objective(r), losses.NPairsLoss(distance=inner)(x, y), x)


def test_ranked_list():
    """Only the value: theirs lets gradients through the weights. It adds 1e-5 to every weight, and halves the sum."""
    x, y = batch()
    theirs = 2 * losses.RankedListLoss(margin=0.4, Tn=4, imbalance=0.5, alpha=1.2)(x, y)
    ours = build("ranked_list(temperature=4)")(x, y)
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        ("contrastive(negative=1.2)", losses.ContrastiveLoss(neg_margin=1.2)),
        ("multi_similarity(mining=False)", losses.MultiSimilarityLoss()),
        ("triplet", losses.TripletMarginLoss(margin=0.2, distance=distance(power=2))),
        ("circle(margin=0.4, gamma=8)", losses.CircleLoss(gamma=8)),
        ("supcon", losses.SupConLoss()),
    ],
)
def test_the_same_against_references(spec, theirs):
    """A batch against a memory of other samples, most of whose classes are not in the batch."""
    x, y = batch()
    v, labels = batch(seed=9, each=7)
    x, y = x[y < 2].requires_grad_(), y[y < 2]
    ours = build(spec).objective(relate(x, y, References(v, labels), Space.COSINE))
    agree(ours, theirs(x, y, ref_emb=v, ref_labels=labels), x)


def test_multi_similarity_with_its_mining_against_references():
    x, y = batch()
    v, labels = batch(seed=9, each=7)
    x.requires_grad_()
    mined = miners.MultiSimilarityMiner(epsilon=0.1)(x, y, v, labels)
    ours = build("multi_similarity").objective(relate(x, y, References(v, labels), Space.COSINE))
    agree(ours, losses.MultiSimilarityLoss()(x, y, mined, v, labels), x)
