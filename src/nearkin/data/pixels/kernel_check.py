"""Whether kernels in Triton run on a device: they need Triton, a C compiler, and a GPU that Triton knows."""

import warnings
from functools import cache

import torch

from nearkin.errors import first_line

try:
    from nearkin.data.pixels.resize_kernel import resize_weights
except ImportError:  # no Triton, which PyTorch brings only where there can be a GPU
    HAVE_TRITON = False
else:
    HAVE_TRITON = True


@cache
def kernels_run(device: torch.device) -> bool:
    """Run one kernel and say whether that works; if not, warn once."""
    if not HAVE_TRITON or device.type != "cuda":
        return False
    try:
        pairs = [torch.ones(1, 2, device=device)] * 4
        resize_weights(pairs, pairs[0][:, 0] > 1, length=512, size=224, count=224, dtype=torch.float16)
    except Exception as error:  # of Triton, of the C compiler, or of the GPU's driver
        warnings.warn(
            f"Kernels for the GPU cannot be compiled ({first_line(error)}), so training is slower. They need a C "
            "compiler such as gcc.",
            stacklevel=2,
        )
        return False
    return True
