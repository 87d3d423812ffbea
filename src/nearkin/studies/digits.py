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
COLUMNS = 3  # panels side by side


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] with values from 0 to 1, and their digits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class Moment(NamedTuple):
    """The disc at the end of a sub-problem, or of a training without any."""

    points: Tensor  # [N, 2] test images
    proxies: Tensor  # [C·K, 2] converged
    next_proxies: Tensor | None  # [C·K, 2] start of the next sub-problem
    numbers: dict[str, float]


class Outcome(NamedTuple):
    """The result of a training."""

    name: str
    steps: int
    labels: Tensor  # [C·K] of the proxies
    moments: list[Moment]

    @property
    def numbers(self) -> dict[str, float]:
        """The measures at the end."""
        return self.moments[-1].numbers


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
    ends: list[Moment] = []
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
            if isinstance(trained, CCP) and int(trained.problems) > len(ends):
                ends.append(_moment(trained, network, digits))
                if len(ends) == problems:
                    break
    assert trained.proxies is not None
    name = f"CCP, {len(ends)} sub-problems" if isinstance(trained, CCP) else "one sub-problem"
    return Outcome(name, done, trained.proxies.labels, ends or [_moment(trained, network, digits)])


@torch.no_grad()
def _score(network: Network, digits: Digits) -> float:
    return evaluate(network(digits.test), digits.test_labels, metrics=("MAP@R",), space="ball")["MAP@R"]


@torch.no_grad()
def _moment(trained: CCP | Proxy, network: Network, digits: Digits) -> Moment:
    assert trained.proxies is not None
    vectors, next_proxies = trained.proxies.vectors.detach(), None
    if isinstance(trained, CCP):
        vectors, next_proxies = trained.converged, Space.BALL.project(vectors)
    points, proxies = network(digits.test), Space.BALL.project(vectors)
    found = geometry(points, digits.test_labels, space="ball")
    numbers = {
        "MAP@R": _score(network, digits),
        "covering radius": found.radius,
        "inter-class distance": found.inter_class,
        "proxy spread": proxy_spread(proxies, trained.proxies.labels),
    }
    return Moment(points, proxies.clone(), next_proxies, numbers)


def digits_demo(out: Path, *, seed: int = 0, reporter: Reporter) -> list[Outcome]:
    """Train without and with sub-problems for the same number of steps; draw the end of every sub-problem."""
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

    without, with_ccp = outcomes
    panels = {without.name: without.moments[-1]}
    panels |= {f"CCP, sub-problem {number}": end for number, end in enumerate(with_ccp.moments, start=1)}
    rows = -(-len(panels) // COLUMNS)
    with figure_style():
        figure = new_figure(3.1 * COLUMNS, 3.3 * rows + 0.4, layout=ConstrainedLayoutEngine(h_pad=0.06))
        plots = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for plot in plots:
            plot.set_axis_off()
        for plot, (name, moment) in zip(plots, panels.items(), strict=False):
            plot.add_patch(Circle((0, 0), 1, fill=False, color=INK, linewidth=0.6))
            _scatter(plot, moment.points, digits.test_labels, s=4, alpha=0.35, linewidths=0)
            if moment.next_proxies is not None:
                _scatter(plot, moment.next_proxies, with_ccp.labels, hollow=True, s=34, marker="o", linewidths=1)
            _scatter(plot, moment.proxies, with_ccp.labels, s=22, marker="s", edgecolors=INK, linewidths=0.7)
            score, radius, spread = (moment.numbers[k] for k in ("MAP@R", "covering radius", "proxy spread"))
            plot.set_title(f"{name}\nMAP@R {score:.1f}, radius {radius:.3f}, spread {spread:.3f}", fontsize=8)
            plot.set_aspect("equal")
        legend = "Squares: converged proxies; circles: proxies of the next sub-problem."
        words = f"Digits in the unit disc; both trainings take {without.steps:,} steps. {legend}"
        figure.supxlabel(words, fontsize=8)
    return figure


def _scatter(plot: Any, points: Tensor, labels: Tensor, *, hollow: bool = False, **style: Any) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10"](labels.numpy())
    if hollow:
        style |= {"facecolors": "none", "edgecolors": colours}
    else:
        style |= {"c": colours}
    plot.scatter(*points.T.numpy(), **style)
