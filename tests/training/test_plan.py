"""The plan: settings checked, schedules, patience, batch-norm policy."""

import math

import pytest
import torch
from torch import nn

from nearkin.errors import NearkinError
from nearkin.training.optimiser import checks_without_progress, lr_factor, make_optimiser, set_training
from nearkin.training.plan import Plan, make_plan


def test_a_misspelt_setting_is_named_with_the_nearest():
    with pytest.raises(NearkinError, match=r"no setting 'epoch'.*'epochs'"):
        make_plan({"epoch": 3}, {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": "three"}, "epochs must be a whole number"),
        ({"optimiser": "lion"}, "one of adamw, adam, rmsprop, sgd"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"fraction": 1.5}, "fraction must be from"),
        ({"held_out": 1.0}, "held_out must be from"),
        ({"lr": -1.0}, "lr must be at least"),
        ({"lr": math.nan}, "lr must be at least"),
        ({"clip_norm": -1.0}, "clip_norm must be at least 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"metrics": ("R@0",)}, "no metric 'R@0'"),
        ({"select_by": "R1"}, "no metric 'R1'"),
        ({"device": "meta"}, "no device 'meta'"),
        ({"device": "toaster"}, "no device 'toaster'"),
        ({"device": "cpu", "precision": "bf16"}, "needs a GPU"),
    ],
)
def test_wrong_values_are_one_sentence(given, words):
    with pytest.raises(NearkinError, match=words):
        make_plan(given, {})


def test_what_was_given_beats_the_backbone_which_beats_the_defaults():
    plan = make_plan({"dim": 7, "device": "cpu"}, {"dim": 64, "lr": 0.5})
    assert (plan.dim, plan.lr, plan.batch, plan.precision) == (7, 0.5, Plan.batch, "float32")


def test_schedules():
    step = Plan(schedule="step", decay=0.5, decay_every=10)
    assert [lr_factor(step, e) for e in (0, 9, 10, 19, 20)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = Plan(schedule="cosine", epochs=10)
    assert lr_factor(cosine, 0) == 1
    assert lr_factor(cosine, 5) == pytest.approx(0.5)
    assert lr_factor(cosine, 9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.9)))
    assert lr_factor(Plan(schedule="constant"), 50) == 1


def test_a_plateau_lowers_the_rate_after_so_many_checks_without_progress():
    plan = Plan(schedule="plateau", decay=0.5, decay_every=2)
    assert lr_factor(plan, 9, []) == 1
    assert lr_factor(plan, 9, [1, 2, 2, 1.9]) == 0.5  # equal is no progress
    assert lr_factor(plan, 9, [1, 2, 2, 1.9, 3, 1]) == 0.5
    assert lr_factor(plan, 9, [1, 0, 0, 0, 0]) == 0.25


def test_progress_counts_from_the_first_of_equals():
    assert checks_without_progress([]) == 0
    assert checks_without_progress([1, 3, 3, 2]) == 2
    assert checks_without_progress([1, 2, 3]) == 0


@pytest.mark.parametrize(
    ("select", "patience", "schedule", "wanted"),
    [
        ("last", 0, "step", False),
        ("validation", 0, "step", True),
        ("last", 3, "step", True),
        ("last", 0, "plateau", True),
        ("test", 3, "plateau", False),
    ],
)
def test_classes_are_held_out_only_where_something_looks_at_them(select, patience, schedule, wanted):
    assert Plan(select=select, patience=patience, schedule=schedule).needs_held_out is wanted


def network() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.Linear(2, 2))


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
