"""Worker threads: results in order, and none left over."""

import threading
import time

import pytest

from nearkin.data.pixels import threads
from nearkin.data.pixels.threads import map_in_threads, start_workers


def running_workers() -> int:
    return sum(thread.name.startswith("nearkin") for thread in threading.enumerate())


def test_workers_stop_at_the_next_image() -> None:
    ran: list[int] = []

    def slow(n: int) -> None:
        ran.append(n)
        time.sleep(0.01)

    with start_workers() as workers:
        workers.submit(slow, range(1000))
        while not ran:
            time.sleep(0.001)
    assert len(ran) < 100
    assert running_workers() == 0


def test_map_in_threads_keeps_order_and_stops_at_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GROUP", 2)
    assert map_in_threads(lambda n: n * n, range(50)) == [n * n for n in range(50)]
    assert map_in_threads(str, []) == []
    ran: list[int] = []

    def fail(n: int) -> None:
        ran.append(n)
        time.sleep(0.002)
        if n == 4:
            raise ValueError("four")

    with pytest.raises(ValueError, match="four"):
        map_in_threads(fail, range(1000))
    assert len(ran) < 500
    assert running_workers() == 0
