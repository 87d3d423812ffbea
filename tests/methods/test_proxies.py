"""Proxies: grouped by class, drawn once, never below float32."""

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.methods.proxies import Proxies


def test_rows_are_grouped_by_class():
    proxies = Proxies(3, 5, per_class=4)
    assert proxies.vectors.shape == (12, 5)
    for c in range(3):
        assert proxies.labels[4 * c : 4 * c + 4].tolist() == [c] * 4
    assert proxies.classes == 3
    refs = proxies.references()
    assert refs.vectors is proxies.vectors
    assert refs.labels is proxies.labels
    assert refs.rows is None
    assert refs.per_class == 4


def test_the_random_start_has_the_stated_spread():
    torch.manual_seed(0)
    vectors = Proxies(200, 100, initial="normal").vectors
    assert float(vectors.detach().std()) == pytest.approx((2 / 200) ** 0.5, rel=0.03)
    assert abs(float(vectors.detach().mean())) < 0.01


@pytest.mark.parametrize(("classes", "dim", "per_class"), [(0, 4, 1), (3, 0, 1), (3, 4, 0)])
def test_nothing_to_hold_is_refused(classes, dim, per_class):
    with pytest.raises(NearkinError, match="at least one"):
        Proxies(classes, dim, per_class=per_class)


def test_labels_and_vectors_are_in_the_state():
    assert set(Proxies(3, 2).state_dict()) >= {"vectors", "labels", "drawn"}


LABELS = [0, 2, 0, 1, 0, 2, 0, 0]  # 5 of class 0, 1 of class 1, 2 of class 2, none of class 3


def naive_means(x, old, per_class):
    """Proxy k of a class: the mean of its samples k, k + K, k + 2K, …; without any it stays as it was."""
    out = []
    for c in range(4):
        rows = [i for i, label in enumerate(LABELS) if label == c]
        for k in range(per_class):
            mine = rows[k::per_class]
            out.append(sum(x[i] for i in mine) / len(mine) if mine else old[c * per_class + k])
    return torch.stack(out)


@pytest.mark.parametrize("per_class", [1, 2, 3])
def test_means_of_the_data(per_class):
    torch.manual_seed(1)
    proxies = Proxies(4, 3, per_class=per_class, initial="means")
    old, x = proxies.vectors.detach().clone(), torch.randn(len(LABELS), 3)
    proxies.from_data(lambda: x, torch.tensor(LABELS))
    torch.testing.assert_close(proxies.vectors.detach(), naive_means(x, old, per_class))
    assert proxies.vectors.requires_grad


def test_the_data_is_looked_at_once_and_a_loaded_state_knows_it():
    proxies = Proxies(4, 3, initial="means")
    x = torch.randn(len(LABELS), 3)
    proxies.from_data(lambda: x, torch.tensor(LABELS))
    drawn = proxies.vectors.detach().clone()
    fresh = Proxies(4, 3, initial="means")
    fresh.load_state_dict(proxies.state_dict())
    for p in (proxies, fresh):
        p.from_data(lambda: x + 1, torch.tensor(LABELS))
        assert torch.equal(p.vectors.detach(), drawn)


def test_a_random_start_never_asks_for_embeddings():
    proxies = Proxies(4, 3, initial="normal")
    before = proxies.vectors.detach().clone()

    def embed():
        raise AssertionError("nobody should embed the training set")

    proxies.from_data(embed, torch.tensor(LABELS))
    assert torch.equal(proxies.vectors.detach(), before)


def test_low_precision_embeddings_make_float32_proxies():
    proxies = Proxies(4, 3, initial="means")
    proxies.from_data(lambda: torch.randn(len(LABELS), 3).half(), torch.tensor(LABELS))
    assert proxies.vectors.dtype == torch.float32


@pytest.mark.parametrize("lower", [torch.nn.Module.half, torch.nn.Module.bfloat16])
def test_lowering_a_whole_model_leaves_the_proxies(lower):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Proxies(3, 2))
    before = model[1].vectors.detach().clone()
    lower(model)
    assert model[0].weight.dtype != torch.float32
    assert model[1].vectors.dtype == torch.float32
    assert torch.equal(model[1].vectors.detach(), before)
    assert model[1].labels.dtype == torch.int64


def test_float64_is_followed():
    assert Proxies(3, 2).double().vectors.dtype == torch.float64
