"""A method is six verbs around one training step; losses and strategies are its two branches.

    method.bind(model)                                      once, before anything is loaded
    method.at_check(model, embed, labels, score)            before the first step, then every check
    for index in method.batches(labels, size, seed=seed):   who meets whom
        loss = method.loss(step)                            the objective
        method.after_backward(model)                        edit gradients
        method.after_step(step)                             edit own state

`method("xbm(contrastive, size=1024)", classes=100, dim=512)` builds one from its spec.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods import samplers
from nearkin.methods.proxies import Proxies
from nearkin.methods.relation import References, Relation, batch_references, relate
from nearkin.space import Space, never_lower
from nearkin.spec import Call


@dataclass(frozen=True, slots=True)
class Step:
    """What one training step knows. Outside the loop only `x` and `y` are there."""

    x: Tensor  # [B, D] embeddings
    y: Tensor  # [B] labels
    model: nn.Module | None = None
    images: Tensor | None = None  # [B, C, S, S] what the model saw
    index: Tensor | None = None  # [B] rows of the training set
    rng: torch.Generator | None = None


class Embed(Protocol):
    """Embeddings of training images in eval mode; all of them, or those of `index`."""

    def __call__(self, index: Tensor | None = None, *, augment: bool = False) -> Tensor: ...


class Method(nn.Module):
    """The six verbs with their defaults. All state is in parameters and buffers; it moves only in train mode."""

    space: Space = Space.COSINE
    images_per_class: int = 0  # how a batch is made: n images of each of its classes, or 0: drawn at random
    reads_state: bool = False  # `batches` reads the method's state (mining): nothing may be read ahead
    compiled: bool = False  # the run compiles its network: what a method does many times a step may be compiled, too
    needs_score: bool = False  # `at_check` goes by the score of held-out classes
    spec: Call = Call("")

    @property
    def ranked_in(self) -> Space:
        """The space a model trained with this method is measured in."""
        return self.space.ranked_in

    def bind(self, model: nn.Module) -> None:
        """Once, before anything is loaded: anchors and momentum copies become buffers."""

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        """Before the first step and at every check: proxies from data, redraws, schedules."""

    def batches(
        self, labels: Tensor, size: int, *, seed: int, start: int = 0, images_per_class: int | None = None
    ) -> Iterator[Tensor]:
        """Endless batches of row numbers from batch `start` on; batch n depends on the seed, n and own state alone."""
        images = self.images_per_class if images_per_class is None else images_per_class
        if images:
            return samplers.per_class(labels, size, images=images, seed=seed, start=start)
        return samplers.shuffled(labels, size, seed=seed, start=start)

    def loss(self, step: Step) -> Tensor:
        """The objective of one batch: a scalar."""
        raise NotImplementedError

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Own parameters for the optimiser: those of a part with a `speed`, as proxies have, at `lr` times it."""
        groups, rest = list[dict[str, Any]](), list[nn.Parameter]()
        for part in self.modules():
            own = [p for p in part.parameters(recurse=False) if p.requires_grad]
            speed: Any = getattr(part, "speed", None)
            if own and speed is not None:
                groups.append({"params": own, "lr": lr * speed})
            else:
                rest += own
        return groups + ([{"params": rest, "lr": lr}] if rest else [])

    def after_backward(self, model: nn.Module) -> None:
        """Edit the model's gradients before the optimiser takes them."""

    def after_step(self, step: Step) -> None:
        """Edit own state after the optimiser's step."""

    def class_values(self) -> dict[str, Tensor]:
        """Numbers it holds about each training class, by name, [C] each: kept with the model, shown in the report."""
        return {}

    @property
    def known_classes(self) -> int | None:
        """How many classes labels may name, where the method cares."""
        return None

    def forward(self, x: Tensor, y: Tensor, indices_tuple: None = None) -> Tensor:
        """The loss of embeddings [B, D] and labels [B], for a loop of your own.

        The third argument is what the trainers of pytorch-metric-learning pass: None, unless a miner is set.
        """
        if indices_tuple is not None:
            raise NearkinError(
                "nearkin's losses mine for themselves: leave the miner out and set the loss's own option."
            )
        check_batch(x, y, classes=self.known_classes)
        return self.loss(Step(x, y))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(never_lower(fn), recurse)  # type: ignore[no-untyped-call]


class Loss(Method):
    """An objective against references: the batch itself, or proxies where there are any."""

    proxies: Proxies | None
    one_a_class: bool = False  # made for references of which each class has one, as in a softmax over classes

    def __init__(self) -> None:
        super().__init__()
        self.proxies = None  # not on the class, where it would hide the module a subclass sets

    def references(self, x: Tensor, y: Tensor) -> References:
        """What this batch is compared with."""
        return batch_references(x, y) if self.proxies is None else self.proxies.references()

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        """The paper's equation on a relation; `weights` [B, R] multiply inside the exponent or the hinge."""
        raise NotImplementedError

    def loss(self, step: Step) -> Tensor:
        return self.objective(relate(step.x, step.y, self.references(step.x, step.y), self.space))

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:  # noqa: ARG002
        if self.proxies is not None:
            self.proxies.from_data(embed, labels)

    @property
    def known_classes(self) -> int | None:
        return None if self.proxies is None else self.proxies.classes


class Strategy(Method):
    """A way of training around an inner loss; verbs it does not change go to the inner method."""

    natural_inner: str = ""  # the spec it takes where none is given

    def __init__(self, inner: Loss) -> None:
        super().__init__()
        self.inner = inner
        self.space = inner.space
        self.images_per_class = inner.images_per_class

    def class_values(self) -> dict[str, Tensor]:
        return self.inner.class_values()

    @property
    def known_classes(self) -> int | None:
        return self.inner.known_classes

    def bind(self, model: nn.Module) -> None:
        self.inner.bind(model)

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        self.inner.at_check(model, embed, labels, score)

    def loss(self, step: Step) -> Tensor:
        return self.inner.loss(step)

    def after_backward(self, model: nn.Module) -> None:
        self.inner.after_backward(model)

    def after_step(self, step: Step) -> None:
        self.inner.after_step(step)


def check_batch(x: Tensor, y: Tensor, classes: int | None = None) -> None:
    """Refuse what is no batch, in a sentence. Label values are looked at only where that costs no device sync."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise NearkinError(f"A method takes tensors; got {type(x).__name__} and {type(y).__name__}.")
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
        raise NearkinError(f"A method takes embeddings [B, D] and labels [B]; got {list(x.shape)} and {list(y.shape)}.")
    if y.is_floating_point() or y.dtype == torch.bool:
        raise NearkinError(f"Labels are integers; got {y.dtype}: call labels.long().")
    if y.device.type == "cpu" and not 0 <= int(y.min()) <= int(y.max()) < (classes or float("inf")):
        upto = "" if classes is None else f" to {classes - 1} here"
        raise NearkinError(f"Labels run from 0{upto}; got {int(y.min())} to {int(y.max())}.")
