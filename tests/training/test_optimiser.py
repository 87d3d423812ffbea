"""Schedules, patience, optimisers, batch-norm policy."""

import math

import pytest
import torch
from torch import nn

from nearkin.training.optimiser import (
    checks_without_progress,
    lr_factor,
    make_optimiser,
    plateau_epochs,
    set_training,
)
from nearkin.training.plan import Plan, make_plan


def network() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.Linear(2, 2))


def test_schedules():
    step = Plan(schedule="step", decay=0.5, decay_every=10)
    assert [lr_factor(step, e) for e in (0, 9, 10, 19, 20)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = Plan(schedule="cosine", epochs=10)
    assert lr_factor(cosine, 0) == 1
    assert lr_factor(cosine, 5) == pytest.approx(0.5)
    assert lr_factor(cosine, 9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.9)))
    assert lr_factor(Plan(schedule="constant"), 50) == 1
    ramp = Plan(schedule="step", ramp=3, decay_every=4)
    assert [lr_factor(ramp, e) for e in (0, 1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1, 0.5]


def test_a_plateau_lowers_the_rate_after_checks_without_progress():
    plan = Plan(schedule="plateau", decay=0.5, decay_every=2)
    assert lr_factor(plan, 9, []) == 1
    assert lr_factor(plan, 9, [1, 2, 2, 1.9]) == 0.5  # equal is no progress
    assert lr_factor(plan, 9, [1, 2, 2, 1.9, 3, 1]) == 0.5
    assert lr_factor(plan, 9, [1, 0, 0, 0, 0]) == 0.25


def test_progress_counts_from_the_first_of_equal_scores():
    assert checks_without_progress([]) == 0
    assert checks_without_progress([1, 3, 3, 2]) == 2
    assert checks_without_progress([1, 2, 3]) == 0


@pytest.mark.parametrize(
    ("policy", "stats_move", "affine_moves"),
    [("freeze", False, False), ("freeze-stats", False, True), ("train", True, True)],
)
def test_batch_norm_policies(policy, stats_move, affine_moves):
    model = network()
    set_training(model, model[0], Plan(batch_norm=policy), warming_up=False)
    norm = model[0][1]
    before = norm.running_mean.clone()
    norm(torch.randn(8, 2, 4, 4))
    assert (not torch.equal(before, norm.running_mean)) is stats_move
    assert norm.weight.requires_grad is affine_moves
    assert model[0][0].weight.requires_grad


def test_warming_up_freezes_the_trunk_and_not_the_head():
    model = network()
    set_training(model, model[0], Plan(batch_norm="train"), warming_up=True)
    assert not any(p.requires_grad for p in model[0].parameters())
    assert all(p.requires_grad for p in model[1].parameters())
    set_training(model, model[0], Plan(batch_norm="train"), warming_up=False)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "adam", "rmsprop", "sgd"])
def test_every_optimiser_takes_a_step(name):
    model = nn.Linear(2, 1)
    optimiser = make_optimiser(Plan(optimiser=name, device="cpu"), [{"params": list(model.parameters()), "lr": 0.1}])
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("check_every", [2, 3, 6, 7])
def test_the_steps_of_a_plateau_are_repeated_without_scores(check_every):
    """A run on all classes has no scores, and takes the steps of the evaluated run at the same epochs."""
    plateau = make_plan({"schedule": "plateau", "decay_every": 1, "epochs": 6, "device": "cpu"}, {})
    scores = [3.0, 2.0, 4.0, 1.0, 1.0, 5.0, 2.0, 2.0, 1.0, 6.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    at = plateau_epochs(plateau, scores, steps_per_epoch=6, check_every=check_every)
    listed = ",".join(map(str, at))
    step = make_plan({"schedule": "step", "decay_at": listed, "epochs": 6, "device": "cpu"}, {})
    wanted = [lr_factor(plateau, epoch, scores[: epoch * 6 // check_every]) for epoch in range(6)]
    assert len(set(wanted)) > 2
    assert [lr_factor(step, epoch) for epoch in range(6)] == wanted
