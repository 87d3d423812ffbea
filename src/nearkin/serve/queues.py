"""Bounded queues for work outside the event loop. A full queue refuses a job at once."""

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
    """A thread pool with a bounded queue."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.slots = threading.Semaphore(threads + waiting)

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Queue the work, or refuse it."""
        if not self.slots.acquire(blocking=False):
            raise busy()
        future = self.executor.submit(work)
        future.add_done_callback(lambda _: self.slots.release())
        return future

    def close(self) -> None:
        """Finish running jobs and drop waiting ones."""
        self.executor.shutdown(wait=True, cancel_futures=True)


class BatchQueue(Generic[Job, Result]):
    """One thread that answers waiting jobs in batches: ten images take a network little longer than one."""

    def __init__(self, answer: Answer[Job, Result], *, batch: int, waiting: int) -> None:
        self.answer, self.batch = answer, batch
        self.jobs: queue.Queue[tuple[Job, Future[Result]] | None] = queue.Queue(waiting)
        self.closed = False
        self.thread = threading.Thread(target=self._serve, name="search", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> "Future[Result]":
        """Queue a job, or refuse it."""
        future: Future[Result] = Future()
        if self.closed:
            raise busy()
        try:
            self.jobs.put_nowait((job, future))
        except queue.Full:
            raise busy() from None
        return future

    def close(self) -> None:
        """Answer the waiting jobs, then stop."""
        self.closed = True
        self.jobs.put(None)
        self.thread.join()

    def _serve(self) -> None:
        while not self.closed or not self.jobs.empty():
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
        """The next waiting jobs, up to one batch."""
        found = [self.jobs.get()]
        while len(found) < self.batch and not self.jobs.empty():
            found.append(self.jobs.get())  # no other thread takes from the queue
        return [one for one in found if one is not None]


async def finish(future: "Future[Result]", seconds: float) -> Result:
    """Wait for a result. After `seconds` the client is refused, and the job is dropped if it has not started."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError:
        raise Refused(503, "The server took too long to answer: try again later.", retry_after=5) from None


class Budget:
    """Limits the bytes of all uploads in progress. For the event loop's thread only."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes from the budget; they are returned at the end."""
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
