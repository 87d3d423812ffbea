"""PROFS. Can, Gürbüz, Alatan: Deep Metric Learning with Alternating Projections onto Feasible Sets. ICIP 2021.

One image of each class represents it for M steps, in which every pair has a representative on one side; then others do.

    θ⁽ᵏ⁾ = argmin_θ ½λ‖θ⁽ᵏ⁻¹⁾ − θ‖² + Σ_{l,j} y_{k_l,j} (d_{k_l,j} − ε⁺)_+ + (1 − y_{k_l,j}) (ε⁻ − d_{k_l,j})_+   (4.6)
    θ⁽ᵏ⁾ = argmin_θ ½λ‖θ⁽ᵏ⁻¹⁾ − θ‖² + L(θ; I_k)                                                                  (4.7)
    M = ⌈ρ/p⌉,   p = B/(I·L)                                                                                    (§5.4)

Symbols
    θ the network's weights; θ⁽ᵏ⁻¹⁾ the anchor, where the last projection left them; λ (`weight`); k_l the row of class
    l's representative, j any other row of the batch; d Euclidean distance; L(·; I_k) the inner loss on pairs (k_l, j);
    M steps of a projection (`steps`; 0: by ρ, `rho`, how often a class comes in it); B images in a batch, I of each of
    its classes (`images_per_class` of the run, at least 2), L classes.
    `anchors`: whose row is i in the inner loss: the representatives' (against the whole batch), the examples' (against
    the representatives), or what suits the loss: examples where its references are one a class (N-pair, angular).
    `hard_classes`: hard negative class mining. `forget`: embeddings of the last projection's representatives are
    dropped, not kept until the new ones are embedded.

Algorithm
    1  batches         a random order of every class's images: the first is the representative, for M steps
    2  batches         B/I classes from a shuffled deck; with mining half of them, each of which in turn brings the
                       nearest class not yet in the batch; what is missing still is dealt
    3  batches         of each class its representative, then I − 1 of its other images
    4  loss            the inner loss on all pairs with a representative on one side
    5  after_backward  add λ(θ − θ⁽ᵏ⁾) to the gradients
    6  after_step      keep the representatives' embeddings; after M steps the anchor is the network as it is, back to 1

Settings
    ρ = 6, λ = 1e-3; Adam, 1e-5 (CUB, Cars) or 1e-4 (SOP), head 10 times that, batch 128, 512-d, 100 epochs, plain
    crops (`augment="crop"`). I = 2 (§5.4): M = 10 on CUB and Cars, 1,062 on SOP.
    contrastive(form=squared, mining=hard), triplet(mining=hard), margin(sampling=hard, learn=True), lifted, n_pair,
    angular. Eq. 4.6 itself is contrastive(form=c2, reduce=sum) with ε⁺ = `positive`, ε⁻ = `negative`.

Departures
    λ is printed in Eq. 4.6 and the text, not in Eq. 4.7 and Algorithm 1; here it multiplies the proximal term.
    Classes are dealt, so that in a projection without mining each comes ρ times, not about ρ times; the examples of a
    batch are of its representatives' classes.
    Representatives are drawn anew at random, as the text proposes; a class may draw the same again.
    Mining in the paper is a sentence: half of the classes, the nearest by Euclidean distance of the kept embeddings,
    in the order of the deal, and `forget=False` are ours; a class whose representative was never embedded brings none
    and is none. Representatives are augmented like all images.
    Outside `batches` of its own it knows no representatives: the loss is then the inner one on the whole batch.

Relations
    `n_pair` is this with M = 1; with one endless projection representatives stay, as proxies do. `ccp` has proxies in
    place of images, and the same proximal term.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.relation import References, Relation, relate
from nearkin.methods.samplers import check_start, class_sizes, deal, steps_per_epoch
from nearkin.methods.strategies.proximal import Anchor
from nearkin.space import Space

Anchors = Literal["loss", "representatives", "examples"]

HANDS = 4096
"""For so many batches at most are classes dealt at once."""


def projection_steps(*, rho: float, images: int, classes: int, batch: int) -> int:
    """M, the steps of a projection."""
    return math.ceil(rho * images * classes / batch)  # §5.4


class Images(NamedTuple):
    """Rows of the training set by class: those of class c are order[begin[c] : begin[c] + size[c]]."""

    order: Tensor  # [N] at random within a class; the first of a class is its representative
    begin: Tensor  # [L]
    size: Tensor  # [L]


class Deal(NamedTuple):
    """What is random in a batch."""

    images: Images
    hand: Tensor  # [B/I] classes from the deck
    turn: Tensor  # [B/I] where among its other images each slot's class begins, 0 to 1


def deals(
    labels: Tensor, device: torch.device, *, classes: int, at_once: int, steps: int, seed: int, start: int
) -> Iterator[Deal]:
    """The draws of batch `start` and all that follow: those of projection k depend on the seed and k alone."""
    codes = labels.numpy()
    present, counts = np.unique(codes, return_counts=True)
    begin, size = np.zeros((2, classes), dtype=np.int64)
    begin[present], size[present] = np.cumsum(counts) - counts, counts
    length = min(steps, HANDS)
    for k in itertools.count(start // steps):
        order = np.lexsort((np.random.default_rng((seed, k, 0)).random(len(codes)), codes))
        images = Images(*(torch.from_numpy(array).to(device) for array in (order, begin, size)))
        first = max(start - k * steps, 0)
        for part in range(first // length, -(-steps // length)):
            rng = np.random.default_rng((seed, k, 1 + part))
            hands = present[deal(len(present), at_once, length, rng)[0]].reshape(length, at_once)
            both = (torch.from_numpy(array).to(device) for array in (hands, rng.random(hands.shape)))
            of_part = [Deal(images, *draws) for draws in zip(*both, strict=True)]
            yield from of_part[max(first - part * length, 0) : steps - part * length]


def members(images: Images, classes: Tensor, turn: Tensor, *, of_each: int) -> Tensor:
    """Row numbers [B] of a batch: of each class its representative, then others; a small class repeats its own."""
    size = images.size[classes, None]
    others = (size - 1).clamp_min(1)
    place = 1 + ((turn[:, None] * others).long() + torch.arange(of_each - 1, device=size.device)) % others
    place = torch.cat([torch.zeros_like(size), place % size], dim=1)
    return images.order[images.begin[classes, None] + place].flatten()


def nearest_left(vectors: Tensor, offset: Tensor, drawn: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Classes [wanted] that the first of the drawn ones bring, the nearest not in the batch yet, and which were found.

    `offset` [L] is −‖v‖²/2, so that v·w + offset falls with the distance; −inf where there is no embedding. Drawn
    classes without one come last. One product, then one pass over a row of it for each class, since each excludes what
    those before it took.
    """
    s = (vectors[drawn[:wanted]] @ vectors.T).add_(offset).index_fill_(1, drawn, -torch.inf)
    best = []
    for row in s:
        value, c = row.max(0)
        s.index_fill_(1, c.view(1), -torch.inf)  # taken; past the last candidate it no longer matters which
        best.append((value, c))
    value, c = (torch.stack(part) for part in zip(*best, strict=True))
    return c, (value > -torch.inf) & (offset[drawn[:wanted]] > -torch.inf)


