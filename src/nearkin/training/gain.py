"""How a score on the test classes changed by training, with an interval over classes, and what that says."""

from typing import NamedTuple

from nearkin.data.images import counted
from nearkin.files import Json


class Gain(NamedTuple):
    """A score in percent before and after training; the interval (95 %) is that of the difference over classes."""

    metric: str
    classes: int
    before: float
    after: float
    low: float | None  # None for a single class
    high: float | None

    def __str__(self) -> str:
        change = f"{self.metric} before training {self.before:.1f}, after {self.after:.1f}: {_signed(self)}"
        if self.low is None or self.high is None:
            return f"{change}. One class has no interval, so this does not show whether training helped."
        over = f"{change} (95 % interval over {self.classes:,} classes: {self.low:+.1f} to {self.high:+.1f})"
        if self.low > 0:
            return f"{over}. Training helped."
        if self.high < 0:
            return f"{over}. Training made the embeddings worse: lower the learning rate, or train for fewer epochs."
        return f"{over}. These {counted(self.classes, 'class', 'classes')} do not show that training helped."


def _signed(gain: Gain) -> str:
    return f"{gain.after - gain.before:+.1f}"


def read_gain(result: Json) -> Gain | None:
    """Return the gain in a run's result.json."""
    return Gain(**result["gain"]) if result.get("gain") else None
