"""Method, the six verbs around one training step, and its two branches Loss and Strategy.

method.bind(model)                                      once, before anything is loaded
method.at_check(model, embed, labels, score)            before the first step, then at every check
for index in method.batches(labels, size, seed=seed):   which images form a batch
    loss = method.loss(step)                            the objective
    method.after_backward(model)                        edit gradients
    method.after_step(step)                             update the method's state

A loop that only calls `loss = method(x, y)` needs no verb: `forward` remembers the batch when its gradient is taken,
and calls `after_step` itself when an optimiser has stepped since.
"""

import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from nearkin.errors import LoopWarning, NearkinError
from nearkin.methods import samplers
from nearkin.methods.batch_checks import check_batch, check_references
from nearkin.methods.indices import with_pairs, with_triplets
from nearkin.methods.plain_loop import PendingBatches
from nearkin.methods.proxies import Proxies
from nearkin.methods.reduction import Reduction, check_reduction, reduce
from nearkin.methods.reduction import sample_weights as weights_of_samples
from nearkin.methods.relation import References, Relation, batch_references, relate
from nearkin.methods.state import PreciseModule
from nearkin.methods.step import Step as Step
from nearkin.methods.step import join
from nearkin.space import Space, full_precision
from nearkin.spec import Call


class Embed(Protocol):
    """Embeds training images in eval mode: all of them, or those of `index`."""

    def __call__(self, index: Tensor | None = None, *, augment: bool = False) -> Tensor: ...


