"""PROFS. Can, Gürbüz, Alatan: Deep Metric Learning with Alternating Projections onto Feasible Sets. ICIP 2021.

For M steps one image of each class represents it, and every pair has a representative on one side; then they change.

    θ⁽ᵏ⁾ = argmin_θ ½λ‖θ⁽ᵏ⁻¹⁾ − θ‖² + Σ_{l,j} y_{k_l,j} (d_{k_l,j} − ε⁺)_+ + (1 − y_{k_l,j}) (ε⁻ − d_{k_l,j})_+   (4.6)
    θ⁽ᵏ⁾ = argmin_θ ½λ‖θ⁽ᵏ⁻¹⁾ − θ‖² + L(θ; I_k)                                                                  (4.7)
    M = ⌈ρ/p⌉,   p = B/(I·L)                                                                                    (§5.4)

Symbols
    θ the network's weights; θ⁽ᵏ⁻¹⁾ the anchor, where the last projection left them; λ (`weight`); k_l the row of class
    l's representative, j any other row of the batch; d Euclidean distance; L(·; I_k) the inner loss on pairs (k_l, j);
    M steps per projection (`steps`; 0: from ρ, `rho`, how often a class occurs in it); B images in a batch, I of
    each of its classes (`images_per_class` of the run, at least 2), L classes.
    `anchors`: the rows i of the inner loss: "representatives" (against the whole batch), "examples" (against the
    representatives), or "loss": examples if the loss expects one reference per class (N-pair, angular).
    `hard_classes`: hard negative class mining. `forget`: drop the embeddings of the last projection's representatives
    at once, instead of keeping them until the new ones are embedded. `plain_representatives`: representatives are shown
    as their central square, without augmentation.

Algorithm
    1  batches         a random order of the images of each class: the first is the representative, for M steps
    2  batches         B/I classes from a shuffled deck; with mining half of them, and for each of those in turn the
                       nearest class not yet in the batch; missing ones are dealt
    3  batches         of each class its representative, then I − 1 of its other images
    4  loss            the inner loss on all pairs with a representative on one side
    5  after_backward  add λ(θ − θ⁽ᵏ⁾) to the gradients
    6  after_step      store the representatives' embeddings; after M steps move the anchor to the network, back to 1

Settings
    ρ = 6, λ = 1e-3; Adam, 1e-5 (CUB, Cars) or 1e-4 (SOP), head 10 times that, batch 128, 512-d, 100 epochs, plain
    crops (`augment="crop"`). I = 2 (§5.4): M = 10 on CUB and Cars, 1,062 on SOP.
    contrastive(form=squared, mining=hard), triplet(mining=hard), margin(sampling=hard, learn=True), lifted, n_pair,
    angular. Eq. 4.6 itself is contrastive(form=c2, reduce=sum) with ε⁺ = `positive`, ε⁻ = `negative`.

Departures
    λ is printed in Eq. 4.6 and the text, not in Eq. 4.7 and Algorithm 1; here it multiplies the proximal term.
    Classes are dealt, so that without mining each occurs exactly ρ times in a projection; the examples of a batch are
    of the classes of its representatives.
    Representatives are redrawn at random, as the text proposes; a class may draw the same one again.
    The paper describes mining in one sentence; half of the classes, the nearest by Euclidean distance of the stored
    embeddings, in the order of the deal, and `forget=False` are ours. A class whose representative was never embedded
    takes no part in mining.
    The paper does not say whether representatives are augmented. Here they are, like all images, unless
    `plain_representatives`; public code by the same authors (in the repository of `ccp`) leaves them as they are.
    Without batches from `batches` there are no representatives: the loss is then the inner one on the whole batch.

Relations
    `n_pair` is this with M = 1; with one endless projection representatives stay, as proxies do. `ccp` has proxies
    instead of images, and the same proximal term.
"""

import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.relation import References, Relation, relate
from nearkin.methods.samplers import check_start, class_sizes, deal, steps_per_epoch
from nearkin.methods.state import count_up, count_up_on_host, register_counter
from nearkin.methods.strategies.inner_loss import require_pairs
from nearkin.methods.strategies.model_copy import Anchor
from nearkin.space import Space

Anchors = Literal["loss", "representatives", "examples"]

HANDS = 4096
"""Classes are dealt for at most this many batches at once."""


def projection_steps(*, rho: float, images: int, classes: int, batch: int) -> int:
    """M, the steps per projection."""
    return math.ceil(rho * images * classes / batch)  # §5.4


class Images(NamedTuple):
    """Rows of the training set by class: those of class c are order[begin[c] : begin[c] + size[c]]."""

    order: Tensor  # [N] random within a class; the first image of a class is its representative
    begin: Tensor  # [L]
    size: Tensor  # [L]


