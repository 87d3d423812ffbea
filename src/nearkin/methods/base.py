"""Method, the six verbs around one training step, and its two branches Loss and Strategy.

method.bind(model)                                      once, before anything is loaded
method.at_check(model, embed, labels, score)            before the first step, then at every check
for index in method.batches(labels, size, seed=seed):   which images form a batch
    loss = method.loss(step)                            the objective
    method.after_backward(model)                        edit gradients
    method.after_step(step)                             update the method's state
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nearkin.errors import NearkinError
from nearkin.methods import samplers
from nearkin.methods.proxies import Proxies
from nearkin.methods.relation import References, Relation, batch_references, relate
from nearkin.methods.state import PreciseModule
from nearkin.space import Space, at_least_float32, norm
from nearkin.spec import Call


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one training step. Outside our loop only `x` and `y` are set."""

    x: Tensor  # [B, D] embeddings
    y: Tensor  # [B] labels
    model: nn.Module | None = None
    images: Tensor | None = None  # [B, C, S, S] the model's input
    index: Tensor | None = None  # [B] rows of the training set
    rng: torch.Generator | None = None

    def __post_init__(self) -> None:
        # Narrow integers have no −1 for empty slots (uint8) or cannot index; int64 stays the same tensor.
        object.__setattr__(self, "y", self.y.long())


class Embed(Protocol):
    """Embeds training images in eval mode: all of them, or those of `index`."""

    def __call__(self, index: Tensor | None = None, *, augment: bool = False) -> Tensor: ...


class Method(PreciseModule):
    """The six verbs with their defaults. All state is in parameters and buffers and changes only in train mode."""

    space: Space = Space.COSINE
    images_per_class: int = 0  # images of each class in a batch; 0: batches are random
    reads_state: bool = False  # `batches` reads the method's state (mining), so nothing may be read ahead
    compiled: bool = False  # the run compiles its network, so a method may compile its own inner steps, too
    needs_score: bool = False  # `at_check` needs the score of held-out classes
    spec: Call = Call("")
    later_options: tuple[str, ...] = ()  # left out of a run's id while off, so that older results keep theirs

    @property
    def ranked_in(self) -> Space:
        """The space a model trained with this method is measured in."""
        return self.space.ranked_in

    def bind(self, model: nn.Module) -> None:
        """Register anchors and momentum copies of the model as buffers. Call once, before anything is loaded."""

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        """Initialise proxies from data, redraw, reschedule. Called before the first step and at every check."""

    def batches(
        self, labels: Tensor, size: int, *, seed: int, start: int = 0, images_per_class: int | None = None
    ) -> Iterator[Tensor]:
        """Endless batches of row numbers from batch `start` on; batch n depends only on the seed, n and the state."""
        images = self.images_per_class if images_per_class is None else images_per_class
        if images:
            return samplers.per_class(labels, size, images=images, seed=seed, start=start)
        return samplers.shuffled(labels, size, seed=seed, start=start)

    def loss(self, step: Step) -> Tensor:
        """The objective of one batch, a scalar."""
        raise NotImplementedError

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; a module with a `speed`, such as proxies, learns at `speed` · `lr`.

        A method without parameters has one empty group, so that an optimiser can be made of its groups alone.
        """
        groups, rest = list[dict[str, Any]](), list[nn.Parameter]()
        for module in self.modules():
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            speed: Any = getattr(module, "speed", None)
            if parameters and speed is not None:
                groups.append({"params": parameters, "lr": lr * speed})
            else:
                rest += parameters
        return groups if groups and not rest else [*groups, {"params": rest, "lr": lr}]

    def after_backward(self, model: nn.Module) -> None:
        """Edit the model's gradients before the optimiser's step."""

    def after_step(self, step: Step) -> None:
        """Update the method's state after the optimiser's step."""

    def class_values(self) -> dict[str, Tensor]:
        """Values per training class, [C] each, by name. They are saved with the model and shown in the report."""
        return {}

    def image_values(self) -> dict[str, Tensor]:
        """Values per training image, [N] each, by name, such as how often it was taken for an outlier."""
        return {}

    @property
    def known_classes(self) -> int | None:
        """The number of classes, or None if the method works for any."""
        return None

    @property
    def known_dim(self) -> int | None:
        """The dimension of embeddings, or None if the method works for any: that of proxies or a memory, `vectors`."""
        held = (getattr(module, "vectors", None) for module in self.modules())
        return next((vectors.shape[1] for vectors in held if isinstance(vectors, Tensor)), None)

    def forward(self, x: Tensor, y: Tensor, indices_tuple: None = None) -> Tensor:
        """The loss of embeddings [B, D] and labels [B], for a loop of your own.

        The third argument is passed by the trainers of pytorch-metric-learning; it is None unless a miner is set.
        """
        if indices_tuple is not None:
            raise NearkinError(
                "nearkin's losses have mining built in: remove the miner and set the option of the loss."
            )
        check_batch(x, y, classes=self.known_classes, dim=self.known_dim, space=self.space)
        return self.loss(Step(x, y))


class Loss(Method):
    """An objective against references: its proxies if it has any, else the batch itself."""

    proxies: Proxies | None
    one_per_class: bool = False  # expects one reference per class, as in a softmax over classes

    def __init__(self) -> None:
        super().__init__()
        self.proxies = None  # not on the class, where it would shadow the module a subclass sets

    def references(self, x: Tensor, y: Tensor) -> References:
        """The references of this batch."""
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
    """A way of training around an inner loss; verbs it does not override are those of the inner loss."""

    natural_inner: str = ""  # the default inner loss, as a spec

    def __init__(self, inner: Loss) -> None:
        super().__init__()
        self.inner = inner
        self.space = inner.space
        self.images_per_class = inner.images_per_class

    def class_values(self) -> dict[str, Tensor]:
        return self.inner.class_values()

    def image_values(self) -> dict[str, Tensor]:
        return self.inner.image_values()

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


def check_batch(
    x: Tensor, y: Tensor, classes: int | None = None, dim: int | None = None, space: Space = Space.COSINE
) -> None:
    """Check shapes and types of a batch, and the values of labels and norms if that needs no device sync."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise NearkinError(f"A method takes tensors; got {type(x).__name__} and {type(y).__name__}.")
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
        raise NearkinError(f"A method takes embeddings [B, D] and labels [B]; got {list(x.shape)} and {list(y.shape)}.")
    if dim is not None and x.shape[1] != dim:
        raise NearkinError(
            f"This method takes embeddings of {dim} dimensions, not {x.shape[1]}: build it with dim={x.shape[1]}."
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise NearkinError(f"Labels are integers; got {y.dtype}: call labels.long().")
    if torch.compiler.is_compiling():  # the values would break the graph
        return
    if y.device.type == "cpu" and not 0 <= int(y.min()) <= int(y.max()) < (classes or float("inf")):
        limit = "" if classes is None else f" to {classes - 1} here"
        raise NearkinError(f"Labels run from 0{limit}; got {int(y.min())} to {int(y.max())}.")
    if x.device.type == "cpu" and space.norm_floor is None:
        longest, most = float(norm(at_least_float32(x.detach())).max()), space.norm_limit(x.dtype, factors=4)
        if not longest < most:  # nor is NaN
            raise NearkinError(
                f"In space {space.value} embedding norms must be below {most:.0e}; got {longest:.0e}: "
                "lower the learning rate, or use space=cosine."
            )
