"""Work on many images at once: threads, since reading, decoding, resizing and hashing all let go of Python's lock."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from nearkin.data.images import Progress

T = TypeVar("T")
R = TypeVar("R")

_GROUP = 16  # images a thread takes at a time


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Worker threads that stop at the next image once they are dismissed."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(cores(), thread_name_prefix="nearkin")
        self.dismissed = threading.Event()

    def give(self, function: Callable[[T], R], items: Iterable[T]) -> "Future[list[R]]":
        """Have one thread apply a function to some items."""
        return self.pool.submit(self._work, function, items)

    def _work(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        done = []
        for item in items:
            if self.dismissed.is_set():
                break
            done.append(function(item))
        return done


@contextmanager
def crew() -> Iterator[Crew]:
    """Worker threads that are gone at the end, whether it comes by success, error or Ctrl-C."""
    workers = Crew()
    try:
        yield workers
    finally:
        workers.dismissed.set()
        workers.pool.shutdown(wait=True, cancel_futures=True)


def each(function: Callable[[T], R], items: Sequence[T], *, progress: Progress = None) -> list[R]:
    """A function's results for all items, in their order; the first error ends it."""
    results: list[R] = []
    with crew() as workers:
        groups = [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]
        for future in [workers.give(function, group) for group in groups]:
            results += future.result()
            if progress is not None:
                progress(len(results), len(items))
    return results
