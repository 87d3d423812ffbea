"""Training steps as CUDA graphs: one launch per step, instead of one per kernel.

A graph repeats the work of the step it was captured from, at the same addresses. So all that changes from step to step
has to be in tensors that stay in place: the batch, which is copied into buffers; weights, gradients, learning rates and
the state of optimiser and method; and random generators, which a graph advances by itself. What else a step depends on
is its kind: the shapes, what trains, and what the method says (`Method.step_kind`). The first steps of a kind run as
usual, then one is captured and replayed. Steps that a method keeps to itself run as usual in between. If a step waits
for the device or replaces its state, as a method of your own may, all steps run as usual.

Gradients are freed before each step, so the captured step allocates its own, which later replays overwrite.
"""

import warnings
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

WAITED = "called a synchronizing"
"""Words of PyTorch's warning that the host waits for the device."""

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
        self,
        step: OneStep,
        method: Method,
        profile: Profile,
        record: Record,
        *,
        phase: Callable[[], Hashable],
        note: Callable[[str], None],
    ) -> None:
        self.step, self.method, self.profile, self.record, self.note = step, method, profile, record, note
        self.phase = phase  # what trains now: a graph of one phase does not serve another
        self.possible = True  # until a step has done what no graph can repeat
        self.kind: Hashable = None  # of the last step that could be captured
        self.seen = 0  # steps of that kind
        self.recorded: Recorded | None = None

    def __call__(self, index: Tensor, pixels: Pixels) -> Tensor:
        """Train on a batch and return its loss, which the next step overwrites."""
        of_method = self.method.step_kind(len(index)) if self.possible else None
        if of_method is None:
            return self.step(index, pixels)
        kind = (self.phase(), len(index), pixels.canvas.shape, pixels.sides, of_method)
        if kind != self.kind:
            self.kind, self.seen, self.recorded = kind, 0, None
        self.seen += 1
        if self.recorded is not None:
            with self.profile.part("step from a graph"):
                return self._replay(self.recorded, index, pixels)
        if self.seen < WARM_UP:
            return self.step(index, pixels)
        if self.seen == WARM_UP:
            return self._rehearse(index, pixels)
        with self.profile.part("capturing"):
            self.recorded = self._capture(index, pixels)
        return self.recorded.loss

    def _rehearse(self, index: Tensor, pixels: Pixels) -> Tensor:
        """Train on a batch as usual, and see whether a graph could repeat that."""
        before = self._places()
        with waits(pixels.canvas.device) as found:
            loss = self.step(index, pixels)
        found += [f"it replaces its state {name!r}" for name, place in self._places().items() if place != before[name]]
        if found:
            self.possible = False
            self.note(f"Steps of this method cannot be CUDA graphs ({found[0]}), so they take longer.")
        return loss

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
        try:
            loss, replay = self.record(lambda: self.step(index, pixels))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise NearkinError(
                f"A training step cannot be captured as a CUDA graph ({reason}): set graph to false (--no-graph)."
            ) from error
        return Recorded(index, pixels, loss, replay)

    def _places(self) -> dict[str, int]:
        return {name: t.data_ptr() for name, t in self.method.state_dict(keep_vars=True).items()}


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Within this context, list where the host waits for the device."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    # Not all that speak of synchronizing: the first use of this mode in a process warns that it is a prototype.
    found += [f"it waits for the GPU in {w.filename}, line {w.lineno}" for w in caught if WAITED in str(w.message)]


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
