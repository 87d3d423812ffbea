"""Ranks: the processes that `torchrun` starts, one per GPU. The only module that imports torch.distributed.

Every rank computes the same loss on the whole batch: it embeds its own rows (`share`) and gathers the others. With one
process, or without a process group, all functions return what they are given.

The gradients of a loop in which every rank takes the same loss backwards, and averages the gradients of what all ranks
hold, are those of one process. `gather` returns the sum over ranks to the rows of each; `total` and `spread` belong
together where each rank holds a part of the references: a value that all know goes in through `spread`, sums over all
references come out through `total`.
"""

import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nearkin.errors import NearkinError, first_line

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a rank waits for another one, which may be measuring a large test set or writing files."""


class LostRankError(NearkinError):
    """Another rank has stopped, so that this one cannot go on."""


class ToldError(NearkinError):
    """The error of rank 0, which says so itself, on another rank."""


def size() -> int:
    """The number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if size() > 1 else 0


def is_first() -> bool:
    """Whether this is rank 0, which alone writes files and prints."""
    return rank() == 0


def on_this_machine() -> int:
    """The number of ranks on this machine, which share its memory."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", size())), size())


def local_device(kind: str) -> torch.device:
    """The device of this rank: for "cuda" the GPU that torchrun gives it."""
    number = os.environ.get("LOCAL_RANK")
    return torch.device(f"cuda:{number}" if kind == "cuda" and number is not None else kind)


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets."""


def join() -> None:
    """Join the other processes that torchrun started; without any, or in a process group already, do nothing."""
    started = all(name in os.environ for name in TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1
    if not started or not dist.is_available() or dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        if (device := local_device("cuda")).index in range(torch.cuda.device_count()):
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stopped)
    _call(dist.init_process_group, backend, timeout=PATIENCE)


def leave() -> bool:
    """Leave the process group, at the end of a program; return whether there was one.

    After an error a rank ends without, so that others notice.
    """
    _host_group.cache_clear()
    if size() == 1:
        return False
    dist.destroy_process_group()
    return True


def _stopped(*_: object) -> None:
    """Stop at the signal that torchrun sends to the other ranks when one has stopped."""
    raise _lost("torchrun ended it")


def _lost(reason: str) -> LostRankError:
    return LostRankError(
        f"Rank {rank()} stopped, because another rank did ({reason}): resume from the last checkpoint."
    )


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that waits for the other ranks."""
    try:
        return function(*arguments, **options)
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", first_line(error))  # without a place in its source
        raise _lost(reason.partition(". ")[0]) from error


# Rows of a batch, or columns between classes, that a rank holds.


def shares(count: int, parts: int | None = None) -> list[int]:
    """How many of `count` things each rank holds; they differ by at most 1."""
    parts = size() if parts is None else parts
    ends = [count * (number + 1) // parts for number in range(parts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def share(count: int) -> slice:
    """Which of `count` things this rank holds."""
    before = shares(count)[: rank() + 1]
    return slice(sum(before[:-1]), sum(before))


# Collective operations: every rank has to call them, in the same order, with tensors of the same type.


def gather(x: Tensor, count: int | None = None) -> Tensor:
    """The rows of all ranks, in their order; the gradient returns to the rank that has the row.

    In a loop of your own, `loss = method(nk.ranks.gather(x), nk.ranks.gather(y))` under DistributedDataParallel is the
    loss of the whole batch. Ranks may have different numbers of rows. `count` rows cut by `share` save asking for them.
    """
    if size() == 1:
        return x
    if count is None:
        own = torch.tensor([len(x)], device=x.device)
        rows = [int(n) for n in torch.cat(_all(own, [1] * size()))]
    else:
        rows = shares(count)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return torch.cat(_all(x, rows))
    gathered: Tensor = _Gather.apply(x, rows)  # type: ignore[no-untyped-call]
    return gathered


def _all(x: Tensor, rows: list[int]) -> list[Tensor]:
    """The tensors of all ranks, which have these numbers of rows."""
    padded = _padded(x, max(rows))
    parts = [torch.empty_like(padded) for _ in rows]
    _call(dist.all_gather, parts, padded)
    return [part[:n] for part, n in zip(parts, rows, strict=True)]


def _padded(x: Tensor, count: int) -> Tensor:
    """The rows of a tensor, and zeros up to `count` rows."""
    return torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])]).contiguous() if len(x) < count else x.contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, rows: list[int]) -> Tensor:
        return torch.cat(_all(x, rows))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, list[int]], output: Tensor) -> None:  # noqa: ARG004
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start = sum(ctx.rows[: rank()])
        return total(gradient)[start : start + ctx.rows[rank()]], None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return _reduced(t, dist.ReduceOp.SUM)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return spread(gradient)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return total(gradient)


def total(t: Tensor) -> Tensor:
    """The sum over ranks, which all of them know; the gradient returns to each unchanged."""
    if size() == 1:
        return t
    out: Tensor = _Total.apply(t)  # type: ignore[no-untyped-call]
    return out


def spread(t: Tensor) -> Tensor:
    """A tensor that all ranks know, for use in parts; its gradient is the sum over ranks."""
    if size() == 1:
        return t
    out: Tensor = _Spread.apply(t)  # type: ignore[no-untyped-call]
    return out


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return torch.cat(_all(t[None], [1] * size()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        own: Tensor = _Own.apply(gradient)  # type: ignore[no-untyped-call]
        return own


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t[rank()].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return collect(gradient)


def collect(t: Tensor) -> Tensor:
    """What each rank has, [W, …], for all of them; the gradient of its own part returns to each."""
    if size() == 1:
        return t[None]
    out: Tensor = _Collect.apply(t)  # type: ignore[no-untyped-call]
    return out


def on_host_of_first(t: Tensor, rows: list[int]) -> Tensor:
    """The rows of all ranks, which have these numbers of them, in the memory of rank 0; elsewhere the own rows."""
    if size() == 1:
        return t
    own = t.detach().cpu()
    padded = _padded(own, max(rows))
    parts = [torch.empty_like(padded) for _ in rows] if is_first() else None
    _call(dist.gather, padded, parts, 0, _host_group())
    return own if parts is None else torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def maximum(t: Tensor) -> Tensor:
    """The elementwise maximum over ranks, without a gradient."""
    return t if size() == 1 else _reduced(t.detach(), dist.ReduceOp.MAX)


def _reduced(t: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    out = t.detach().clone(memory_format=torch.contiguous_format)
    _call(dist.all_reduce, out, how)
    return out


def broadcast(value: T) -> T:
    """The value that rank 0 has: any small object that can be pickled."""
    if size() == 1:
        return value
    values = [value]
    _call(dist.broadcast_object_list, values, 0, _host_group(), torch.device("cpu"))
    return values[0]


def anywhere(*flags: bool) -> list[bool]:
    """For each flag, whether it is set on any rank."""
    if size() == 1:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32)
    _call(dist.all_reduce, found, dist.ReduceOp.MAX, _host_group())
    return [bool(flag) for flag in found]


@cache
def _host_group() -> dist.ProcessGroup | None:
    """A group whose tensors are in the host's memory: the usual one if it can, else one more."""
    has_gloo = "gloo" in dist.get_backend_config()
    return None if has_gloo else _call(dist.new_group, backend="gloo", timeout=PATIENCE)


