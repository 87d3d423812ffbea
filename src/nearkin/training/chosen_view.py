"""The view of test images that a run has chosen, as it records it: its settings, and what it says in words."""

from typing import NamedTuple

from nearkin.data.pixels.views import short_side_for
from nearkin.files import Json


class SquareView(NamedTuple):
    """A square of `size` from an image at `short_side`."""

    size: int
    short_side: int

    @property
    def settings(self) -> Json:
        """The settings that lead to this view."""
        usual = self.short_side == short_side_for(self.size)
        return {"test_size": self.size, "test_crop": 0.0 if usual else self.size / self.short_side}


def view_settings(record: Json) -> Json:
    """Return the settings of a view that was chosen."""
    return {"test_view": "given", **SquareView(record["size"], record["short_side"]).settings}


def describe_view(record: Json) -> str:
    """Say which view was chosen, on what, and what it gained there."""
    (size, short_side, score), *_ = record["scores"]
    best = max(value for *_, value in record["scores"])
    by = f"{record['by']} {best:.2f}; {score:.2f} at {size} px of {short_side}"
    where = f"{record['classes']} held-out training classes"
    return f"{record['size']} px of {record['short_side']}, chosen on {where} ({by})"
