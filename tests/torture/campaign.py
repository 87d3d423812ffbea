"""The frame of the campaign against faults: an attack is a short test that draws its cases from here and counts them.

In an ordinary test run each attack has a few cases. With NEARKIN_TORTURE=1 it has all of them, with 0.25 a quarter.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nearkin.errors import NearkinError

SHARE = float(os.environ.get("NEARKIN_TORTURE", 0))
FULL = SHARE > 0


def number_of_cases(quick: int, full: int) -> int:
    """How many cases of an attack this run has."""
    return max(1, round(SHARE * full)) if FULL else quick


class Attack:
    """One attack: its cases, and how often each outcome was seen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.variant = ""  # shown behind what the attack does, if each variant is a row of its own
        self.outcomes: Counter[str] = Counter()

    def cases(self, quick: int, full: int) -> Iterator[random.Random]:
        """One generator of random numbers per case; a case is the same in every run."""
        for number in range(number_of_cases(quick, full)):
            self.case = number  # shown by pytest if the case fails
            yield random.Random(f"{self.name} {number}")

    def saw(self, outcome: str) -> None:
        """Count a case by its outcome."""
        self.outcomes[outcome] += 1

    def compare(self, act: Callable[[], Any], expected: Any) -> None:
        """The result must be the expected one, or an error of one sentence."""
        try:
            found = act()
        except NearkinError as error:
            check_sentence(str(error))
            self.saw("refused in a sentence")
        else:
            assert found == expected
            self.saw("same result")


def check_sentence(text: str) -> None:
    """An error is one line that ends like a sentence."""
    assert text
    assert "\n" not in text
    assert text.rstrip()[-1] in ".?!", text
    assert "Traceback" not in text


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond `room` bytes, as on a disk that is full."""
    import resource

    known = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, known[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, known)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Change a file: mostly one bit or byte, sometimes more, or its length."""
    changed = bytearray(data)
    place = rng.randrange(len(changed)) if changed else 0
    how = rng.choice(["bit", "bit", "byte", "byte", "zeros", "cut", "longer", "twice", "empty"])
    if how == "bit" and changed:
        changed[place] ^= 1 << rng.randrange(8)
    elif how == "byte" and changed:
        changed[place] = rng.randrange(256)
    elif how == "zeros":
        changed[place : place + 512] = bytes(len(changed[place : place + 512]))
    elif how == "cut":
        del changed[place:]
    elif how == "longer":
        changed += rng.randbytes(rng.randrange(1, 100))
    elif how == "twice":
        changed[place:place] = changed[: rng.randrange(1, 200)]
    elif how == "empty":
        changed.clear()
    return bytes(changed)
