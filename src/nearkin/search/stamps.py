"""Whether an image file is still the one that was embedded.

A stamp holds the size of a file, when its content and when its entry last changed, and a digest of its content. Only if
the entry alone has changed, as by a copy that keeps the time, is the content read again.
"""

import os
from pathlib import Path

from nearkin.data.pixels.archives import file_of
from nearkin.data.pixels.cache import digest
from nearkin.data.pixels.image_bytes import BadImage, read_bytes


def make_stamp(path: str) -> str | None:
    """The stamp of a file; None if it cannot be read. What changes it later than this call makes it another one."""
    now = _times(path)
    content = _content(path)
    return None if now is None or content is None else f"{now} {content}"


def is_unchanged(stamp: str | None, path: str) -> bool:
    """Whether a file has the content it had when the stamp was made."""
    now = _times(path)
    if stamp is None or now is None:
        return stamp is now
    size, changed, _ = now.split(" ")
    if " " not in stamp:  # the first version compared size and time alone
        return stamp == f"{size}-{changed}"
    times, _, content = stamp.rpartition(" ")
    return times == now or (times.startswith(f"{size} {changed} ") and content == _content(path))


def needs_renewal(stamp: str | None, path: str) -> bool:
    """Whether the stamp of an unchanged file would make the next call read the file again."""
    return stamp is not None and " " in stamp and stamp.rpartition(" ")[0] != _times(path)


def _times(path: str) -> str | None:
    """Size, time of change of the content, and time of change of the entry, which no program can set."""
    try:
        known = os.stat(file_of(path))
    except OSError:
        return None
    return f"{known.st_size} {known.st_mtime_ns} {known.st_ctime_ns}"


def _content(path: str) -> str | None:
    try:
        return digest(read_bytes(Path(path))).hex()
    except BadImage:
        return None
