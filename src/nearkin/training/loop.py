"""The training loop. A method takes part through its six verbs; nothing here knows which method it is."""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nearkin import ranks
from nearkin.console import Reporter, Status, stop_on_interrupt
from nearkin.data.pixels.stores import Store, first_view
from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Augment, centre, short_side_for
from nearkin.errors import NearkinError
from nearkin.evaluation import Scores
from nearkin.files import Json, read_tensors, write_tensors
from nearkin.methods.base import Method, Step
from nearkin.methods.cut_proxies import cut_parameters
from nearkin.methods.samplers import steps_per_epoch
from nearkin.networks.embedder import channels_last
from nearkin.networks.rank_batch_norm import own_pass
from nearkin.training import checkpoint
from nearkin.training.checkpoint import write_classes, write_snapshot
from nearkin.training.estimate import estimate_words, remaining_seconds, time_steps
from nearkin.training.frozen import FrozenTrunk, pixel_store
from nearkin.training.images import Embedded, OpenImages, embed_images, measure
from nearkin.training.measure_gain import gain_since, write_values
from nearkin.training.model import Model, autocast, embed_store, load_untrained
from nearkin.training.optimiser import (
    checks_without_progress,
    clip_norm,
    lr_factor,
    rates_on_device,
    set_rates,
    set_training,
)
from nearkin.training.plan import Plan
from nearkin.training.random_streams import Stream, stream_seed
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_profile import Profile
from nearkin.training.run_result import Trained, write_result
from nearkin.training.step_graph import OneStep, Record, StepGraph, cuda_graphs
from nearkin.training.test_view import choose_after_training
from nearkin.training.tracking import Tracker
from nearkin.training.weight_average import WeightAverage

Network = Callable[[Tensor], Tensor]

SAVE_SECONDS = 60.0
"""Seconds between checkpoints: at most this much work is lost when the process is killed, unless they take long."""

LONG_SAVE = 3.0
"""Seconds of writing a checkpoint above which the time between them grows in proportion: they take at most 5 %."""


