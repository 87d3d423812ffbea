"""Proxies in two dimensions: handwritten digits, as in Fig. 2 of CCP's paper.

A pair loss is trained against four proxies per class, once in one go (`proxy`) and once in sub-problems (`ccp`), with
the same number of steps. In the first run the proxies of a class merge; in the second they stay apart. The MAP@R of the
test digits decides when a sub-problem ends; nothing else is chosen by them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.console import Reporter
from nearkin.evaluation import evaluate
from nearkin.methods.base import Step
from nearkin.methods.catalogue import method
from nearkin.methods.strategies.ccp import CCP
from nearkin.methods.strategies.proxy import Proxy
from nearkin.report.charts import INK, figure_style, new_figure, save_figure
from nearkin.space import Space
from nearkin.studies.geometry import geometry, proxy_spread

PAIR_LOSS = "contrastive(form=c2, positive=0, negative=0.3841)"
PROXY_SPEC, CCP_SPEC = f"proxy({PAIR_LOSS}, per_class=4, pool=16)", f"ccp({PAIR_LOSS}, per_class=4, pool=16)"
BATCH, CHECK, LR, WEIGHT_DECAY = 32, 25, 5e-4, 1e-4


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] with values from 0 to 1, and their digits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class Outcome(NamedTuple):
    """The result of a training."""

    name: str
    steps: int
    points: Tensor  # [N, 2] test images
    proxies: Tensor  # [C·K, 2] converged
    next_proxies: Tensor | None  # [C·K, 2] start of the next sub-problem
    labels: Tensor  # [C·K]
    spreads: list[float]  # mean distance of proxies of a class at the end of each sub-problem
    numbers: dict[str, float]


def load_digits(seed: int = 0) -> Digits:
    """Scikit-learn's digits: 1000 for training, the others for testing."""
    from sklearn.datasets import load_digits as load

    source = load()
    images, labels = torch.tensor(source.images, dtype=torch.float32)[:, None] / 16, torch.tensor(source.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return Digits(images[order[:1000]], labels[order[:1000]], images[order[1000:]], labels[order[1000:]])


class Network(nn.Module):
    """A network with two hidden layers and output in the unit disc."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in ((64, 256), (256, 256)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(256, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Embed images as points [B, 2]."""
        return Space.BALL.project(self.layers(x))


def train_digits(spec: str, digits: Digits, *, seed: int = 0, problems: int = 5, steps: int = 3000) -> Outcome:
    """Train for `steps` steps, or until `problems` sub-problems have ended."""
    torch.manual_seed(seed)
    network, trained = Network(), method(spec, classes=10, dim=2, space="ball")
    assert isinstance(trained, CCP | Proxy)
    trained.bind(network)
    images, labels = digits.train, digits.train_labels

    @torch.no_grad()
    def embed(index: Tensor | None = None, *, augment: bool = False) -> Tensor:  # noqa: ARG001 (no augmentation here)
        points: Tensor = network(images if index is None else images[index])
        return points

    groups = [{"params": list(network.parameters())}, *trained.groups(LR)]
    optimiser = torch.optim.Adam(groups, lr=LR, weight_decay=WEIGHT_DECAY)
    trained.at_check(network, embed, labels)
    spreads: list[float] = []
    batches = trained.batches(labels, BATCH, seed=seed, images_per_class=4)
    for done in range(1, steps + 1):
        index = next(batches)
        step = Step(network(images[index]), labels[index], network, images[index], index)
        optimiser.zero_grad()
        trained.loss(step).backward()  # type: ignore[no-untyped-call]
        trained.after_backward(network)
        optimiser.step()
        trained.after_step(step)
        if done % CHECK == 0:
            trained.at_check(network, embed, labels, _score(network, digits))
            if isinstance(trained, CCP) and int(trained.problems) > len(spreads):
                spreads.append(_spread(trained.converged, trained))
                if len(spreads) == problems:
                    break
    return _outcome(trained, network, digits, done, spreads)


def _spread(vectors: Tensor, trained: CCP | Proxy) -> float:
    assert trained.proxies is not None
    return proxy_spread(Space.BALL.project(vectors), trained.proxies.labels)


@torch.no_grad()
def _score(network: Network, digits: Digits) -> float:
    return evaluate(network(digits.test), digits.test_labels, metrics=("MAP@R",), space="ball")["MAP@R"]


@torch.no_grad()
def _outcome(trained: CCP | Proxy, network: Network, digits: Digits, steps: int, spreads: list[float]) -> Outcome:
    assert trained.proxies is not None
    vectors, next_proxies, name = trained.proxies.vectors.detach(), None, "one sub-problem"
    if isinstance(trained, CCP):
        vectors, next_proxies = trained.converged, Space.BALL.project(vectors)
        name = f"CCP, {len(spreads)} sub-problems"
    points, spread = network(digits.test), _spread(vectors, trained)
    found = geometry(points, digits.test_labels, space="ball")
    numbers = {
        "MAP@R": _score(network, digits),
        "covering radius": found.radius,
        "inter-class distance": found.inter_class,
        "proxy spread": spread,
    }
    labels = trained.proxies.labels
    return Outcome(name, steps, points, Space.BALL.project(vectors), next_proxies, labels, spreads or [spread], numbers)


def digits_demo(out: Path, *, seed: int = 0, reporter: Reporter) -> list[Outcome]:
    """Train with and without sub-problems for the same number of steps, and draw both side by side."""
    digits = load_digits()
    reporter.note("Training in sub-problems (ccp) …")
    with_ccp = train_digits(CCP_SPEC, digits, seed=seed)
    reporter.note(f"Training in one go for the same {with_ccp.steps:,} steps (proxy) …")
    without = train_digits(PROXY_SPEC, digits, seed=seed, steps=with_ccp.steps)
    save_figure(_draw([without, with_ccp], digits), out)
    return [without, with_ccp]


def _draw(outcomes: list[Outcome], digits: Digits) -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Circle

    with figure_style():
        figure = new_figure(9, 5.1, layout=ConstrainedLayoutEngine(h_pad=0.1))
        for plot, outcome in zip(figure.subplots(1, 2), outcomes, strict=True):
            plot.add_patch(Circle((0, 0), 1, fill=False, color=INK, linewidth=0.6))
            _scatter(plot, outcome.points, digits.test_labels, s=5, alpha=0.35, linewidths=0)
            if outcome.next_proxies is not None:
                _scatter(plot, outcome.next_proxies, outcome.labels, hollow=True, s=34, marker="o", linewidths=1)
            _scatter(plot, outcome.proxies, outcome.labels, s=22, marker="s", edgecolors=INK, linewidths=0.7)
            spread, score = outcome.numbers["proxy spread"], outcome.numbers["MAP@R"]
            plot.set_title(f"{outcome.name}: MAP@R {score:.1f}, proxy spread {spread:.4f}", fontsize=9)
            plot.set_aspect("equal")
            plot.set_axis_off()
        steps = f"Digits in the unit disc after {outcomes[0].steps:,} steps."
        figure.supxlabel(f"{steps} Squares: converged proxies; circles: proxies of the next sub-problem.", fontsize=9)
    return figure


def _scatter(plot: Any, points: Tensor, labels: Tensor, *, hollow: bool = False, **style: Any) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10"](labels.numpy())
    if hollow:
        style |= {"facecolors": "none", "edgecolors": colours}
    else:
        style |= {"c": colours}
    plot.scatter(*points.T.numpy(), **style)
