"""Embedding and measuring by several ranks: what one process does, to the last digit, with a share of the work."""

from functools import partial

import torch
from contract.processes import on_ranks

import nearkin as nk
from nearkin import ranks
from nearkin.data.pixels.open import open_inputs
from nearkin.data.pixels.views import Normalise, centre
from nearkin.evaluation import evaluate, positive_ranks
from nearkin.training.model import embed_store

ITEMS, BLOCK, BATCH = 120, 16, 8
METRICS = ("R@1", "P@5", "MAP@R", "nDCG@10", "MRR")


def made():
    """Points, some of them twice, in 60 classes of about two."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ITEMS, 96, generator=rng)
    x[::17] = x[3]
    return x, torch.randint(60, (ITEMS,), generator=rng)


def cases():
    """Calls of evaluate, by what is special about them."""
    x, y = made()
    q, g = slice(0, 50), slice(50, None)
    return {
        "halved": partial(evaluate, x, y),
        "by rows": partial(evaluate, x[:, :4], y % 5),
        "by distance": partial(evaluate, x, y, space="euclidean"),
        "gallery": partial(evaluate, x[q], y[q], gallery=x[g], gallery_labels=y[g]),
        "sets": partial(evaluate, x, [{int(label), int(label) % 3 + 100} for label in y]),
        "few": partial(evaluate, x[:9], y[:9] % 2),
    }


def measured(**options):
    """The values of every query, the means and clusterings, and how many products were computed."""
    positive_ranks._split_work = lambda *_: (1, BLOCK)
    products, product = [], positive_ranks._product

    def counting(x, v, *, out):
        products.append(len(x) * len(v))
        product(x, v, out=out)

    positive_ranks._product = counting
    try:
        values = {name: call(metrics=METRICS, per_query=True, **options) for name, call in cases().items()}
    finally:
        positive_ranks._product = product
    means = [evaluate(*made(), metrics=("R@1", "NMI", "MAP@R"), average=how, **options) for how in ("query", "class")]
    return values, means, sum(products)


class Counting(torch.nn.Module):
    """A network that counts its images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dim, self.seen = torch.nn.Linear(3 * 8 * 8, 5), 5, 0

    def forward(self, x):
        self.seen += len(x)
        return self.linear(x.flatten(1))


def embedded(**options):
    """Embeddings of few and of more images, and how many the network has seen."""
    pixels = torch.randint(256, (43, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    store = open_inputs(pixels, short_side=8, enlarge=False, channels=3, device=torch.device("cpu"))
    network, view = Counting(), centre(8, Normalise((0.5,) * 3, (0.5,) * 3))
    found = [
        embed_store(network, store, view, index=index, batch=BATCH, **options)
        for index in (None, torch.tensor([5, 2]), torch.arange(42, 0, -1))
    ]
    return found, network.seen


def on_a_rank():
    return measured(over_ranks=True), embedded(over_ranks=True)


def test_ranks_share_the_work_and_find_what_one_process_does(monkeypatch):
    monkeypatch.setattr(positive_ranks, "_split_work", None)  # which `measured` replaces
    values, means, products = measured()
    vectors, seen = embedded()
    answers = on_ranks(3, on_a_rank)
    for (theirs, their_means, _), (their_vectors, _) in answers:
        for name, case in values.items():
            for metric, value in case.items():
                assert torch.equal(theirs[name][metric].nan_to_num(-1), value.nan_to_num(-1)), f"{metric}, {name}"
        assert their_means == means
        assert [(m.queries, m.left_out) for m in their_means] == [(m.queries, m.left_out) for m in means]
        assert all(map(torch.equal, their_vectors, vectors))
    shares = [count for (_, _, count), _ in answers]
    assert max(shares) < 0.5 * products
    images = [count for _, (_, count) in answers]
    assert sum(images) == seen == 43 + 2 + 42
    assert max(images) - min(images) <= 2 * BATCH + 2


def scores_alone():
    x, y = made()
    return (evaluate(x, y), ranks.size()) if ranks.is_first() else None


def test_one_rank_may_measure_alone():
    x, y = made()
    assert on_ranks(2, scores_alone) == [(nk.evaluate(x, y), 2), None]
