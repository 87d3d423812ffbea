"""Training steps as CUDA graphs: one launch per step, instead of one per kernel.

A graph repeats the work of the step it was captured from, at the same addresses. So all that changes from step to step
has to be in tensors that stay in place: the batch, which is copied into buffers; weights, gradients, learning rates and
the state of optimiser and method; and random generators, which a graph advances by itself. What else a step depends on
is its kind: the shapes, what trains, and what the method says (`Method.step_kind`). The first steps of a kind run as
usual, then one is captured and replayed. Steps that a method keeps to itself run as usual in between.

Gradients are freed before each step, so the captured step allocates its own, which later replays overwrite.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from nearkin.data.pixels.tiles import Pixels
from nearkin.errors import NearkinError
from nearkin.methods.base import Method
from nearkin.training.run_profile import Profile

WARM_UP = 3
"""Steps of a kind that run before one is captured: they allocate state, choose algorithms, and compile."""

OneStep = Callable[[Tensor, Pixels], Tensor]  # row numbers and pixels of a batch → loss
Replay = Callable[[], object]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
"""Does a piece of work; returns its result, and a function that does it again into the same result."""


@dataclass(frozen=True)
class Recorded:
    """A step that can be replayed."""

    index: Tensor  # the batch it reads
    pixels: Pixels
    loss: Tensor  # what it computes
    replay: Replay


class StepGraph:
    """Does training steps, from a graph where that is possible."""

    def __init__(
        self, step: OneStep, method: Method, profile: Profile, record: Record, phase: Callable[[], Hashable]
    ) -> None:
        self.step, self.method, self.profile, self.record = step, method, profile, record
        self.phase = phase  # what trains now: a graph of one phase does not serve another
        self.kind: Hashable = None  # of the last step that could be captured
        self.seen = 0  # steps of that kind
        self.recorded: Recorded | None = None

    def __call__(self, index: Tensor, pixels: Pixels) -> Tensor:
        """Train on a batch and return its loss, which the next step overwrites."""
        of_method = self.method.step_kind(len(index))
        if of_method is None:
            return self.step(index, pixels)
        kind = (self.phase(), len(index), pixels.canvas.shape, pixels.sides, of_method)
        if kind != self.kind:
            self.kind, self.seen, self.recorded = kind, 0, None
        self.seen += 1
        if self.recorded is not None:
            with self.profile.part("step from a graph"):
                return self._replay(self.recorded, index, pixels)
        if self.seen <= WARM_UP:
            return self.step(index, pixels)
        with self.profile.part("capturing"):
            self.recorded = self._capture(index, pixels)
        return self.recorded.loss

    def _replay(self, recorded: Recorded, index: Tensor, pixels: Pixels) -> Tensor:
        recorded.index.copy_(index, non_blocking=True)
        recorded.pixels.canvas.copy_(pixels.canvas, non_blocking=True)
        recorded.pixels.size.copy_(pixels.size, non_blocking=True)
        recorded.replay()
        self.method.after_replay()
        return recorded.loss

    def _capture(self, index: Tensor, pixels: Pixels) -> Recorded:
        index = index.to(pixels.canvas.device, copy=True)
        pixels = pixels._replace(canvas=pixels.canvas.clone(), size=pixels.size.clone())
        before = self._places()
        try:
            loss, replay = self.record(lambda: self.step(index, pixels))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise NearkinError(
                f"A training step cannot be captured as a CUDA graph ({reason}): leave out graph."
            ) from error
        if moved := [name for name, place in self._places().items() if place != before[name]]:
            raise NearkinError(
                f"The method replaces its state {moved[0]!r} in a step, which a CUDA graph would miss: change it "
                "in place, as by copy_, or leave out graph."
            )
        return Recorded(index, pixels, loss, replay)

    def _places(self) -> dict[str, int]:
        return {name: t.data_ptr() for name, t in self.method.state_dict(keep_vars=True).items()}


def cuda_graphs(generators: Sequence[Generator]) -> Record:
    """Return a function that captures work as a CUDA graph, with draws from these generators and the default one."""

    def record(work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        graph = torch.cuda.CUDAGraph()
        for generator in set(generators):
            graph.register_generator_state(generator)
        # Only this thread is watched: others may copy memory for the next batch.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            result = work()
        graph.replay()  # capturing does none of the work
        return result, graph.replay

    return record


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream other than the default one, which cannot be captured.

    The steps before a capture run there, too: gradients are added up on the stream on which a weight was first used.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)
