"""The plan: settings checked, held-out classes."""

import math

import pytest

from nearkin.errors import NearkinError
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
def test_wrong_values_are_refused(given, words):
    with pytest.raises(NearkinError, match=words):
        make_plan(given, {})


def test_settings_override_the_backbone_which_overrides_the_defaults():
    plan = make_plan({"dim": 7, "device": "cpu"}, {"dim": 64, "lr": 0.5})
    assert (plan.dim, plan.lr, plan.batch, plan.precision) == (7, 0.5, Plan.batch, "float32")


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
def test_classes_are_held_out_only_if_needed(select, patience, schedule, wanted):
    assert Plan(select=select, patience=patience, schedule=schedule).needs_held_out is wanted
