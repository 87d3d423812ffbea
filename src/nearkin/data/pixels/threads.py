"""Worker threads for images. Reading, decoding, resizing and hashing all release Python's global lock."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from nearkin import ranks
from nearkin.data.images import Progress

T = TypeVar("T")
R = TypeVar("R")

_GROUP = 16  # items per task of a thread


def cores() -> int:
    """Return how many processors this process may use: its share of them if it is one of several ranks."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // ranks.on_this_machine())


class Workers:
    """Threads that stop at the next item once `stopped` is set."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(cores(), thread_name_prefix="nearkin")
        self.stopped = threading.Event()

    def submit(self, function: Callable[[T], R], items: Iterable[T]) -> "Future[list[R]]":
        """Apply a function to items in one thread."""
        return self.pool.submit(self._work, function, items)

    def _work(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        done = []
        for item in items:
            if self.stopped.is_set():
                break
            done.append(function(item))
        return done


@contextmanager
def start_workers() -> Iterator[Workers]:
    """Worker threads that are stopped at the end of the context, also after an error or Ctrl-C."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.stopped.set()
        workers.pool.shutdown(wait=True, cancel_futures=True)


def map_in_threads(function: Callable[[T], R], items: Sequence[T], *, progress: Progress = None) -> list[R]:
    """Return the results for all items, in order. The first error stops the work."""
    results: list[R] = []
    with start_workers() as workers:
        groups = [items[start : start + _GROUP] for start in range(0, len(items), _GROUP)]
        for future in [workers.submit(function, group) for group in groups]:
            results += future.result()
            if progress is not None:
                progress(len(results), len(items))
    return results
