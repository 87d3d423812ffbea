"""Methods, evaluation and specs with hostile input: finite numbers, or an error in a sentence."""

import random
import warnings

import numpy as np
import pytest
import torch
from contract.cases import METHOD_SPECS, build, step_of
from torture.campaign import Attack, check_sentence

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.methods.catalogue import method
from nearkin.space import Space
from nearkin.spec import parse

CLASSES, DIM = 5, 4


def embeddings(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that few would train with."""
    size = rng.choice([1, 2, 3, 8, 17])
    random_numbers = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(size, DIM, generator=random_numbers)
    y = torch.randint(CLASSES, (size,), generator=random_numbers)
    for _ in range(rng.randrange(3)):
        row = rng.randrange(size)
        how = rng.choice(["zero", "tiny", "huge", "copy", "opposite", "axis", "one class", "all different"])
        if how == "one class":
            y[:] = y[0]
        elif how == "all different":
            y = torch.arange(size) % CLASSES
        elif how == "axis":
            x[row] = torch.eye(DIM)[rng.randrange(DIM)]
        elif how in ("copy", "opposite"):
            x[row] = x[0] * (1 if how == "copy" else -1)
        else:
            x[row] *= {"zero": 0.0, "tiny": 1e-20, "huge": 1e4}[how]
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.float16])
    labels = rng.choice([torch.int64, torch.int32, torch.uint8])
    most = 1e3 if dtype is torch.float16 else 1e6  # a gradient in float16 must be below 65,504
    return x.clamp(-most, most).to(dtype), y.to(labels)


def test_methods(attack: Attack):
    """Random batches (zeros, copies, huge and tiny norms, one class, float16) to every method in every space"""
    for rng in attack.cases(120, 6000):
        spec, space = rng.choice(METHOD_SPECS), rng.choice(list(Space))
        try:
            m = build(spec, classes=CLASSES, dim=DIM, space=space.value, seed=rng.randrange(100))
        except NearkinError:
            attack.saw("method refuses the space in a sentence")
            continue
        m.train()
        try:
            for _ in range(rng.choice([1, 1, 3])):
                x, y = embeddings(rng)
                x.requires_grad_()
                step = step_of(x, y)
                loss = m.loss(step)
                loss.backward()
                m.after_step(step)
                assert loss.isfinite(), (spec, space)
                gradients = [x.grad, *(p.grad for p in m.parameters())]
                assert all(g is None or g.isfinite().all() for g in gradients), (spec, space)
        except NearkinError as error:
            check_sentence(str(error))
            attack.saw("batch refused in a sentence")
        else:
            attack.saw("finite")


def test_evaluate(attack: Attack):
    """Random embeddings and labels of many shapes and types to nk.evaluate"""
    for rng in attack.cases(60, 2000):
        x, y = embeddings(rng)
        how = rng.choice(["plain", "nan", "shape", "labels", "numpy", "list", "strings", "metric"])
        metrics: tuple[str, ...] = ("R@1", "MAP@R")
        given, labels = x, y
        if how == "nan":
            given = x.clone()
            given[0, 0] = rng.choice([torch.nan, torch.inf])
        elif how == "shape":
            given = x.reshape(-1) if rng.random() < 0.5 else x[None]
        elif how == "labels":
            labels = y[:-1] if rng.random() < 0.5 else y.float() + 0.5
        elif how == "numpy":
            given, labels = x.numpy(), y.numpy()
        elif how == "list":
            given, labels = x.tolist(), y.tolist()
        elif how == "strings":
            labels = [str(label) for label in y.tolist()]
        elif how == "metric":
            metrics = (rng.choice(["R@0", "R@", "", "MAP@R@", "nDCG@-1", "P@1e3", "NMI@2", "R@99999999999"]),)
        try:
            with warnings.catch_warnings(action="ignore"):
                scores = nk.evaluate(given, labels, metrics=metrics)
        except NearkinError as error:
            check_sentence(str(error))
            attack.saw("refused in a sentence")
        else:
            assert all(np.isnan(v) or 0 <= v <= 100 for v in scores.values()), (how, scores)
            attack.saw("scores within 0 and 100")


PIECES = [
    *"()=,1-.[] ",
    "xbm",
    "contrastive",
    "size",
    "1e999",
    "'",
    '"',
    "\\",
    "\0",
    "é",
    "\udce9",
    "None",
    "True",
    "💥",
]
PIECES += ["(" * 50, "proxy_anchor(alpha=32)", "lambda=", "__import__('os')", "\n", "nan"]


def test_specs(attack: Attack):
    """Random texts as method specs"""
    for rng in attack.cases(300, 20_000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12)))
        try:
            parse(text)
            method(text, classes=3, dim=2)
        except NearkinError:
            attack.saw("refused in a sentence")
        else:
            attack.saw("a method")


@pytest.mark.parametrize("depth", [50, 100_000])
def test_deep_specs(attack: Attack, depth):
    """Specs nested very deeply"""
    for opening in ("(", "xbm(", "[", "-"):
        with pytest.raises(NearkinError):
            method(opening * depth, classes=3, dim=2)
        attack.saw("refused in a sentence")
