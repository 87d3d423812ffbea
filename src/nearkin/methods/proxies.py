"""Trainable proxies, K per class, and greedy k-center selection for choosing them from samples."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError, zero_or_more
from nearkin.methods.relation import References
from nearkin.methods.state import PreciseModule, scrambled
from nearkin.space import at_least_float32

Initial = Literal["normal", "means"]

DRAW = (
    "{} from embeddings of the training set. Before the first step, call method.at_check(model, embed, labels), where "
    "embed(index=None, *, augment=False) returns the embeddings of all training images, or of those of index."
)
"""What a loop of one's own has to add for proxies that start from data."""


class Proxies(PreciseModule):
    """Vectors [C·K, D] with their labels; class c owns rows c·K … c·K + K − 1.

    `speed` multiplies the learning rate (Proxy-Anchor's code: 100). `initial="normal"` draws N(0, 2/(C·K)) as that code
    does; `"means"` takes class means of the data at the first check.

    With `sample_rate` below 1 a training step compares with the classes of its batch and with others at random, that
    share of all classes together, after PartialFC (An, Zhu, Gao, et al.: Partial FC: Training 10 Million Identities on
    a Single Machine. 2021). The draw depends only on `seed` and `steps`, which are saved, and on the batch. The
    gradient is 0 in all other rows, so `Method.groups` asks for an optimiser that leaves them alone.
    """

    per_proxy: ClassVar = {"vectors": 0, "labels": 0}
    labels: Tensor
    drawn: Tensor
    seed: Tensor
    steps: Tensor

    def __init__(
        self,
        classes: int,
        dim: int,
        *,
        per_class: int = 1,
        speed: float = 100.0,
        initial: Initial = "normal",
        sample_rate: float = 1.0,
    ) -> None:
        super().__init__()
        if classes < 1 or dim < 1 or per_class < 1:
            raise NearkinError(
                f"Proxies need at least one class, dimension and proxy per class: got {classes=} {dim=} {per_class=}."
            )
        zero_or_more("Proxies", speed=speed)
        if not 0 < sample_rate <= 1:
            raise NearkinError(f"sample_rate is a share of the classes, above 0 and at most 1, not {sample_rate}.")
        self.per_class, self.speed, self.initial, self.sample_rate = per_class, speed, initial, sample_rate
        self.classes, self.held = classes, slice(0, classes)  # on several ranks that cut them, each holds some classes
        vectors = torch.randn(classes * per_class, dim) * (2 / (classes * per_class)) ** 0.5
        self.vectors = nn.Parameter(vectors)
        self.register_buffer("labels", torch.arange(classes).repeat_interleave(per_class))
        # A number, since averages of models cannot subtract booleans.
        self.register_buffer("drawn", torch.tensor(int(initial == "normal")))
        if self.samples:
            self.register_buffer("seed", torch.randint(2**31, ()))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @property
    def rows(self) -> slice:
        """Which of the proxies of all classes these are."""
        return slice(self.held.start * self.per_class, self.held.stop * self.per_class)

    @property
    def whole(self) -> int:
        """The number of proxies on all ranks, if each has only some of them; else 0."""
        count = self.classes * self.per_class
        return count if len(self.labels) < count else 0

    @property
    def samples(self) -> bool:
        """Whether a training step uses only some classes."""
        return self.sample_rate < 1

    def references(self, y: Tensor | None = None) -> References:
        """All proxies as references, or in training those that a batch of classes y is compared with."""
        if not (self.samples and self.training) or y is None:
            return References(self.vectors, self.labels, None, self.per_class, self.whole)
        classes, whole = self._sample(y), 0
        if self.whole:
            whole = len(classes) * self.per_class
            classes = classes[(classes >= self.held.start) & (classes < self.held.stop)] - self.held.start
            if not len(classes):
                raise NearkinError(
                    "With this sample_rate a process has no class in a step: leave out cut_proxies or sample_rate."
                )
        rows = (classes[:, None] * self.per_class + torch.arange(self.per_class, device=y.device)).flatten()
        mark_rows(self.vectors, rows)
        return References(self.vectors.index_select(0, rows), self.labels[rows], None, self.per_class, whole)

    def _sample(self, y: Tensor) -> Tensor:
        """The classes of y and others at random, in ascending order; their number depends only on that of y."""
        count = max(math.ceil(self.sample_rate * self.classes), min(len(y), self.classes))
        order = scrambled(self.steps, self.classes) ^ scrambled(self.seed, 1)
        # The batch's own classes come first; the others are in a random order without ties.
        first = (order & torch.iinfo(torch.int64).max).index_fill_(0, y.long(), -1)
        return first.topk(count, largest=False, sorted=False).indices.sort().values

    def count_step(self) -> None:
        """Draw other classes in the next step."""
        if self.samples:
            self.steps += 1

    def lacks(self) -> str:
        """What a loop of one's own has to add; see `Method.lacks`."""
        return "" if bool(self.drawn) else DRAW.format("Proxies with initial=means start")

    @torch.no_grad()
    def from_data(self, embed: Callable[[], Tensor], labels: Tensor) -> None:
        """If initial="means", set proxy k of each class to the mean of samples k, k+K, k+2K, … of the class, once."""
        if bool(self.drawn):
            return
        x, labels = at_least_float32(embed()), labels.long()
        order = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=self.classes)
        starts = counts.cumsum(0) - counts
        position = torch.empty_like(labels)
        position[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
        slot = labels * self.per_class + position % self.per_class
        if self.whole:
            here = (slot >= self.rows.start) & (slot < self.rows.stop)
            slot, x = slot[here] - self.rows.start, x[here]
        sums = torch.zeros_like(self.vectors).index_add_(0, slot, x.to(self.vectors.dtype))
        sizes = torch.bincount(slot, minlength=len(self.vectors))[:, None]
        # A class with fewer samples than proxies keeps its other proxies random.
        self.vectors.copy_(torch.where(sizes > 0, sums / sizes.clamp_min(1), self.vectors))
        self.drawn.fill_(1)


def mark_rows(parameter: Tensor, rows: Tensor) -> None:
    """Tell an optimiser that updates by row in which rows [n] of a parameter the gradient of this step can be."""
    parameter.rows_in_use = rows  # type: ignore[attr-defined]


TAKEN = -1.0
"""The distance of a chosen or missing point: below every distance, so it is never the farthest."""


def distances(u: Tensor, v: Tensor) -> Tensor:
    """Euclidean distances [C, n, m] of points [C, n, D] and [C, m, D]; exactly 0 for equal points."""
    return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist")


def farthest_first(between: Tensor, nearest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose `count` points of each set, always the farthest from all chosen ones; ties go to the first.

    `between` [C, n, n] are distances within each set; `nearest` [C, n] distances to the nearest point chosen already:
    infinite if there is none, TAKEN for a missing point. Returns the choice and the radius after each, [C, count] each.
    """
    picks = nearest.new_empty(len(nearest), count, dtype=torch.int64)
    radii = nearest.new_empty(len(nearest), count)
    for number in range(count):
        q = nearest.argmax(1, keepdim=True)  # [C, 1]
        reached = between.gather(1, q[:, :, None].expand(-1, 1, between.shape[2])).squeeze(1)
        nearest = torch.minimum(nearest, reached).scatter(1, q, TAKEN)
        picks[:, number] = q.squeeze(1)
        radii[:, number] = nearest.amax(1).clamp_min(0)
    return picks, radii


def k_center(points: Tensor, seeds: Tensor, count: int) -> Tensor:
    """Indices [C, count] of the points [C, n, D] that, added one by one to the seeds [C, S, D], reduce the radius most.

    No point is chosen twice; `count` is at most n.
    """
    nearest = distances(points, seeds).amin(2)
    return farthest_first(distances(points, points), nearest, count)[0]
