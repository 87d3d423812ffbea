"""A stand-in for CUDA graphs on a CPU: the operations of a piece of work, done again on the same memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
"""Operations for which a GPU would make the host wait, so that they cannot be captured."""


class OpRecorder(TorchDispatchMode):
    """Records every operation with its tensors, as a CUDA graph records kernels with their addresses."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in READS:
            raise RuntimeError(f"the host reads a tensor: {func}")
        out = func(*args, **(kwargs or {}))
        self.done.append((func, tree_map(lambda a: a, args), kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def record_operations(work):
    """Do the work on a CPU as `cuda_graphs` does it on a GPU: return its result, and a function that replays it."""
    recorder = OpRecorder()
    with recorder:
        result = work()
    return result, recorder.replay
