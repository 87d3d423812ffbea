"""Values per pair of sample and proxy that are computed one block of columns at a time, and again for the gradient.

With a million proxies every intermediate [B, C] of an objective takes a gigabyte. `Pairs` stands for such a tensor: it
remembers the function that computes its columns. Functions of single pairs, such as sums with a number, give `Pairs`
again; `reduced` computes blocks, reduces each at once and joins the results, and its gradient computes them once more.
Whatever else an objective does with them, such as sorting a row, sees the whole tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nearkin import ranks
from nearkin.errors import NearkinError

By = Literal["row", "column"]

BLOCK = 2**24
"""Pairs per block: 64 MiB in float32, enough work for a GPU to hide how long its kernels take to launch."""

OPERATORS = {"add", "and", "ge", "gt", "invert", "le", "lt", "mul", "ne", "neg", "or", "radd", "rmul", "rsub", "sub"}
OPERATORS |= {"rtruediv", "truediv"}
OF_PAIRS = {"abs", "bitwise_and", "bitwise_not", "bitwise_or", "byte", "clamp", "clamp_max", "clamp_min", "contiguous"}
OF_PAIRS |= {"detach", "div", "double", "eq", "exp", "float", "log", "logical_and", "logical_not", "logical_or", "pow"}
OF_PAIRS |= {"relu", "softplus", "sqrt", "square", "to", "where"} | OPERATORS
"""Functions whose value for a pair depends only on that pair."""

WITHIN_CLASS = ("amax", "any", "mean", "sum")
"""Functions that reduce [B, C, K] to [B, C] if their dimension is −1."""


OWN = -1
"""The number of a further block: the classes of the samples, in which all positives are."""


class Columns(NamedTuple):
    """Where classes are cut into blocks."""

    classes: int
    width: int  # classes per block; the last block may have fewer
    own: Tensor | None = None  # [B] which class each sample is of, for the block OWN
    cut: bool = False  # other ranks have the columns of other classes

    @property
    def numbers(self) -> range:
        return range(-(-self.classes // self.width))

    def narrow(self, t: Tensor, dim: int, number: int) -> Tensor:
        """Block `number` of a tensor with the columns of all classes along a dimension."""
        per_class, start = t.shape[dim] // self.classes, number * self.width
        if number == OWN:
            return t.index_select(dim, self.own_columns(per_class))
        return t.narrow(dim, start * per_class, min(self.width, self.classes - start) * per_class)

    def own_columns(self, per_class: int) -> Tensor:
        """The columns [B·K] of the block OWN."""
        assert self.own is not None
        return (self.own[:, None] * per_class + torch.arange(per_class, device=self.own.device)).flatten()

    def block(self, value: Any, number: int, shape: Sequence[int]) -> Any:
        """Block `number` of an argument of a function of pairs of that shape [B, R, …]; the same without columns."""
        if isinstance(value, Pairs):
            return value.part(number)
        dim = value.ndim - (len(shape) - 1) if isinstance(value, Tensor) else -1
        has_columns = dim >= 0 and value.shape[dim] == shape[1] != 1
        return self.narrow(value, dim, number) if has_columns else value


def cut_columns(rows: int, columns: int, per_class: int) -> Columns | None:
    """How to cut the proxies [C·K] that samples [B] are compared with; None without any, or if two blocks hold all."""
    if not per_class or rows * columns <= 2 * BLOCK or torch.compiler.is_compiling():
        return None
    return Columns(columns // per_class, max(1, BLOCK // (rows * per_class)))


class _Cut(torch.autograd.Function):
    """The blocks of a tensor [B, R, …] and its block OWN; its gradient is put together once, not once per use."""

    @staticmethod
    def forward(whole: Tensor, width: int, own: Tensor) -> tuple[Tensor, ...]:
        return *torch.split(whole, width, dim=1), whole.index_select(1, own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.set_materialize_grads(False)
        ctx.blank = [(t.shape, t.dtype, t.device) for t in output]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        blank = zip(gradients, ctx.blank, strict=True)
        *parts, at_own = (torch.zeros(b[0], dtype=b[1], device=b[2]) if g is None else g for g, b in blank)
        (own,) = ctx.saved_tensors
        return torch.cat(parts, 1).index_add_(1, own, at_own), None, None


class Pairs:
    """Values [B, C·K] or [B, C, K] of pairs, by a function of the number of a block."""

    def __init__(
        self,
        part: Callable[[int], Tensor],
        columns: Columns,
        shape: Sequence[int],
        known: Tensor | None = None,
    ) -> None:
        self.part, self.columns, self.shape, self.known = part, columns, torch.Size(shape), known

    @classmethod
    def of(cls, whole: Tensor, columns: Columns) -> "Pairs":
        """The blocks of a tensor."""
        if columns.own is None:  # one block
            return cls(lambda _: whole, columns, whole.shape, whole)
        per_class = whole.shape[1] // columns.classes
        parts = _Cut.apply(whole, columns.width * per_class, columns.own_columns(per_class))  # type: ignore[no-untyped-call]
        return cls(parts.__getitem__, columns, whole.shape, whole)  # the last is OWN

    def whole(self) -> Tensor:
        """The tensor."""
        if self.columns.cut:
            raise NearkinError(
                "This method compares a sample with all proxies at once, of which each process has only some: leave "
                "out cut_proxies."
            )
        if self.known is not None:
            return self.known
        return torch.cat([self.part(number) for number in self.columns.numbers], 1)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (shape := _shape_by_pair(function.__name__.strip("_"), args)) is not None:
            return columnwise(function, *args, shape=shape, **kwargs)
        return function(*(_whole(a) for a in args), **{name: _whole(a) for name, a in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)
        if not callable(attribute):
            if self.columns.cut and name in ("device", "dtype", "is_cuda"):
                return getattr(self.part(0), name)
            return getattr(self.whole(), name)
        return lambda *args, **options: self.__torch_function__(attribute, (), (self, *args), options)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.__torch_function__(getattr(Tensor, name), (), (self, *args))


for _name in {"getitem", *OPERATORS}:
    setattr(Pairs, f"__{_name}__", _operator(f"__{_name}__"))


def _shape_by_pair(name: str, args: Sequence[Any]) -> Sequence[int] | None:
    """The shape of a result of which a block needs only the same block of the arguments; None if it needs others."""
    if name in OF_PAIRS:  # pairs in blocks are of all samples and references, so nothing else is larger
        return max((a.shape for a in args if isinstance(a, Pairs)), key=len)
    B, R, *K = args[0].shape
    if name in WITHIN_CLASS and K and args[1:] == (-1,):
        return B, R
    if name == "reshape" and args[2:3] == (-1,) and len(args) == 4:  # [B, C·K] to [B, C, K]
        return B, R // args[3], args[3]
    if name == "getitem" and isinstance(args[1], tuple) and isinstance(step := args[1][-1], slice):  # one per class
        return (B, R // step.step) if args[1] == (slice(None), slice(None, None, step.step)) else None
    return None


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Pairs) else value


def columnwise(function: Callable[..., Any], *args: Any, shape: Sequence[int], **kwargs: Any) -> Any:
    """A function of single columns, with a result of that shape; in blocks if an argument is."""
    pairs = next((a for a in args if isinstance(a, Pairs)), None)
    if pairs is None:
        return function(*args, **kwargs)
    columns, with_gradient = pairs.columns, torch.is_grad_enabled()

    def part(number: int) -> Tensor:
        with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
            out: Tensor = function(*(columns.block(a, number, shape) for a in args), **kwargs)
            return out

    return Pairs(part, columns, shape)


def reduced(
    reduce: Callable[..., Tensor], *args: Tensor, by: By, join: Callable[[Tensor], Tensor] = lambda parts: parts.sum(0)
) -> Tensor:
    """Reduce tensors [B, R]; those in blocks one block after the other, whose results per row [n, …] `join` joins."""
    pairs = next((a for a in args if isinstance(a, Pairs)), None)
    if pairs is None:
        return reduce(*args)
    columns, shape = pairs.columns, pairs.shape

    def part(number: int) -> Tensor:
        return reduce(*(columns.block(a, number, shape) for a in args))

    if torch.is_grad_enabled() and len(columns.numbers) > 1:
        parts = [checkpoint(part, n, use_reentrant=False, preserve_rng_state=False) for n in columns.numbers]
    else:
        parts = [part(n) for n in columns.numbers]
    if by == "column":
        return torch.cat(parts)
    whole = join(torch.stack(parts))
    return join(ranks.collect(whole)) if columns.cut else whole
