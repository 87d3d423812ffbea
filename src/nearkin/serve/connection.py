"""Connections that keep no place for nothing: who neither asks nor takes the answer is shown out.

uvicorn waits for a request's head, and for its answer to be taken, as long as it takes. Some hundreds of silent clients
would then use up the process's open files, and nobody else could connect.
"""

import asyncio
import math
import time
from contextlib import suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # for the head of a request to arrive, and between two looks at a connection
LEAST = 16 * 2**10  # bytes of a waiting answer that a client takes between two looks
PLACES = 2000  # connections at once
ACCEPTED = 32  # connections that are let in before those before them are counted
OWN_FILES = ACCEPTED + 96  # that the server itself has open: the index, pictures, libraries


class Punctual(H11Protocol):
    """An HTTP/1.1 connection that is looked at from time to time. When all places are taken, the idlest is closed."""

    look: asyncio.TimerHandle
    idle_since = 0.0
    unsent = math.inf  # bytes of the answer when last looked at

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and wait for a request."""
        if len(self.connections) >= places():
            others = [one for one in self.connections if isinstance(one, Punctual) and one.idle]
            if others:
                idlest = min(others, key=lambda one: one.idle_since)
                idlest.transport.abort()
                self.connections.discard(idlest)  # now: who comes at the same moment takes another's place
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self.look = self.loop.call_later(SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self.look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self.idle_since, self.unsent = time.monotonic(), math.inf

    def _look(self) -> None:
        """Show out who is silent, or takes nothing of what it asked for."""
        unsent = self.transport.get_write_buffer_size()
        silent = self.idle and not unsent and time.monotonic() - self.idle_since >= SECONDS
        if silent or (unsent and self.unsent - unsent < LEAST):
            self.transport.abort()  # closing would wait until what was sent is taken
            return
        self.unsent = unsent or math.inf
        self.look = self.loop.call_later(SECONDS, self._look)


def places() -> int:
    """Connections that there is room for, by the open files that the process may have."""
    try:
        import resource
    except ImportError:  # not a Unix
        return PLACES
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return PLACES if files == resource.RLIM_INFINITY else max(1, min(PLACES, files - OWN_FILES))


def allow_files() -> None:
    """As many open files as the system lets the process have; many systems begin with few."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        wanted = PLACES + OWN_FILES if unlimited else min(PLACES + OWN_FILES, hard)
        if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