class Method(PreciseModule):
    """The six verbs with their defaults. All state is in parameters and buffers and changes only in train mode."""

    space: Space = Space.COSINE
    images_per_class: int = 0  # images of each class in a batch; 0: batches are random
    has_sample_losses: bool = False  # its loss is a mean over samples, which can be weighted
    lists_triplets: bool = False  # triplets from a miner are rows of their own; else they count as pairs
    reads_state: bool = False  # `batches` reads the method's state (mining), so nothing may be read ahead
    plain_rows: slice | None = None  # rows of a batch whose images are shown without augmentation
    compiled: bool = False  # the run compiles its network, so a method may compile its own inner steps, too
    needs_score: bool = False  # `at_check` needs the score of held-out classes
    spec: Call = Call("")  # with all options
    written: Call = Call("")  # as the user wrote it
    later_options: tuple[str, ...] = ()  # left out of a run's id at their defaults, here and in all base classes

    def __init__(self) -> None:
        super().__init__()
        self.updates_state = type(self).after_step is not Method.after_step
        self._noted: Step | None = None  # the batch of the last loss, with what it left for after_step
        self._pending = PendingBatches()  # of `forward`
        self._lacks: str | None = None  # what a plain loop has to add; empty: nothing; None: nobody has asked

    @classmethod
    def id_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that decide the id of a run."""
        usual = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
        later = {name for base in cls.__mro__ for name in getattr(base, "later_options", ())}
        return {name: v for name, v in options.items() if name not in later or v != usual[name]}

    def extra_repr(self) -> str:
        """The spec, for `print(method)`."""
        return str(self.spec) if self.spec.name else ""

    @property
    def ranked_in(self) -> Space:
        """The space a model trained with this method is measured in."""
        return self.space.ranked_in

    def bind(self, model: nn.Module) -> None:
        """Register anchors and momentum copies of the model as buffers. Call once, before anything is loaded."""

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:  # noqa: ARG002
        """Initialise proxies from data, redraw, reschedule. Called before the first step and at every check."""
        self.catch_up()

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

        Called again with every new learning rate, which methods that move proxies themselves take from here.
        `by_row` asks for an optimiser that updates only the rows a step has used, such as `RowAdamW`; others may
        ignore it.

        A method without parameters has one empty group, so that an optimiser can be made of its groups alone.
        """
        groups, rest = list[dict[str, Any]](), list[nn.Parameter]()
        for module in self.modules():
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            speed: Any = getattr(module, "speed", None)
            if parameters and speed is not None:
                by_row = {"by_row": True} if isinstance(module, Proxies) and module.samples else {}
                groups.append({"params": parameters, "lr": lr * speed, **by_row})
            else:
                rest += parameters
        return groups if groups and not rest else [*groups, {"params": rest, "lr": lr}]

    def after_backward(self, model: nn.Module) -> None:
        """Edit the model's gradients before the optimiser's step."""

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        """Update the method's state after the optimiser's step. Overriding methods call this one, too."""
        self._pending.held.clear()  # whoever calls this keeps the state up to date
        for module in self.children():
            if isinstance(module, Proxies) and self.training:
                module.count_step()

    # Steps as CUDA graphs, which repeat the work on the device without the verbs.

    def step_kind(self, size: int) -> Hashable | None:  # noqa: ARG002
        """What the next step, of a batch of this size, depends on besides tensors that change in place.

        Steps of the same kind do the same work on the device. None: this step must not run from a graph.
        """
        return ()

    def after_replay(self) -> None:
        """Count on the host what a step counts, after one that ran from a graph."""

    def note(self, step: Step, *tensors: Tensor) -> None:
        """In `loss`: leave tensors for `after_step`, so that computing a loss twice does not move the state twice."""
        self._noted = step.detached(tensors)

    def noted(self, step: Step) -> tuple[Tensor, ...]:
        """In `after_step`: what `loss` left for this batch; empty if it was not called."""
        kept, self._noted = self._noted, None
        return step.notes or (kept.notes if kept is not None and kept.is_batch(step) else ())

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

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        indices: Sequence[Tensor] | None = None,
        *,
        images: Tensor | None = None,
        index: Tensor | None = None,
        references: References | tuple[Tensor, Tensor] | None = None,
        reduction: Reduction = "mean",
        sample_weights: Tensor | None = None,
        class_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss of embeddings [B, D] and labels [B], for a loop of your own.

        `images`, the network's input, and `index`, rows of the training set, are for strategies that ask for them.
        `references`: other vectors [R, D] and their labels [R] that a pair loss compares the batch with.
        `indices`: the only pairs that count, as the miners of pytorch-metric-learning return them: anchors, positives,
        negatives; or anchors, positives, anchors, negatives. Positives and negatives are rows of the references.
        `reduction`: mean, mean_nonzero, sum or none, over losses per sample whose mean is the published loss.
        `sample_weights` [B] and `class_weights` [C] multiply the losses per sample.
        """
        check_batch(x, y, classes=self.known_classes, dim=self.known_dim, space=self.space)
        check_reduction(reduction)
        weights = weights_of_samples(y, sample_weights, class_weights)
        by_sample = reduction != "mean" or weights is not None
        if by_sample and not self.has_sample_losses:
            raise NearkinError(
                f"The loss of {self.spec.name or 'this strategy'} is not a mean over the samples of a batch: leave out "
                "reduction, sample_weights and class_weights."
            )
        others = self.others(x, references, indices)
        if weights is not None and indices is not None and self.lists_triplets and len(indices) == 3:
            weights = weights[indices[0].long()]

        def loss_of(step: Step) -> Tensor:
            found = self.loss(step) if others is None else others(step)
            return reduce(found, reduction, weights) if by_sample else found

        return self._watched(Step(x, y, images=images, index=index, by_sample=by_sample), loss_of)

    def others(
        self,
        x: Tensor,  # noqa: ARG002
        references: References | tuple[Tensor, Tensor] | None,
        indices: Sequence[Tensor] | None,
    ) -> Callable[[Step], Tensor] | None:
        """The loss against other references, or of other pairs, than those of the method; None if neither is given."""
        if references is not None or indices is not None:
            raise NearkinError(
                "A strategy chooses its own references and pairs: leave out references and indices (a miner), or use a "
                "loss on pairs alone."
            )
        return None

    def relation(self, step: Step, references: References) -> Relation:
        """The batch compared with the references."""
        return relate(step.x, step.y, references, self.space)._replace(by_sample=step.by_sample)

    def _check_device(self, x: Tensor) -> None:
        own = next(itertools.chain(self.parameters(), self.buffers()), x)
        if own.device != x.device:
            raise NearkinError(
                f"Embeddings are on {x.device} and the method on {own.device}: call its .to({str(x.device)!r})."
            )

    # A plain loop.

    def lacks(self, step: Step) -> str:  # noqa: ARG002
        """What a plain loop with such steps has to add before the method works as published; empty if nothing."""
        return ""

    def join(self, steps: Sequence[Step]) -> Step:
        """The batches of one optimiser step as one batch."""
        return join(steps)

    def _watched(self, step: Step, loss_of: Callable[[Step], Tensor]) -> Tensor:
        """The loss of a step, for which `catch_up` calls `after_step`."""
        self._check_device(step.x)
        if not torch.compiler.is_compiling():
            self._ask(step)
        if not (self.updates_state or any(isinstance(m, Proxies) and m.samples for m in self.modules())):
            return loss_of(step)
        self.catch_up()
        loss = loss_of(step)
        if self.training and loss.requires_grad and not self._lacks:
            kept = self._noted.notes if self._noted is not None else ()
            self._pending.add_at_gradient(loss, step.detached(kept))
        return loss

    def _ask(self, step: Step) -> None:
        """Warn once of what the loop lacks."""
        if self.training and self._lacks != "":
            asked, self._lacks = self._lacks, self.lacks(step)
            if self._lacks and asked is None:
                until_then = " Until then the method's state does not change." if self.updates_state else ""
                warnings.warn(self._lacks + until_then, LoopWarning, stacklevel=6)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Call `after_step` for the batches of `forward`, as one, if an optimiser has stepped since their gradient.

        The methods that read or save the state call this; call it before you read a memory or proxies directly.
        """
        if self.training and (ready := self._pending.ready()):
            waiting = self._pending.waiting()
            with full_precision(ready[0].x):
                self.after_step(self.join(ready))
            self._pending.held = waiting

    def train(self, mode: bool = True) -> Self:
        self.catch_up()
        return super().train(mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.catch_up()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= self._pending.tensors(prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        device = next((t.device for t in [*self.parameters(), *self.buffers()]), None)
        self._noted = None
        self._pending.take_from(state_dict, prefix, device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Loss(Method):
    """An objective against references: its proxies if it has any, else the batch itself."""

    proxies: Proxies | None
    has_sample_losses = True
    later_options: tuple[str, ...] = ("sample_rate",)
    one_per_class: bool = False  # expects one reference per class, as in a softmax over classes

    def __init__(self) -> None:
        super().__init__()
        self.proxies = None  # not on the class, where it would shadow the module a subclass sets

    def references(self, x: Tensor, y: Tensor) -> References:
        """The references of this batch."""
        return batch_references(x, y) if self.proxies is None else self.proxies.references(y)

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        """The paper's equation on a relation; `weights` [B, R] multiply inside the exponent or the hinge."""
        raise NotImplementedError

    def loss(self, step: Step) -> Tensor:
        return self.objective(self.relation(step, self.references(step.x, step.y)))

    def others(
        self, x: Tensor, references: References | tuple[Tensor, Tensor] | None, indices: Sequence[Tensor] | None
    ) -> Callable[[Step], Tensor] | None:
        if references is None and indices is None:
            return None
        if self.proxies is not None:
            raise NearkinError(
                f"{self.spec.name or 'This loss'} compares samples with its proxies: references and indices (a miner) "
                "are for losses on pairs."
            )
        given = None if references is None else check_references(references, x)

        def loss_of(step: Step) -> Tensor:
            r = self.relation(step, self.references(step.x, step.y) if given is None else given)
            if indices is not None:
                r = with_triplets(r, indices) if self.lists_triplets else with_pairs(r, indices)
            return self.objective(r)

        return loss_of

    def at_check(self, model: nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        super().at_check(model, embed, labels, score)
        if self.proxies is not None:
            self.proxies.from_data(embed, labels)

    def lacks(self, step: Step) -> str:  # noqa: ARG002
        return "" if self.proxies is None else self.proxies.lacks()

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
        self.updates_state = type(self).after_step is not Strategy.after_step or inner.updates_state

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
        super().at_check(model, embed, labels, score)
        self.inner.at_check(model, embed, labels, score)

    def lacks(self, step: Step) -> str:
        return self.inner.lacks(step)

    def loss(self, step: Step) -> Tensor:
        return self.inner.loss(step)

    def after_backward(self, model: nn.Module) -> None:
        self.inner.after_backward(model)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        self.inner.after_step(step)

    def step_kind(self, size: int) -> Hashable | None:
        return self.inner.step_kind(size)

    def after_replay(self) -> None:
        self.inner.after_replay()
