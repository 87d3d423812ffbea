"""CCP. Gürbüz, Can, Alatan: Deep Metric Learning with Chance Constraints. WACV 2024.

A pair loss against trained proxies is solved again and again: each time the proxies start from other samples, which
reduce the covering radius of their class, and the network is held near the last solution.

    g_θ = λ(θ − θ*) + ∂L/∂θ,   g_ρ = ∂L/∂ρ,   L = 1/(m|ρ|) Σ_{i,j} ℓ(ρ_i, z_j; θ)                        (Algorithm 1)
    q = argmax_{u ∈ p∖r_c} min_{v ∈ ρ*_c ∪ r_c} ‖u − v‖,   r_c ← r_c ∪ {q},   until |r_c| = K             (Algorithm 2)

Symbols
    θ the network's weights; ρ proxies, K a class (`per_class`); ρ*, θ* where the last sub-problem converged; z the
    batch, m samples; ℓ the inner loss, with samples as anchors; λ weight of the proximal term (`weight`); p the pool:
    embeddings of b random training images of class c (`pool`); r_c the picks, which replace all K proxies of the class.
    `every`: a sub-problem ends after so many checks; 0: after `patience` checks without a better score, MAP@R of
    held-out classes. `pair_weight`: that of the same loss within the batch. `speed`: factor of the proxies' rate.
    `anchors="samples"`: the picks stay images, embedded in every step with gradients (§V-B, Eq. 13; for small data).

Algorithm
    1  at_check        before the first step: ρ* are random samples, ρ the picks of Algorithm 2; λ = 0
    2  loss            the inner loss of the batch against all proxies (anchors="samples": `batches` adds their images)
    3  after_backward  add λ(θ − θ*) to the gradients
    4  at_check        a better score than any in this sub-problem: keep θ and ρ; else wait
    5  at_check        waited `patience` checks: θ*, ρ* are what was kept, new proxies by Algorithm 2, λ on; back to 2

Settings
    λ = 2e-4, patience 3; CUB, Cars: K = 8, b = 12, a check every 25 steps; SOP, In-Shop: K = 4, b = 7, every 250.
    One proxy a class (the -S variants): K = 1. Adam 1e-5, weight decay 1e-4, batch 8 classes × 4, 128-d, space `ball`,
    no warm-up, proxies' speed 1. Losses: `contrastive`, `multi_similarity`, `triplet` with CCP's own margins.

Departures
    The loss is reduced as the inner one is by itself (C2 and triplet over non-zero terms, C1 and MS over samples), as
    in the authors' code; Algorithm 1 prints the mean over all pairs.
    C1 goes by 1 − d²/2 in `ball`, the cosine of vectors of length 1; the code takes the cosine of shorter ones, too.
    The code adds 0.1 times the in-batch loss, of which the text knows nothing: `pair_weight=0.1` is the code's.
    From the code, where the text is silent: λ = 0 at first; θ*, ρ* are the best of the sub-problem, but the network
    goes on from where it is; optimiser moments stay; 1e-3 percent count as better; the pool is embedded in eval mode
    under training augmentation, images of a small class more than once; a pool smaller than K is K times as large.
    The code picks by distances of vectors before they are projected into the space, which may be longer than 1; here,
    as in the text, by those of embeddings, and proxies start on them. Its first picks go by a zero vector, not samples.

Relations
    With an endless first sub-problem it is `proxy`. `xbm` alternates a few references in every step, with λ = 0.
    `profs` has representatives of its own network in place of proxies, and the same proximal term.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Embed, Loss, Step, Strategy
from nearkin.methods.proxies import Proxies, k_center
from nearkin.methods.relation import References, relate
from nearkin.methods.strategies.proximal import Anchor
from nearkin.space import Space

Anchors = Literal["proxies", "samples"]

BETTER = 1e-3
"""By how much of a percent a score has to be better to count."""


def draw(labels: Tensor, count: int, *, classes: int) -> Tensor:
    """Rows [C, count] of random images of each class; where a class has fewer, each of its images in turn."""
    sizes = torch.bincount(labels, minlength=classes)
    if int(sizes.min()) == 0:
        raise NearkinError(f"Class {int(sizes.argmin())} has no training image to draw a proxy from: leave it out.")
    shuffled = torch.randperm(len(labels), device=labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    first = sizes.cumsum(0) - sizes
    turn = torch.arange(count, device=labels.device) % sizes[:, None]
    return by_class[first[:, None] + turn]


def pool_size(pool: int, per_class: int) -> int:
    """Images drawn a class: a pool smaller than what is picked from it is multiplied."""
    return pool if pool >= per_class else pool * per_class


def picked(embed: Embed, pool: Tensor, seeds: Tensor, count: int, *, space: Space) -> tuple[Tensor, Tensor]:
    """Of a pool of rows [C, b]: those picked [C, count], and their embeddings [C, count, D]."""
    points = space.project(embed(pool.flatten(), augment=True))
    points = points.view(*pool.shape, points.shape[1])
    picks = k_center(points, seeds.to(points.dtype), count)  # Algorithm 2
    return pool.gather(1, picks), points.gather(1, picks[:, :, None].expand(-1, -1, points.shape[2]))


def first_picked(
    embed: Embed, labels: Tensor, *, classes: int, per_class: int, pool: int, space: Space
) -> tuple[Tensor, Tensor]:
    """The first proxies: picked from a pool where random samples stand for what has converged."""
    seeds = space.project(embed(draw(labels, per_class, classes=classes).flatten(), augment=True))
    rows = draw(labels, pool_size(pool, per_class), classes=classes)
    return picked(embed, rows, seeds.view(classes, per_class, -1), per_class, space=space)


def ends(scores: Sequence[float], patience: int) -> list[int]:
    """The checks (1, 2, …) at which sub-problems ended, by the scores of all checks."""
    best, waited, found = -torch.inf, 0, []
    for number, score in enumerate(scores, start=1):
        best, waited = (score, 0) if score > best + BETTER else (best, waited + 1)
        if waited == patience:
            best, waited = -torch.inf, 0
            found.append(number)
    return found


class CCP(Strategy):
    """A pair loss against `per_class` proxies a class, redrawn where a sub-problem has converged."""

    natural_inner = "contrastive(form=c2, negative=0.3841)"
    drawn: Tensor
    converged: Tensor
    chosen: Tensor
    best: Tensor
    waited: Tensor
    checks: Tensor
    problems: Tensor

    def __init__(
        self,
        inner: Loss,
        *,
        classes: int,
        dim: int,
        per_class: int = 8,
        pool: int = 12,
        weight: float = 2e-4,
        pair_weight: float = 0.0,
        patience: int = 3,
        every: int = 0,
        anchors: Anchors = "proxies",
        speed: float = 1.0,
    ) -> None:
        super().__init__(inner)
        if inner.proxies is not None:
            raise NearkinError("ccp needs a loss on pairs of samples; this one compares with proxies of its own.")
        if pool < 1 or patience < 1 or every < 0 or weight < 0:
            raise NearkinError("ccp needs a pool and a patience of at least 1, and neither every nor weight below 0.")
        self.pool, self.weight, self.pair_weight = pool, weight, pair_weight
        self.patience, self.every = patience, every
        self.classes, self.per_class = classes, per_class
        self.needs_score = not every
        self.reads_state = anchors == "samples"
        self.proxies = None if self.reads_state else Proxies(classes, dim, per_class=per_class, speed=speed)
        self.anchor, self.snapshot = Anchor(), Anchor()  # θ*; θ of the best check in this sub-problem
        if self.proxies is not None:
            self.register_buffer("converged", self.proxies.vectors.detach().clone())  # ρ of that check
        else:
            self.register_buffer("chosen", torch.zeros(classes * per_class, dtype=torch.int64))  # rows of the images
        self.register_buffer("drawn", torch.tensor(False))
        self.register_buffer("best", torch.tensor(-torch.inf))  # score of this sub-problem
        for counter in ("waited", "checks", "problems"):  # checks without progress, checks; sub-problems that ended
            self.register_buffer(counter, torch.zeros((), dtype=torch.int64))
        self.strength = 0.0  # λ of this sub-problem; follows from `problems`, but a step need not wait for the device
        self.register_load_state_dict_post_hook(_know_strength)  # type: ignore[no-untyped-call]

    @property
    def known_classes(self) -> int | None:
        return self.classes

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        self.anchor.bind(model)
        self.snapshot.bind(model)

    def batches(
        self, labels: Tensor, size: int, *, seed: int, start: int = 0, images_per_class: int | None = None
    ) -> Iterator[Tensor]:
        rows = super().batches(labels, size, seed=seed, start=start, images_per_class=images_per_class)
        if self.proxies is not None:
            return rows
        return (torch.cat([index, self.chosen.to(index.device)]) for index in rows)

    def loss(self, step: Step) -> Tensor:
        step, references = self._references(step)
        loss = self.inner.objective(relate(step.x, step.y, references, self.space))
        return loss + self.pair_weight * self.inner.loss(step) if self.pair_weight else loss

    def _references(self, step: Step) -> tuple[Step, References]:
        """The samples of the batch, and what they are compared with."""
        if self.proxies is not None:
            return step, self.proxies.references()
        if step.index is None:
            raise NearkinError("ccp with samples for anchors needs their images in each batch: draw it by batches().")
        n = len(self.chosen)
        (x, v), (y, labels), (index, chosen) = ((t[:-n], t[-n:]) for t in (step.x, step.y, step.index))
        same = index[:, None] == chosen
        rows = torch.where(same.any(0), same.to(torch.uint8).argmax(0), -1)  # a sample does not meet itself
        return Step(x, y, step.model, None, index, step.rng), References(v, labels, rows)

    def after_backward(self, model: nn.Module) -> None:
        super().after_backward(model)
        if self.strength and self.training:
            self.anchor.pull(model, self.strength)

    @torch.no_grad()
    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        super().at_check(model, embed, labels, score)
        if not self.training:
            return
        if not bool(self.drawn):
            size = {"classes": self.classes, "per_class": self.per_class, "pool": self.pool}
            self._take(*first_picked(embed, labels, **size, space=self.space))
            self.drawn.fill_(True)
        elif self._is_over(model, score):
            self._next(embed, labels)

    def _is_over(self, model: nn.Module, score: float | None) -> bool:
        """Look at a check of the current sub-problem: keep what is best, and say whether it has converged."""
        if score is None and not self.every:
            raise NearkinError(
                "ccp draws new proxies when the score of held-out classes no longer gains, and there is none: "
                "set select=validation, or give ccp a number of checks by every."
            )
        self.checks += 1
        if score is None or score > float(self.best) + BETTER:
            self.best.fill_(-torch.inf if score is None else score)
            self.waited.zero_()
            self.snapshot.renew(model)
            if self.proxies is not None:
                self.converged.copy_(self.proxies.vectors)
        else:
            self.waited += 1
        return bool(self.checks == self.every) if self.every else bool(self.waited == self.patience)

    def _next(self, embed: Embed, labels: Tensor) -> None:
        """Begin the next sub-problem."""
        self.anchor.load_state_dict(self.snapshot.state_dict())
        self.best.fill_(-torch.inf)
        for counter in (self.waited, self.checks):
            counter.zero_()
        self.problems += 1
        _know_strength(self)
        old = embed(self.chosen) if self.proxies is None else self.converged
        seeds = self.space.project(old).view(self.classes, self.per_class, -1)
        rows = draw(labels, pool_size(self.pool, self.per_class), classes=self.classes)
        self._take(*picked(embed, rows, seeds, self.per_class, space=self.space))

    def _take(self, rows: Tensor, points: Tensor) -> None:
        """Put the picks in the place of all proxies."""
        if self.proxies is None:
            self.chosen.copy_(rows.flatten())
        else:
            self.proxies.vectors.copy_(points.flatten(0, 1))


def _know_strength(ccp: CCP, _keys: object = None) -> None:
    """The first sub-problem has no solution to be held near; every later one has."""
    ccp.strength = ccp.weight if int(ccp.problems) else 0.0
