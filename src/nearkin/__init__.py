"""nearkin: deep metric learning that trains, measures honestly and searches.

import nearkin as nk
m = nk.method("proxy_anchor(alpha=32)", classes=100, dim=512)
loss = m(embeddings, labels)
scores = nk.evaluate(embeddings, labels, metrics=("R@1", "MAP@R"))
run = nk.train(data="glyphs", method="proxy_anchor")
model = nk.load(run.path)
"""

__version__ = "0.1.0"

from nearkin.backbones import BACKBONES
from nearkin.data import DATASETS, load_dataset
from nearkin.errors import NearkinError
from nearkin.evaluate import evaluate
from nearkin.losses import LOSSES
from nearkin.method import method
from nearkin.model import Model, load
from nearkin.strategies import STRATEGIES
from nearkin.train import train

__all__ = [
    "BACKBONES",
    "DATASETS",
    "LOSSES",
    "STRATEGIES",
    "Model",
    "NearkinError",
    "evaluate",
    "load",
    "load_dataset",
    "method",
    "train",
]
