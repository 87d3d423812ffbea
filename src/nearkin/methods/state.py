"""State of methods: modules that never fall below float32, and counters that are also known on the host."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class PreciseModule(nn.Module):
    """A module whose state stays float32 or float64: `.half()` and `.bfloat16()` move it without rounding."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            low = out.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
            return t.to(out.device) if low else out

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


def register_counter(module: nn.Module, name: str) -> None:
    """Register a counter as the buffer `name` and as the number `name_on_host`, which costs no device sync to read."""
    module.register_buffer(name, torch.zeros((), dtype=torch.int64))
    setattr(module, f"{name}_on_host", 0)
    module.register_load_state_dict_post_hook(partial(_read_counter, name=name))  # type: ignore[no-untyped-call]


def count_up(module: nn.Module, name: str) -> None:
    """Add 1 to a counter."""
    module.get_buffer(name).add_(1)
    count_up_on_host(module, name)


def count_up_on_host(module: nn.Module, name: str) -> None:
    """Add 1 to the number of a counter whose buffer a CUDA graph has counted up."""
    setattr(module, f"{name}_on_host", getattr(module, f"{name}_on_host") + 1)


def _read_counter(module: nn.Module, _keys: object, *, name: str) -> None:
    setattr(module, f"{name}_on_host", int(module.get_buffer(name)))


def scrambled(number: Tensor, count: int) -> Tensor:
    """Random int64 numbers [count] that depend only on a number and their position (splitmix64), on any device."""
    z = torch.arange(1, count + 1, device=number.device) + (number << 40)
    z = z * -7046029254386353131
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ (z >> 31 & 0x1FFFFFFFF)
