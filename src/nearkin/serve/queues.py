"""Work beside the event loop, bounded: who comes when all places are taken is told so at once."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from nearkin.serve.guard import Refused, busy

Job = TypeVar("Job")
Result = TypeVar("Result")
Answer = Callable[[list[Job]], Sequence[Result | Exception]]


class Pool:
    """Some threads, and room for so many jobs to wait for them."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.places = threading.Semaphore(threads + waiting)

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Begin the work, or refuse it."""
        if not self.places.acquire(blocking=False):
            raise busy()
        future = self.executor.submit(work)
        future.add_done_callback(lambda _: self.places.release())
        return future

    def close(self) -> None:
        """Finish what runs, drop what waits."""
        self.executor.shutdown(wait=True, cancel_futures=True)


class Desk(Generic[Job, Result]):
    """One thread that answers jobs, those that wait together: a network takes ten images hardly longer than one."""

    def __init__(self, answer: Answer[Job, Result], *, batch: int, waiting: int) -> None:
        self.answer, self.batch = answer, batch
        self.line: queue.Queue[tuple[Job, Future[Result]] | None] = queue.Queue(waiting)
        self.closed = False
        self.thread = threading.Thread(target=self._serve, name="desk", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> "Future[Result]":
        """Stand in line, or be refused."""
        future: Future[Result] = Future()
        if self.closed:
            raise busy()
        try:
            self.line.put_nowait((job, future))
        except queue.Full:
            raise busy() from None
        return future

    def close(self) -> None:
        """Answer who is in line, then stop."""
        self.closed = True
        self.line.put(None)
        self.thread.join()

    def _serve(self) -> None:
        while not self.closed or not self.line.empty():
            waiting = self._next()
            waiting = [(job, future) for job, future in waiting if future.set_running_or_notify_cancel()]
            if not waiting:
                continue
            try:
                results = self.answer([job for job, _ in waiting])
            except Exception as error:
                results = [error] * len(waiting)
            for (_, future), result in zip(waiting, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next(self) -> list[tuple[Job, "Future[Result]"]]:
        """The first in line, and as many of those behind it as fit into a batch."""
        found = [self.line.get()]
        while len(found) < self.batch and not self.line.empty():
            found.append(self.line.get())  # this thread alone takes from the line
        return [one for one in found if one is not None]


async def finish(future: "Future[Result]", seconds: float) -> Result:
    """What the work gave; a client that has waited too long is told so, and the work is dropped if it still waits."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError:
        raise Refused(503, "The server took too long to answer: try again later.", retry_after=5) from None


class Budget:
    """Bytes that all uploads may take at once. Only the event loop's thread uses it."""

    def __init__(self, most: int) -> None:
        self.left = most

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes from the budget; they are given back at the end."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > self.left:
                raise busy()
            self.left -= count
            taken += count

        try:
            yield take
        finally:
            self.left += taken