def pause_after(seconds: float) -> float:
    """Seconds until the next checkpoint after one that took so long."""
    return SAVE_SECONDS * max(1.0, seconds / LONG_SAVE)


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """One run: what the loop works with, all ready to use, and how far it is."""

    plan: Plan
    run: RunFolder
    train: OpenImages
    validation: OpenImages | None  # held-out training classes
    test: OpenImages | None  # none if all classes train
    augment: Augment
    model: Model
    compiled: Network  # the model's embedder, compiled if the plan asks for it
    method: Method
    optimiser: torch.optim.Optimizer
    tracker: Tracker
    profile: Profile
    reporter: Reporter
    frozen: FrozenTrunk | None = None  # stores then hold features, and what trains is the head

    def __post_init__(self) -> None:
        self.device = self.model.device
        self.network: Network = self.model.embedder  # what a step calls; after warm-up the compiled one
        size, normalise = self.model.size, self.model.embedder.trunk.normalise
        self.plain = centre(size, normalise, short_side=short_side_for(size))
        self.labels = self.train.images.labels.to(self.device)
        self.base_lr = [group["lr"] for group in self.optimiser.param_groups]
        self.rates = self.base_lr  # of this epoch
        self.per_epoch = steps_per_epoch(len(self.train.images), self.plan.batch)
        self.check_every = self.plan.check_every or self.per_epoch
        self.cut = {id(p) for p in cut_parameters(self.method)}  # of which other ranks have other rows
        self.rng = self._generator("method")
        self.crops = self._generator("crops")
        self.warming_up = True
        self.run_step: OneStep = self._one_step
        if self.plan.uses_graphs:
            rates_on_device(self.optimiser, self.device)
            self.run_step = self.graph(cuda_graphs([self.rng, self.crops]))
        self.losses = torch.zeros(self.per_epoch, device=self.device)  # of this epoch; read at its end
        self.average = WeightAverage(self.model.embedder, self.plan.average) if self.plan.average else None
        self.step = 0
        self.scores: list[float] = []  # of the checks
        self.seconds = 0.0
        self.trained = (0, 0.0)  # images and seconds of whole epochs after warm-up and compilation
        self.timed = False  # whether this epoch counts for them
        self.epoch_began = self.paused = self.shown = 0.0  # clocks: start of epoch, its checks, last status line
        self.kept = False  # a model was kept since the last checkpoint

    @cached_property
    def test_views(self) -> Store:
        """The training images as the test view shows them; features of that are computed when they are asked for."""
        return self.train.store if self.frozen is None else self.frozen.shown(self.train).store

    def _generator(self, name: Stream) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(stream_seed(self.plan.model_seed, name))

    def graph(self, record: Record) -> StepGraph:
        """Return the steps as graphs of the function `record`."""
        note, phase = self.reporter.note, lambda: self.warming_up
        return StepGraph(self._one_step, self.method, self.profile, record, phase=phase, note=note)

    def train_to_end(self) -> Embedded | None:
        """Train from the current step to the end; measure the model that is kept and return the embedded test set."""
        self.tracker.begin(self.run.events() if self.step else [])
        if self.step == 0:
            self._before_first_step()
        began = saved = time.monotonic()
        pause, before = SAVE_SECONDS, self.seconds
        total = self.plan.last_epoch * self.per_epoch
        self._estimate(total)
        batches = self.batches()
        self._begin_epoch()
        profiled = self.profile.training(range(self.step, total), settled=self.plan.warmup * self.per_epoch)
        interrupts = stop_on_interrupt(once=ranks.size() > 1)
        with interrupts as asked, self.reporter.training(total) as status, profiled:
            while self.step < total and not self._out_of_patience():
                if self.step % self.per_epoch == 0:
                    self._begin_epoch()
                self.profile.trace(self.step)
                with self.profile.part("waiting for data"):
                    batch = next(batches)
                self.losses[self.step % self.per_epoch] = self.run_step(*batch)
                self.step += 1
                if self.average is not None and self.averaged > 0:
                    self.average.add(self.averaged)
                self._show_status(status)
                if self.step % self.per_epoch == 0:
                    self._end_epoch()
                if self.step % self.check_every == 0 or self.step == total:
                    with self.profile.part("checks"):
                        self._check()
                if self.step % self.per_epoch == 0:
                    self._snapshot()
                self.seconds = before + time.monotonic() - began
                due = self.kept or time.monotonic() - saved > pause  # by the clock of rank 0
                stop, save = ranks.anywhere(asked.is_set(), ranks.is_first() and due)
                if stop or save:
                    with self.profile.part("saving"):
                        pause = self._save()
                    saved, self.kept = time.monotonic(), False
                if stop:
                    raise KeyboardInterrupt
            with self.profile.part("saving"):
                self._save()
        return self._finish()

    def batches(self) -> Iterator[tuple[Tensor, Pixels]]:
        """Return endless batches from the current step on: row numbers, and the pixels of this rank's rows."""
        asked = self.plan.images_per_class
        rows = self.method.batches(
            self.train.images.labels,
            self.plan.batch,
            seed=self.plan.model_seed,
            start=self.step,
            images_per_class=None if asked < 0 else asked,
        )
        return own_batches(self.train.store, rows, read_ahead=0 if self.method.reads_state else 2)

    def _one_step(self, index: Tensor, pixels: Pixels) -> Tensor:
        part = self.profile.part
        self.optimiser.zero_grad()  # first: a compiled network reuses the memory of its gradients
        index = index.to(self.device, non_blocking=True)
        with part("augmentation"):
            images = channels_last(self._views(index, pixels))
        own = own_pass(self.model.embedder, self.device, self.plan.model_seed, self.step)
        with part("forward"), own, autocast(self.device, self.plan.precision):
            x = self.network(images)
        with part("loss"):
            x = ranks.gather(x, len(index))
            step = Step(x, self.labels[index], self.model.embedder, images, index, self.rng)
            loss = self.method.loss(step)
        with part("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            ranks.average(p.grad for p in self._parameters if p.grad is not None and id(p) not in self.cut)
            self.method.after_backward(self.model.embedder)
        with part("optimiser"):
            self._clip()
            self.optimiser.step()
        with part("state of the method"):
            self.method.after_step(step)
        return loss.detach()

    def _views(self, index: Tensor, pixels: Pixels) -> Tensor:
        """A random view of each image of this rank, but the plain one of those that the method asks for."""
        images = self.augment(pixels, self.crops, len(index))
        if self.method.plain_rows is not None:
            rows = ranks.own_rows(self.method.plain_rows, len(index))
            some = pixels._replace(canvas=pixels.canvas[rows], size=pixels.size[rows])
            images[rows] = self.plain(some) if self.frozen is None else first_view(self.test_views[index[rows]])
        return images

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimiser.param_groups for p in group["params"]]

    def _clip(self) -> None:
        if self.plan.clip_value:
            torch.nn.utils.clip_grad_value_(self._parameters, self.plan.clip_value)
        if self.plan.clip_norm:
            clip_norm(self._parameters, self.plan.clip_norm, self.cut)

    # Between steps.

    @property
    def averaged(self) -> int:
        """The number of steps that are in the mean of the weights."""
        return self.step - self.plan.average_from * self.per_epoch

    def _kept_weights(self) -> contextlib.AbstractContextManager[None]:
        """Let the network have the weights that are measured and kept: their mean if the plan asks for it."""
        return contextlib.nullcontext() if self.average is None or self.averaged <= 0 else self.average.shown()

    def _before_first_step(self) -> None:
        if ranks.is_first():
            self.run.keep_events(0)
        self._log_test(0, "before training")
        self.method.train()
        with self.profile.part("checks"):
            self.method.at_check(self.model.embedder, self._embed, self.labels)
        self._snapshot()

    def _estimate(self, total: int) -> None:
        """Say how long the steps that are left will take, if anybody reads it. Graphs cannot be timed before."""
        if self.reporter.console is not None and self.step < total and not isinstance(self.run_step, StepGraph):
            each = time_steps(self.model, self.train.store, self.augment)
            epochs = total // self.per_epoch
            seconds = remaining_seconds(each, self.plan, epochs=epochs, done=self.step, per_epoch=self.per_epoch)
            seconds /= ranks.size()
            self.reporter.note(estimate_words(seconds, epochs=epochs, steps=total - self.step))

    def _begin_epoch(self) -> None:
        epoch = self.step // self.per_epoch
        warming_up = epoch < self.plan.warmup or self.frozen is not None
        set_training(self.model.embedder, self.model.embedder.trunk, self.plan, warming_up=warming_up)
        self.method.train()
        self.warming_up, self.network = warming_up, self.model.embedder if warming_up else self.compiled
        seen = self.scores[: epoch * self.per_epoch // self.check_every]  # a run resumed within the epoch may have more
        factor = lr_factor(self.plan, epoch, seen)
        self.rates = [lr * factor for lr in self.base_lr]
        set_rates(self.optimiser, self.rates)
        self.method.groups(self.plan.lr * factor)  # for those that move proxies themselves
        # Epochs that are resumed in the middle, or that compile, are not timed.
        self.timed = self.step % self.per_epoch == 0 and epoch > self.plan.warmup
        self.paused, self.epoch_began = 0.0, time.monotonic()

    def _end_epoch(self) -> None:
        loss = self._finite_losses(self.per_epoch).mean().item()  # waits for the device
        seconds = time.monotonic() - self.epoch_began - self.paused
        images = self.per_epoch * self.plan.batch
        if self.timed:
            self.trained = (self.trained[0] + images, self.trained[1] + seconds)
        epoch = self.step // self.per_epoch
        self._log("epoch", epoch=epoch, loss=loss, lr=self.rates[0], seconds=round(seconds, 3))
        self.reporter.epoch(f"epoch {epoch}/{self.plan.last_epoch}  loss {loss:.4f}  {images / seconds:,.0f} images/s")
        if self.plan.evaluate_every and epoch % self.plan.evaluate_every == 0 and epoch < self.plan.last_epoch:
            self._log_test(epoch, f"epoch {epoch}")

    def _check(self) -> None:
        began = time.monotonic()
        score = None
        selector = self.test if self.plan.select == "test" else self.validation
        if selector is not None:
            by = self.plan.select_by
            with self._kept_weights():
                score = ranks.broadcast(self._measure(selector, (by,), "checking")[by])
                self.scores.append(score)
                if self.plan.select != "last" and checks_without_progress(self.scores) == 0:
                    self._keep()
                    self.kept = True
            self._log("check", score=score, on="test" if selector is self.test else "held-out classes")
            self.reporter.epoch(f"step {self.step}  {by} {score:.2f}")
        self.method.at_check(self.model.embedder, self._embed, self.labels, score)
        self.paused += time.monotonic() - began

    def _out_of_patience(self) -> bool:
        return 0 < self.plan.patience <= checks_without_progress(self.scores)

    def _show_status(self, status: Status) -> None:
        now = time.monotonic()
        if self.reporter.watched and now - self.shown > 1:  # reading the loss waits for the device
            within = (self.step - 1) % self.per_epoch
            speed = (within + 1) * self.plan.batch / max(now - self.epoch_began - self.paused, 1e-9)
            score = f" · {self.plan.select_by} {self.scores[-1]:.1f}" if self.scores else ""
            epoch = (self.step - 1) // self.per_epoch + 1
            loss = self._finite_losses(within + 1)[-1].item()
            status(self.step, f"epoch {epoch}/{self.plan.last_epoch} · loss {loss:.3f}{score} · {speed:,.0f} images/s")
            self.shown = now

    def _finite_losses(self, count: int) -> Tensor:
        losses = self.losses[:count].cpu()
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            step = (self.step - 1) // self.per_epoch * self.per_epoch + int(bad[0]) + 1
            exists = self.run.checkpoint.exists()
            saved = f"the last checkpoint is {self.run.checkpoint}" if exists else "nothing is saved yet"
            raise NearkinError(
                f"The loss was {float(losses[bad[0]])} at step {step}: lower the learning rate; {saved}."
            )
        return losses

    def _embed(self, index: Tensor | None = None, *, augment: bool = False) -> Tensor:
        if not augment:
            return self.model.embed_store(self.test_views, index=index, over_ranks=True)
        store, precision = self.train.store, self.plan.precision
        return embed_store(
            self.model.embedder, store, lambda pixels: self.augment(pixels, self.rng), index=index, precision=precision
        )

    def _measure(self, opened: OpenImages, metrics: tuple[str, ...], what: str) -> Scores:
        return measure(self._embed_all(opened, what), metrics, over_ranks=True)

    def _log_test(self, epoch: int, what: str) -> None:
        if self.test is not None:
            with self.profile.part("evaluation"), self._kept_weights():
                embedded = self._embed_all(self.test, what)
                self._log("test", epoch=epoch, scores=measure(embedded, self.plan.metrics, over_ranks=True))
            if not epoch:
                write_values(self.run.before, embedded)

    def _embed_all(self, opened: OpenImages, what: str, *, model: Model | None = None) -> Embedded:
        title = f"embedding ({what})"
        return embed_images(model or self.model, opened, reporter=self.reporter, title=title, over_ranks=True)

    # Files.

    def _log(self, event: str, **content: Any) -> None:
        if ranks.is_first():
            record = {"event": event, "step": self.step, **content}
            self.run.append(record)
            self.tracker.add(record)

    def _keep(self) -> None:
        """Write the current model as the one the run keeps, until a better one replaces it."""
        if ranks.is_first():
            about = self.model.record() | {"step": self.step, "epoch": self.step / self.per_epoch}
            write_tensors(self.run.model, self.model.embedder.state_dict(), about)
        write_classes(self.run.classes, self.method, self.model.names)

    def _snapshot(self) -> None:
        """Write model and method after this epoch if the plan asks for it."""
        if (epoch := self.step // self.per_epoch) in self.plan.snapshot_epochs:
            write_snapshot(self.run, epoch, self.model.embedder, self.method, self.model.names)

    def _state(self) -> checkpoint.State:
        mean = self.average.mean if self.average is not None else {}
        return checkpoint.State(
            self.model.embedder, self.method, self.optimiser, self.losses, self.rng, self.crops, mean
        )

    def _save(self) -> float:
        """Write the checkpoint from which training resumes bit for bit; return the seconds until the next one."""
        began = time.monotonic()
        self._finite_losses(self.step % self.per_epoch or self.per_epoch)
        weights = self.model.embedder.parameters()
        if not torch.nn.utils.get_total_norm(weights, norm_type=math.inf).isfinite():  # waits for the device once
            raise NearkinError(f"The weights are not finite after step {self.step}: lower the learning rate.")
        # Sums on a GPU may depend on the order of threads: what drifted apart must not be found different by a resume.
        ranks.broadcast_tensors(checkpoint.replicated(self._state()))
        about = {
            "step": self.step,
            "scores": self.scores,
            "trained": self.trained,
            "seconds": self.seconds,
            "events": len(self.run.events()),
            "images": len(self.train.images),
            "plan": dataclasses.asdict(self.plan),
            "threads": torch.get_num_threads(),
        }
        if ranks.is_first():
            self.run.sync_log()  # whose lines the checkpoint counts
        checkpoint.save(self.run.checkpoint, self._state(), about)
        return pause_after(time.monotonic() - began)

    def restore(self) -> None:
        """Load the last checkpoint, if there is one."""
        if not self.run.checkpoint.exists():
            return
        tensors, about = read_tensors(self.run.checkpoint, needs=checkpoint.NEEDS)
        checkpoint.check_settings(self.run, self.plan, about.get("plan", {}))  # the first version wrote none
        if about["images"] != len(self.train.images):
            raise NearkinError(
                f"{self.run.path} was trained on {about['images']} images, but {self.plan.data} now has "
                f"{len(self.train.images)}: train again."
            )
        threads = about.get("threads", torch.get_num_threads())
        if self.device.type == "cpu" and threads != torch.get_num_threads():
            self.reporter.note(
                f"This run was started with {threads} threads and resumes with {torch.get_num_threads()}: sums are "
                "taken in another order, so the last digits may differ from an uninterrupted run."
            )
        if checkpoint.CROPS not in tensors:  # in older versions method and crops drew from one generator
            self.crops = self.rng
        checkpoint.restore(self._state(), tensors)
        self.step, self.scores, self.seconds = about["step"], about["scores"], about["seconds"]
        self.trained = (about["trained"][0], about["trained"][1])
        if ranks.is_first():
            self.run.keep_events(about["events"])

    def _before_in_view(self) -> Json:
        """Measure the network before training in the view that was chosen, so that only training is compared."""
        if self.test is None:
            return {}
        untrained = load_untrained(self.run.path, device=str(self.device))
        untrained.space = self.model.space
        embedded = self._embed_all(self.test, "before training", model=untrained)
        write_values(self.run.before, embedded)
        return dict(measure(embedded, self.plan.metrics, over_ranks=True))

    def _finish(self) -> Embedded | None:
        if self.plan.select == "last" or not self.scores:
            with self._kept_weights():
                self._keep()
        ranks.barrier()  # others read the file
        tensors, about = read_tensors(self.run.model)
        self.model.embedder.load_state_dict(tensors)
        before: Json = next((e["scores"] for e in self.run.events() if e["event"] == "test"), {})
        if self.plan.test_view == "auto" and choose_after_training(
            self.run, self.model, self.validation, self.plan.select_by, about=about, reporter=self.reporter
        ):
            if self.test is not None:  # features are of the view that was given
                self.test = self.test._replace(store=pixel_store(self.test))
            before = self._before_in_view()
        with self.profile.part("evaluation"):
            embedded = None if self.test is None else self._embed_all(self.test, "test")
            scores = Scores({}, queries=0, left_out=0)
            if embedded is not None:
                scores = measure(embedded, self.plan.metrics, over_ranks=True)
        self.tracker.add({"event": "kept", "step": about["step"], "scores": scores})
        self.tracker.close()
        gain = None if embedded is None else gain_since(self.run.before, embedded)
        if ranks.is_first():
            images, seconds = self.trained
            trained = Trained(
                method=str(self.method.spec),
                kept_epoch=about["epoch"],
                steps=self.step,
                seconds=self.seconds,
                images_per_second=images / seconds if seconds else None,
                checks=self.scores,
            )
            opened = self.train, self.validation, self.test
            write_result(self.run, self.plan, trained, scores, before, gain, opened=opened, seen=self.model.seen)
        return embedded


def own_batches(store: Store, rows: Iterator[Tensor], read_ahead: int) -> Iterator[tuple[Tensor, Pixels]]:
    """Each batch of row numbers, with the pixels of those that this rank holds."""
    if ranks.size() == 1:
        return store.read_batches(rows, read_ahead)
    begun = deque[Tensor]()

    def own() -> Iterator[Tensor]:
        for index in rows:
            begun.append(index)
            yield index[ranks.share(len(index))]

    return ((begun.popleft(), pixels) for _, pixels in store.read_batches(own(), read_ahead))
