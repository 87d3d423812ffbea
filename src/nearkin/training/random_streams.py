"""The random streams of a run, so that what one of them draws does not move another.

Each stream starts from the seed of the model and its own name. Runs with the same seed thus begin with the same network
and cut the same crops, however many random numbers their methods draw.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Stream = Literal["network", "method", "crops", "training"]
"""Initial weights; initial proxies; crops of the training images; all else, such as stochastic depth."""


def stream_seed(seed: int, name: Stream) -> int:
    """Return the seed of one stream of a run."""
    digest = hashlib.blake2b(f"{name} {seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest)  # 32 bits are all that torch's generator for the CPU takes


@contextmanager
def drawing_from(seed: int, name: Stream) -> Iterator[None]:
    """Draw from one stream within the context; afterwards torch's generator continues where it was."""
    with torch.random.fork_rng(devices=[]):  # networks and methods are built on the CPU
        torch.default_generator.manual_seed(stream_seed(seed, name))
        yield
