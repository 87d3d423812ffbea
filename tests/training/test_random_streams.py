"""Runs with the same seed share the initial network, the order of images and the crops, whatever their methods draw."""

import io

import pytest
import torch
from rich.console import Console

from nearkin.console import Reporter
from nearkin.training.launch import build_training
from nearkin.training.loop import Training
from nearkin.training.plan import make_plan
from nearkin.training.random_streams import drawing_from, stream_seed
from nearkin.training.run_folder import RunFolder

TINY = {"data": "glyphs(classes=12, samples=4)", "batch": 8, "dim": 4, "device": "cpu", "seed": 3}


def new_training(folder, **settings) -> Training:
    reporter = Reporter(Console(file=io.StringIO()))
    return build_training(RunFolder(folder), make_plan({**TINY, **settings}, {}), reporter=reporter)[0]


def initial_network(folder, **settings):
    state = new_training(folder, **settings).model.embedder.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("method", ["mpa_ap", "contrastive", "vcpa", "ccp(every=1)", "soft_triple(per_class=3)"])
def test_one_seed_begins_with_one_network_whatever_the_method(tmp_path, method):
    one, other = (initial_network(tmp_path, method=each) for each in ("proxy_anchor", method))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_seed_begins_with_another_network(tmp_path):
    one, other = (initial_network(tmp_path, seed=seed) for seed in (3, 4))
    assert not torch.equal(one["head.linear.weight"], other["head.linear.weight"])


def first_steps(folder, **settings):
    """Rows, network inputs and initial state of the first three steps."""
    training, steps = new_training(folder, **settings), []
    loss = training.method.loss

    def spy(step):
        steps.append((step.index, step.images))
        return loss(step)

    training.method.loss = spy
    training.run.path.mkdir(exist_ok=True)
    training._before_first_step()
    batches = training.batches()
    for _ in range(3):
        training._one_step(*next(batches))
    return steps


@pytest.mark.parametrize(
    ("one", "other", "images_per_class"),
    [("proxy_anchor", "vcpa", -1), ("contrastive", "ccp(contrastive, every=1)", 4), ("proxy_anchor", "contrastive", 2)],
)
def test_the_order_of_images_and_the_crops_are_the_same(tmp_path, one, other, images_per_class):
    asked = {"images_per_class": images_per_class, "augment": "resized_crop", "drop_path": 0.0}
    a, b = (first_steps(tmp_path / name, method=name, **asked) for name in (one, other))
    for (rows, images), (same_rows, same_images) in zip(a, b, strict=True):
        assert torch.equal(rows, same_rows)
        assert torch.equal(images, same_images)


def test_streams_are_independent_and_leave_the_global_one_alone():
    assert len({stream_seed(0, "network"), stream_seed(0, "method"), stream_seed(1, "network")}) == 3
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with drawing_from(0, "network"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(inside, expected)