def mined(vectors: Tensor, offset: Tensor, hand: Tensor) -> Tensor:
    """The classes of a batch [B/I]: half of the hand, the nearest of those, and what is missing from its other half."""
    wanted = len(hand) // 2
    if not wanted:
        return hand
    drawn, spare = hand[:-wanted], hand[-wanted:]
    drawn = drawn[offset[drawn].isneginf().byte().argsort(stable=True)]  # those that bring none last
    brought, found = nearest_left(vectors, offset, drawn, wanted)
    there = ((spare[:, None] == brought) & found).any(1)
    left = spare[there.byte().argsort(stable=True)]  # in the order of the deal, without those that were brought
    filled = left[((~found).cumsum(0) - 1).clamp_min(0)]
    return torch.cat([drawn, torch.where(found, brought, filled)])


def with_representatives(x: Tensor, y: Tensor, *, images: int, space: Space, as_anchors: bool) -> Relation:
    """All pairs of a batch with a representative: its row against the batch, or examples against representatives."""
    k = References(x[::images], y[::images], torch.arange(0, len(y), images, device=y.device))
    if as_anchors:
        return relate(x, y, k, space).T
    j, labels = x.reshape(-1, images, x.shape[1])[:, 1:].flatten(0, 1), y.reshape(-1, images)[:, 1:].flatten()
    return relate(j, labels, References(k.vectors, k.labels), space)