class Deal(NamedTuple):
    """The random draws of a batch."""

    images: Images
    hand: Tensor  # [B/I] classes from the deck
    turn: Tensor  # [B/I] where to start among the other images of each class, 0 to 1


def deals(
    labels: Tensor, device: torch.device, *, classes: int, at_once: int, steps: int, seed: int, start: int
) -> Iterator[Deal]:
    """The draws of batch `start` and all following ones; those of projection k depend only on the seed and k."""
    codes = labels.numpy()
    present, counts = np.unique(codes, return_counts=True)
    begin, size = np.zeros((2, classes), dtype=np.int64)
    begin[present], size[present] = np.cumsum(counts) - counts, counts
    length = min(steps, HANDS)
    for k in itertools.count(start // steps):
        order = np.lexsort((np.random.default_rng((seed, k, 0)).random(len(codes)), codes))
        images = Images(*(torch.from_numpy(array).to(device) for array in (order, begin, size)))
        first = max(start - k * steps, 0)
        for block in range(first // length, -(-steps // length)):
            rng = np.random.default_rng((seed, k, 1 + block))
            hands = present[deal(len(present), at_once, length, rng)[0]].reshape(length, at_once)
            both = (torch.from_numpy(array).to(device) for array in (hands, rng.random(hands.shape)))
            dealt = [Deal(images, *draws) for draws in zip(*both, strict=True)]
            yield from dealt[max(first - block * length, 0) : steps - block * length]


def members(images: Images, classes: Tensor, turn: Tensor, *, of_each: int) -> Tensor:
    """Rows [B] of a batch: per class its representative, then other images; a small class repeats its images."""
    size = images.size[classes, None]
    others = (size - 1).clamp_min(1)
    place = 1 + ((turn[:, None] * others).long() + torch.arange(of_each - 1, device=size.device)) % others
    place = torch.cat([torch.zeros_like(size), place % size], dim=1)
    return images.order[images.begin[classes, None] + place].flatten()


def nearest_classes(vectors: Tensor, offset: Tensor, drawn: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """For the first `wanted` drawn classes, the nearest class not in the batch yet, and whether there is one.

    `offset` [L] is −‖v‖²/2, so that v·w + offset decreases with distance; −inf without an embedding. Drawn classes
    without one come last. One product, then one pass over a row of it per class, since each excludes the classes found
    before.
    """
    s = (vectors[drawn[:wanted]] @ vectors.T).add_(offset).index_fill_(1, drawn, -torch.inf)
    best = []
    for row in s:
        value, c = row.max(0)
        s.index_fill_(1, c.view(1), -torch.inf)  # taken; after the last candidate it does not matter which
        best.append((value, c))
    value, c = (torch.stack(pair) for pair in zip(*best, strict=True))
    return c, (value > -torch.inf) & (offset[drawn[:wanted]] > -torch.inf)


def mine_classes(vectors: Tensor, offset: Tensor, hand: Tensor) -> Tensor:
    """The classes of a batch [B/I]: half of the hand, their nearest classes, the rest from the other half."""
    wanted = len(hand) // 2
    if not wanted:
        return hand
    drawn, spare = hand[:-wanted], hand[-wanted:]
    drawn = drawn[offset[drawn].isneginf().byte().argsort(stable=True)]  # classes without an embedding last
    near, found = nearest_classes(vectors, offset, drawn, wanted)
    used = ((spare[:, None] == near) & found).any(1)
    left = spare[used.byte().argsort(stable=True)]  # in the order of the deal, those not found by mining first
    filled = left[((~found).cumsum(0) - 1).clamp_min(0)]
    return torch.cat([drawn, torch.where(found, near, filled)])


def with_representatives(x: Tensor, y: Tensor, *, images: int, space: Space, as_anchors: bool) -> Relation:
    """All pairs with a representative: representatives against the batch, or examples against representatives."""
    k = References(x[::images], y[::images], torch.arange(0, len(y), images, device=y.device))
    if as_anchors:
        return relate(x, y, k, space).T
    j, labels = x.reshape(-1, images, x.shape[1])[:, 1:].flatten(0, 1), y.reshape(-1, images)[:, 1:].flatten()
    return relate(j, labels, References(k.vectors, k.labels), space)


class PROFS(Strategy):
    """A pair loss in which every pair has a representative of a class, the same for M steps."""

    natural_inner = "contrastive(form=squared, mining=hard)"
    later_options = ("plain_representatives",)
    vectors: Tensor
    offset: Tensor
    count: Tensor
    count_on_host: int

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
        plain_representatives: bool = False,
    ) -> None:
        super().__init__(inner)
        require_pairs(inner, "profs")
        if rho <= 0 or steps < 0 or weight < 0:
            raise NearkinError(
                f"profs takes rho above 0, steps and weight of at least 0, not {rho}, {steps} and {weight}."
            )
        self.classes, self.rho, self.steps, self.weight, self.forget = classes, rho, steps, weight, forget
        self.hard_classes = self.reads_state = hard_classes
        self.plain_representatives = plain_representatives
        self.as_anchors = anchors == "representatives" or (anchors == "loss" and not inner.one_per_class)
        self.anchor = Anchor()
        self.images = 0  # images per class in a batch, the representative first; 0 until `batches` is called
        kept = classes if hard_classes else 0
        self.register_buffer("vectors", torch.zeros(kept, dim))
        self.register_buffer("offset", torch.full((kept,), -torch.inf))
        register_counter(self, "count")  # of steps

    @property
    def known_classes(self) -> int | None:
        return self.classes

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        if self.weight:
            self.anchor.bind(model)

    def projection(self, batch: int) -> int:
        """M for batches of `batch` images."""
        images = self.images or self.images_per_class
        return self.steps or projection_steps(rho=self.rho, images=images, classes=self.classes, batch=batch)

    def batches(
        self, labels: Tensor, size: int, *, seed: int, start: int = 0, images_per_class: int | None = None
    ) -> Iterator[Tensor]:
        images = self.images_per_class if images_per_class is None else images_per_class
        if images < 2:
            raise NearkinError(
                f"profs needs at least 2 images per class in a batch, the representative and another, not {images}: "
                "set images_per_class."
            )
        labels = labels.long()
        if int(labels.max()) >= self.classes:
            raise NearkinError(f"profs was built for {self.classes} classes, but a label is {int(labels.max())}.")
        check_start(seed, start)
        steps_per_epoch(len(labels), size)  # refuses a batch larger than the data set
        class_sizes(labels, size, images=images)  # refuses a batch with more classes than there are
        self.images = images
        self.plain_rows = slice(None, None, images) if self.plain_representatives else None
        return self._batches(labels, size, seed=seed, start=start)

    def _batches(self, labels: Tensor, size: int, *, seed: int, start: int) -> Iterator[Tensor]:
        images, steps = self.images, self.projection(size)
        device = self.vectors.device if self.hard_classes else labels.device  # so that mining needs no host sync
        at_once = size // images
        for d in deals(labels, device, classes=self.classes, at_once=at_once, steps=steps, seed=seed, start=start):
            self.catch_up()
            classes = mine_classes(self.vectors, self.offset, d.hand) if self.hard_classes else d.hand
            yield members(d.images, classes, d.turn, of_each=images)

    def lacks(self, step: Step) -> str:
        needs = (
            "profs chooses the images of each batch: call method.bind(model), draw the batches from "
            "method.batches(labels, size, seed=0), and call method.after_backward(model) before each optimiser.step(). "
            "Without that the loss is the inner one."
        )
        ready = self.images and (not self.weight or self.anchor.bound)
        return super().lacks(step) or ("" if ready else needs)

    def loss(self, step: Step) -> Tensor:
        if not self.images:
            return self.inner.loss(step)
        if len(step.y) % self.images:
            raise NearkinError(
                f"profs finds its representatives by their position in batches with {self.images} images per class; "
                f"a batch of {len(step.y)} does not fit."
            )
        relation = with_representatives(
            step.x, step.y, images=self.images, space=self.space, as_anchors=self.as_anchors
        )
        return self.inner.objective(relation)

    def after_backward(self, model: nn.Module) -> None:
        super().after_backward(model)
        if self.weight:
            self.anchor.pull(model, self.weight)

    def step_kind(self, size: int) -> Hashable | None:
        ends = (self.count_on_host + 1) % self.projection(size) == 0
        return None if ends and (self.weight or self.forget) else super().step_kind(size)

    def after_replay(self) -> None:
        super().after_replay()
        count_up_on_host(self, "count")

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if not self.training:
            return
        if self.hard_classes and self.images:
            v, y = self.space.project(step.x[:: self.images]).to(self.vectors.dtype), step.y[:: self.images]
            self.vectors[y], self.offset[y] = v, -v.square().sum(1) / 2
        for _ in range(step.batches):
            count_up(self, "count")
        if self.count_on_host % self.projection(len(step.y) // step.batches) < step.batches:
            model = self.anchor.bound[0] if step.model is None and self.anchor.bound else step.model
            if self.weight and model is not None:
                self.anchor.renew(model)
            if self.forget:
                self.offset.fill_(-torch.inf)
