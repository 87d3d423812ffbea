"""nearkin: deep metric learning that trains, measures honestly and searches.

import nearkin as nk
m = nk.method("proxy_anchor(alpha=32)", classes=100, dim=512)
loss = m(embeddings, labels)
scores = nk.evaluate(embeddings, labels, metrics=("R@1", "MAP@R"))
run = nk.train(data="glyphs", method="proxy_anchor")
model = nk.load(run.path)
"""

from nearkin import ranks
from nearkin.data import DATASETS, load_dataset
from nearkin.errors import NearkinError
from nearkin.evaluation import evaluate
from nearkin.files import VERSION
from nearkin.methods import losses, strategies
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.samplers import ClassBatchSampler
from nearkin.methods.strategies import STRATEGIES
from nearkin.networks.backbones import BACKBONES
from nearkin.training.launch import train
from nearkin.training.model import Model, load

__version__ = VERSION

__all__ = [
    "BACKBONES",
    "DATASETS",
    "LOSSES",
    "STRATEGIES",
    "ClassBatchSampler",
    "Model",
    "NearkinError",
    "evaluate",
    "load",
    "load_dataset",
    "losses",
    "method",
    "ranks",
    "strategies",
    "train",
]