class PROFS(Strategy):
    """A pair loss in which every pair has a representative of a class, the same for M steps."""

    natural_inner = "contrastive(form=squared, mining=hard)"
    vectors: Tensor
    offset: Tensor
    count: Tensor

    def __init__(
        self,
        inner: Loss,
        *,
        classes: int,
        dim: int,
        rho: float = 6.0,
        steps: int = 0,
        weight: float = 1e-3,
        hard_classes: bool = True,
        forget: bool = False,
        anchors: Anchors = "loss",
    ) -> None:
        super().__init__(inner)
        if inner.proxies is not None:
            raise NearkinError("profs needs a loss on pairs of samples; this one compares with proxies.")
        if rho <= 0 or steps < 0 or weight < 0:
            raise NearkinError(
                f"profs takes rho above 0, steps and weight of at least 0, not {rho}, {steps} and {weight}."
            )
        self.classes, self.rho, self.steps, self.weight, self.forget = classes, rho, steps, weight, forget
        self.hard_classes = self.reads_state = hard_classes
        self.as_anchors = anchors == "representatives" or (anchors == "loss" and not inner.one_a_class)
        self.anchor = Anchor()
        self.images = 0  # of a class in a batch, the representative first; 0 until `batches` is asked
        kept = classes if hard_classes else 0
        self.register_buffer("vectors", torch.zeros(kept, dim))
        self.register_buffer("offset", torch.full((kept,), -torch.inf))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.done = 0  # the same number on the host, which decides by it when a projection ends
        self.register_load_state_dict_post_hook(self._count_on_host)  # type: ignore[no-untyped-call]

    @property
    def known_classes(self) -> int | None:
        return self.classes

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        if self.weight:
            self.anchor.bind(model)

    def projection(self, batch: int) -> int:
        """M for batches of that size."""
        images = self.images or self.images_per_class
        return self.steps or projection_steps(rho=self.rho, images=images, classes=self.classes, batch=batch)

    def batches(
        self, labels: Tensor, size: int, *, seed: int, start: int = 0, images_per_class: int | None = None
    ) -> Iterator[Tensor]:
        images = self.images_per_class if images_per_class is None else images_per_class
        if images < 2:
            raise NearkinError(
                f"profs needs at least 2 images of a class in a batch, its representative and another, not {images}: "
                "set images_per_class."
            )
        if int(labels.max()) >= self.classes:
            raise NearkinError(f"profs was built for {self.classes} classes; a label is {int(labels.max())}.")
        check_start(seed, start)
        steps_per_epoch(len(labels), size)  # refuses a batch of more images than there are
        class_sizes(labels, size, images=images)  # refuses one of more classes than there are
        self.images = images
        return self._batches(labels, size, seed=seed, start=start)

    def _batches(self, labels: Tensor, size: int, *, seed: int, start: int) -> Iterator[Tensor]:
        images, steps = self.images, self.projection(size)
        device = self.vectors.device if self.hard_classes else labels.device  # so that mining waits for no host
        at_once = size // images
        for d in deals(labels, device, classes=self.classes, at_once=at_once, steps=steps, seed=seed, start=start):
            classes = mined(self.vectors, self.offset, d.hand) if self.hard_classes else d.hand
            yield members(d.images, classes, d.turn, of_each=images)

    def loss(self, step: Step) -> Tensor:
        if not self.images:
            return self.inner.loss(step)
        if len(step.y) % self.images:
            raise NearkinError(
                f"profs knows its representatives by their place in its batches, {self.images} images a class; "
                f"a batch of {len(step.y)} is none of them."
            )
        relation = with_representatives(
            step.x, step.y, images=self.images, space=self.space, as_anchors=self.as_anchors
        )
        return self.inner.objective(relation)

    def after_backward(self, model: nn.Module) -> None:
        super().after_backward(model)
        if self.weight:
            self.anchor.pull(model, self.weight)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if not self.training:
            return
        if self.hard_classes and self.images:
            v, y = self.space.project(step.x[:: self.images]).to(self.vectors.dtype), step.y[:: self.images]
            self.vectors[y], self.offset[y] = v, -v.square().sum(1) / 2
        self.count += 1
        self.done += 1
        if self.done % self.projection(len(step.y)) == 0:
            if self.weight and step.model is not None:
                self.anchor.renew(step.model)
            if self.forget:
                self.offset.fill_(-torch.inf)

    @staticmethod
    def _count_on_host(profs: nn.Module, _: object) -> None:
        assert isinstance(profs, PROFS)
        profs.done = int(profs.count)
