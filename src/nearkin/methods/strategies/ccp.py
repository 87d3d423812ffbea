"""CCP. Gürbüz, Can, Alatan: Deep Metric Learning with Chance Constraints. WACV 2024.

Solves a pair loss against trained proxies repeatedly: each time the proxies start from other samples, which reduce the
covering radius of their class, and the network is kept near the last solution.

    g_θ = λ(θ − θ*) + ∂L/∂θ,   g_ρ = ∂L/∂ρ,   L = 1/(m|ρ|) Σ_{i,j} ℓ(ρ_i, z_j; θ)                        (Algorithm 1)
    q = argmax_{u ∈ p∖r_c} min_{v ∈ ρ*_c ∪ r_c} ‖u − v‖,   r_c ← r_c ∪ {q},   until |r_c| = K             (Algorithm 2)

Symbols
    θ the network's weights; ρ proxies, K per class (`per_class`); ρ*, θ* where the last sub-problem converged; z the
    batch, m samples; ℓ the inner loss, with samples as anchors; λ weight of the proximal term (`weight`); p the pool:
    embeddings of b random training images of class c (`pool`); r_c the picks, which replace all K proxies of the class.
    `every`: a sub-problem ends after this many checks; 0: after `patience` checks without a better score, MAP@R of
    held-out classes. `pair_weight`: weight of the same loss within the batch. `speed`: factor of the proxies' learning
    rate. `anchors="samples"`: the picks stay images, embedded in every step with gradients (§V-B, Eq. 13; small data).

Algorithm
    1  at_check        before the first step: ρ* are random samples, ρ the picks of Algorithm 2; λ = 0
    2  loss            the inner loss of the batch against all proxies (anchors="samples": `batches` adds their images)
    3  after_backward  add λ(θ − θ*) to the gradients
    4  at_check        if the score is the best of this sub-problem, keep θ and ρ; else wait
    5  at_check        after `patience` checks: θ*, ρ* are those kept, new proxies by Algorithm 2, λ on; back to 2

Settings
    λ = 2e-4, patience 3; CUB, Cars: K = 8, b = 12, a check every 25 steps; SOP, In-Shop: K = 4, b = 7, every 250.
    One proxy per class (the -S variants): K = 1. Adam 1e-5, weight decay 1e-4, batch 8 classes × 4, 128-d, space
    `ball`, no warm-up, proxies' speed 1. Losses: `contrastive`, `multi_similarity`, `triplet` with CCP's margins.

Departures
    The inner loss defines the reduction (C2 and triplet over non-zero terms, C1 and MS over samples), as in the
    authors' code; Algorithm 1 prints the mean over all pairs.
    C1 uses 1 − d²/2 in `ball`, the cosine of unit vectors; the code takes the cosine of shorter vectors, too.
    The code adds 0.1 times the in-batch loss, which is not in the text: `pair_weight=0.1`.
    From the code, where the text is silent: λ = 0 at first; θ*, ρ* are the best of the sub-problem, but the network
    continues from its current weights; optimiser moments stay; a gain of 1e-3 percent counts as better; the pool is
    embedded in eval mode under training augmentation, with repeated images for a small class; a pool smaller than K is
    multiplied by K.
    The code picks by distances of vectors before projection into the space; here, as in the text, by those of
    embeddings, where proxies start. Its first picks use a zero vector instead of samples.

Relations
    With an endless first sub-problem this is `proxy`. `xbm` replaces a few references in every step, with λ = 0.
    `profs` has embedded images instead of proxies, and the same proximal term.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Embed, Loss, Step, Strategy
from nearkin.methods.proxies import DRAW, Proxies, k_center
from nearkin.methods.relation import References
from nearkin.methods.state import count_up, register_counter
from nearkin.methods.strategies.inner_loss import require_pairs
from nearkin.methods.strategies.model_copy import Anchor
from nearkin.space import Space

Anchors = Literal["proxies", "samples"]

BETTER = 1e-3
"""The gain in percent from which a score counts as better."""


def draw(labels: Tensor, count: int, *, classes: int) -> Tensor:
    """Rows [C, count] of random images of each class; a smaller class repeats its images."""
    labels = labels.long()
    sizes = torch.bincount(labels, minlength=classes)
    if int(sizes.min()) == 0:
        raise NearkinError(
            f"Class {int(sizes.argmin())} has no training image to draw a proxy from: leave the class out."
        )
    shuffled = torch.randperm(len(labels), device=labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    first = sizes.cumsum(0) - sizes
    turn = torch.arange(count, device=labels.device) % sizes[:, None]
    return by_class[first[:, None] + turn]


def pool_size(pool: int, per_class: int) -> int:
    """Images drawn per class; a pool smaller than K is multiplied by K."""
    return pool if pool >= per_class else pool * per_class


def pick(embed: Embed, pool: Tensor, seeds: Tensor, count: int, *, space: Space, held: slice) -> tuple[Tensor, Tensor]:
    """Rows [C, count] picked from a pool of rows [C, b], and their embeddings [C, count, D]; of the held classes."""
    points = space.project(embed(pool.flatten(), augment=True))
    points, pool = points.view(*pool.shape, points.shape[1])[held], pool[held]
    picks = k_center(points, seeds.to(points.dtype), count)  # Algorithm 2
    return pool.gather(1, picks), points.gather(1, picks[:, :, None].expand(-1, -1, points.shape[2]))


def first_pick(
    embed: Embed, labels: Tensor, *, classes: int, per_class: int, pool: int, space: Space, held: slice
) -> tuple[Tensor, Tensor]:
    """The first proxies of the held classes, picked from a pool with random samples in place of converged proxies."""
    seeds = space.project(embed(draw(labels, per_class, classes=classes).flatten(), augment=True))
    rows = draw(labels, pool_size(pool, per_class), classes=classes)
    return pick(embed, rows, seeds.view(classes, per_class, -1)[held], per_class, space=space, held=held)


def sub_problem_ends(scores: Sequence[float], patience: int) -> list[int]:
    """The checks (1, 2, …) at which sub-problems end, from the scores of all checks."""
    best, waited, found = -torch.inf, 0, []
    for number, score in enumerate(scores, start=1):
        best, waited = (score, 0) if score > best + BETTER else (best, waited + 1)
        if waited == patience:
            best, waited = -torch.inf, 0
            found.append(number)
    return found


class CCP(Strategy):
    """A pair loss against `per_class` proxies per class, redrawn whenever a sub-problem has converged."""

    natural_inner = "contrastive(form=c2, negative=0.3841)"
    per_proxy: ClassVar = {"converged": 0}
    drawn: Tensor
    converged: Tensor
    chosen: Tensor
    best: Tensor
    waited: Tensor
    checks: Tensor
    problems: Tensor
    problems_on_host: int

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
        require_pairs(inner, "ccp")
        if pool < 1 or patience < 1 or every < 0 or weight < 0:
            raise NearkinError("ccp needs pool and patience of at least 1, every and weight of at least 0.")
        self.pool, self.weight, self.pair_weight = pool, weight, pair_weight
        self.patience, self.every = patience, every
        self.classes, self.per_class = classes, per_class
        self.needs_score = not every
        self.reads_state = anchors == "samples"
        self.has_sample_losses = not self.reads_state  # else the batch has the anchors, too
        self.proxies = None if self.reads_state else Proxies(classes, dim, per_class=per_class, speed=speed)
        self.anchor, self.snapshot = Anchor(), Anchor()  # θ*; θ of the best check in this sub-problem
        if self.proxies is not None:
            self.register_buffer("converged", self.proxies.vectors.detach().clone())  # ρ of that check
        else:
            self.register_buffer("chosen", torch.zeros(classes * per_class, dtype=torch.int64))  # rows of the images
        self.register_buffer("drawn", torch.tensor(0))
        self.register_buffer("best", torch.tensor(-torch.inf))  # score of this sub-problem
        for counter in ("waited", "checks"):  # checks without progress, and all checks of this sub-problem
            self.register_buffer(counter, torch.zeros((), dtype=torch.int64))
        register_counter(self, "problems")  # sub-problems that ended

    @property
    def known_classes(self) -> int | None:
        return self.classes

    @property
    def strength(self) -> float:
        """λ of this sub-problem: the first one has no solution to stay near."""
        return self.weight if self.problems_on_host else 0.0

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

    def lacks(self, step: Step) -> str:
        again = (
            " Call method.bind(model) before that, at_check again at every check, and method.after_backward(model) "
            "before each optimiser.step()."
        )
        return super().lacks(step) or ("" if bool(self.drawn) else DRAW.format("ccp draws its proxies") + again)

    def loss(self, step: Step) -> Tensor:
        step, references = self._references(step)
        loss = self.inner.objective(self.relation(step, references))
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
        rows = torch.where(same.any(0), same.to(torch.uint8).argmax(0), -1)  # a sample is not compared with itself
        return Step(x, y, step.model, None, index, step.rng), References(v, labels, rows)

    def after_backward(self, model: nn.Module) -> None:
        super().after_backward(model)
        if self.strength and self.training:
            self.anchor.pull(model, self.strength)

    def step_kind(self, size: int) -> Hashable | None:
        kind = super().step_kind(size)
        return None if kind is None else (kind, self.strength)

    @torch.no_grad()
    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        super().at_check(model, embed, labels, score)
        if not self.training:
            return
        if not bool(self.drawn):
            size = {"classes": self.classes, "per_class": self.per_class, "pool": self.pool}
            self._take(*first_pick(embed, labels, **size, space=self.space, held=self._held))
            self.drawn.fill_(1)
        elif self._is_over(model, score):
            self._next(embed, labels)

    def _is_over(self, model: nn.Module, score: float | None) -> bool:
        """Keep the model if this check is the best of the sub-problem; return whether the sub-problem has converged."""
        if score is None and not self.every:
            raise NearkinError(
                "ccp draws new proxies when the score of held-out classes stops improving, and there is no such score: "
                "set select=validation, or the option every of ccp."
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
        """Start the next sub-problem."""
        self.anchor.load_state_dict(self.snapshot.state_dict())
        self.best.fill_(-torch.inf)
        for counter in (self.waited, self.checks):
            counter.zero_()
        count_up(self, "problems")
        old = embed(self.chosen) if self.proxies is None else self.converged
        seeds = self.space.project(old).view(-1, self.per_class, old.shape[1])
        rows = draw(labels, pool_size(self.pool, self.per_class), classes=self.classes)
        self._take(*pick(embed, rows, seeds, self.per_class, space=self.space, held=self._held))

    @property
    def _held(self) -> slice:
        """The classes whose proxies this rank has."""
        return slice(None) if self.proxies is None else self.proxies.held

    def _take(self, rows: Tensor, points: Tensor) -> None:
        """Replace all proxies by the picks."""
        if self.proxies is None:
            self.chosen.copy_(rows.flatten())
        else:
            self.proxies.vectors.copy_(points.flatten(0, 1))
