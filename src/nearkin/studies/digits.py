"""Proxies in a space one can see: handwritten digits in two dimensions, as in Fig. 2 of CCP's paper.

A pair loss is trained against four proxies a class, once in one go (`proxy`) and once in sub-problems (`ccp`) for as
many steps. In the first the proxies of a class merge into one; in the second they converge apart. The digits that are
drawn also decide, by their MAP@R, when a sub-problem is over; nothing else is chosen by them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.console import Reporter
from nearkin.evaluation import evaluate
from nearkin.files import whole_file
from nearkin.methods.base import Step
from nearkin.methods.build import method
from nearkin.methods.strategies.ccp import CCP
from nearkin.methods.strategies.proxy import Proxy
from nearkin.report.charts import INK, STYLE, rendered
from nearkin.space import Space
from nearkin.studies.geometry import geometry, proxy_spread

INNER = "contrastive(form=c2, positive=0, negative=0.3841)"
PROXY, ALTERNATING = f"proxy({INNER}, per_class=4, pool=16)", f"ccp({INNER}, per_class=4, pool=16)"
BATCH, CHECK, LR, WEIGHT_DECAY = 32, 25, 5e-4, 1e-4


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] from 0 to 1 and which digit each is, to train on and to look at."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


class Outcome(NamedTuple):
    """What a training came to."""

    name: str
    steps: int
    points: Tensor  # [N, 2] test images
    proxies: Tensor  # [C·K, 2] as they converged
    following: Tensor | None  # [C·K, 2] drawn next
    labels: Tensor  # [C·K]
    spreads: list[float]  # how far proxies of a class were apart when each sub-problem ended
    numbers: dict[str, float]


def load_digits(seed: int = 0) -> Digits:
    """Scikit-learn's digits, a thousand of them for training."""
    from sklearn.datasets import load_digits as load

    given = load()
    images, labels = torch.tensor(given.images, dtype=torch.float32)[:, None] / 16, torch.tensor(given.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return Digits(images[order[:1000]], labels[order[:1000]], images[order[1000:]], labels[order[1000:]])


class Network(nn.Module):
    """Two hidden layers into the unit disc."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in ((64, 256), (256, 256)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(256, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Points [B, 2]."""
        return Space.BALL.project(self.layers(x))


def train_digits(spec: str, digits: Digits, *, seed: int = 0, problems: int = 5, steps: int = 3000) -> Outcome:
    """Train until so many sub-problems have ended, where the method has any, and at most so many steps."""
    torch.manual_seed(seed)
    network, known = Network(), method(spec, classes=10, dim=2, space="ball")
    assert isinstance(known, CCP | Proxy)
    known.bind(network)
    images, labels = digits.train, digits.train_labels

    @torch.no_grad()
    def embed(index: Tensor | None = None, *, augment: bool = False) -> Tensor:  # noqa: ARG001 (no augmentation here)
        points: Tensor = network(images if index is None else images[index])
        return points

    groups = [{"params": list(network.parameters())}, *known.groups(LR)]
    optimiser = torch.optim.Adam(groups, lr=LR, weight_decay=WEIGHT_DECAY)
    known.at_check(network, embed, labels)
    spreads: list[float] = []
    batches = known.batches(labels, BATCH, seed=seed, images_per_class=4)
    for done in range(1, steps + 1):
        index = next(batches)
        step = Step(network(images[index]), labels[index], network, images[index], index)
        optimiser.zero_grad()
        known.loss(step).backward()  # type: ignore[no-untyped-call]
        known.after_backward(network)
        optimiser.step()
        known.after_step(step)
        if done % CHECK == 0:
            known.at_check(network, embed, labels, _score(network, digits))
            if isinstance(known, CCP) and int(known.problems) > len(spreads):
                spreads.append(_spread(known.converged, known))
                if len(spreads) == problems:
                    break
    return _outcome(known, network, digits, done, spreads)


def _spread(vectors: Tensor, known: CCP | Proxy) -> float:
    assert known.proxies is not None
    return proxy_spread(Space.BALL.project(vectors), known.proxies.labels)


@torch.no_grad()
def _score(network: Network, digits: Digits) -> float:
    return evaluate(network(digits.test), digits.test_labels, metrics=("MAP@R",), space="ball")["MAP@R"]


@torch.no_grad()
def _outcome(known: CCP | Proxy, network: Network, digits: Digits, steps: int, spreads: list[float]) -> Outcome:
    assert known.proxies is not None
    vectors, following, name = known.proxies.vectors.detach(), None, "one sub-problem"
    if isinstance(known, CCP):
        vectors, following, name = known.converged, Space.BALL.project(vectors), f"CCP, {len(spreads)} sub-problems"
    points, apart = network(digits.test), _spread(vectors, known)
    found = geometry(points, digits.test_labels, space="ball")
    numbers = {
        "MAP@R": _score(network, digits),
        "covering radius": found.radius,
        "inter-class distance": found.between,
        "proxy spread": apart,
    }
    labels = known.proxies.labels
    return Outcome(name, steps, points, Space.BALL.project(vectors), following, labels, spreads or [apart], numbers)


def digits_demo(out: Path, *, seed: int = 0, reporter: Reporter) -> list[Outcome]:
    """Train both ways for as many steps, and draw them beside each other."""
    digits = load_digits()
    reporter.note("Training in sub-problems (ccp) …")
    with_ccp = train_digits(ALTERNATING, digits, seed=seed)
    reporter.note(f"Training in one go for as many steps, {with_ccp.steps:,} (proxy) …")
    without = train_digits(PROXY, digits, seed=seed, steps=with_ccp.steps)
    with whole_file(out) as temporary:
        temporary.write_bytes(rendered(_draw([without, with_ccp], digits), out.suffix.removeprefix(".")))
    return [without, with_ccp]


def _draw(outcomes: list[Outcome], digits: Digits) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Circle

    with rc_context(STYLE):
        figure = Figure(figsize=(9, 5.1), layout=ConstrainedLayoutEngine(h_pad=0.1))
        for plot, outcome in zip(figure.subplots(1, 2), outcomes, strict=True):
            plot.add_patch(Circle((0, 0), 1, fill=False, color=INK, linewidth=0.6))
            _scatter(plot, outcome.points, digits.test_labels, s=5, alpha=0.35, linewidths=0)
            if outcome.following is not None:
                _scatter(plot, outcome.following, outcome.labels, hollow=True, s=34, marker="o", linewidths=1)
            _scatter(plot, outcome.proxies, outcome.labels, s=22, marker="s", edgecolors=INK, linewidths=0.7)
            apart = outcome.numbers["proxy spread"]
            score = outcome.numbers["MAP@R"]
            plot.set_title(f"{outcome.name}: MAP@R {score:.1f}, proxy spread {apart:.4f}", fontsize=9)
            plot.set_aspect("equal")
            plot.set_axis_off()
        steps = f"Digits in the unit disc after {outcomes[0].steps:,} steps."
        figure.supxlabel(f"{steps} Boxes: proxies that converged; circles: those drawn next.", fontsize=9)
    return figure


def _scatter(plot: Any, points: Tensor, labels: Tensor, *, hollow: bool = False, **look: Any) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10"](labels.numpy())
    if hollow:
        look |= {"facecolors": "none", "edgecolors": colours}
    else:
        look |= {"c": colours}
    plot.scatter(*points.T.numpy(), **look)