def on_first(function: Callable[[], T]) -> T:
    """Call a function on rank 0 alone; all return its result, or stop with its error."""
    if size() == 1:
        return function()
    answer: tuple[T | None, str | None] = (None, None)
    if is_first():
        try:
            answer = function(), None
        except BaseException as error:
            broadcast((None, str(error) or type(error).__name__))
            raise
    value, error_text = broadcast(answer)
    if error_text is not None:
        raise ToldError(error_text)
    return cast("T", value)


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Replace the contents of the tensors by those of rank 0."""
    if size() > 1:
        for tensor in tensors:
            held = tensor.detach().contiguous()
            _call(dist.broadcast, held, 0, None if held.is_cuda else _host_group())
            tensor.detach().copy_(held)


BUCKET = 2**24
"""Numbers that are averaged at once."""


def average(tensors: Iterable[Tensor]) -> None:
    """Replace the contents of the tensors by their means over ranks."""
    if size() == 1:
        return
    waiting = dict[tuple[torch.dtype, torch.device], list[Tensor]]()
    for tensor in tensors:
        of_kind = waiting.setdefault((tensor.dtype, tensor.device), [])
        if of_kind and sum(t.numel() for t in of_kind) + tensor.numel() > BUCKET:
            _average(of_kind)
            of_kind.clear()
        of_kind.append(tensor)
    for of_kind in waiting.values():
        _average(of_kind)


def _average(tensors: list[Tensor]) -> None:
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    _call(dist.all_reduce, flat)
    flat /= size()
    for tensor, mean in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(mean.view(tensor.shape))


@contextmanager
def own_draws(device: torch.device, *seeds: int) -> Iterator[None]:
    """Draw from a stream of this rank's, such as dropout for its own rows; afterwards all continue from one stream."""
    if size() == 1:
        yield
        return
    digest = hashlib.blake2b(repr((*seeds, rank())).encode(), digest_size=4).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest))
        yield


def barrier() -> None:
    """Wait until all ranks have come here."""
    if size() > 1:
        _call(dist.all_reduce, torch.zeros(()), dist.ReduceOp.SUM, _host_group())


@contextmanager
def first_on_machine() -> Iterator[None]:
    """Let one rank of each machine do this before the others, which then find its files."""
    later = int(os.environ.get("LOCAL_RANK", rank())) > 0
    if later:
        barrier()
    yield
    if not later:
        barrier()


def own_rows(rows: slice, count: int) -> slice:
    """Those of the rows of a batch of `count` that this rank holds, counted from its first one."""
    own, (start, stop, step) = share(count), rows.indices(count)
    first = start + max(0, -(-(own.start - start) // step)) * step
    return slice(first - own.start, max(min(stop, own.stop), first) - own.start, step)
