"""What one client may ask for, so that the others are served too; and the errors that say so."""

from dataclasses import dataclass

from nearkin.errors import NearkinError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what is accepted. Memory for uploads and decoding follows from them."""

    upload_bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    uploads_bytes: int = 256 * 2**20  # of all uploads at once
    upload_seconds: float = 30.0  # for one upload to arrive
    work_seconds: float = 60.0  # for one answer
    hits: int = 200
    batch: int = 32  # searches that are answered together
    waiting: int = 512  # jobs of a kind that may wait; who comes then is told to come again
    waiting_large: int = 8  # large pictures that may wait, seconds each
    threads: int = 2  # that decode uploads; as many again make thumbnails

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise NearkinError(f"The server's limit {name} is above 0, not {value}.")


class Refused(Exception):  # noqa: N818 (a refusal, with the status that says which)
    """A request that is not answered: a status, a sentence, and perhaps when to come again."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after = status, sentence, retry_after


def busy() -> Refused:
    """What a client is told when all places are taken."""
    return Refused(503, "The server is busy: try again in a second.", retry_after=1)
